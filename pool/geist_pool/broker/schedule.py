"""How jobs move on of their own: out of their client's line, into memory, onto a worker. Pure.

`advance` runs after every event, until nothing moves.
"""

from __future__ import annotations

import msgspec

from geist_pool.broker import intake, replies
from geist_pool.broker.books import Books
from geist_pool.broker.content import ID_BYTES, pack_ids, unpack_ids
from geist_pool.broker.entries import Entry, More
from geist_pool.broker.events import MakeDirectory, SendWorker
from geist_pool.broker.grants import with_answer, with_place_for_answer
from geist_pool.broker.jobs import Job, Ticket
from geist_pool.broker.placement import choose_worker
from geist_pool.broker.saved import directory_of
from geist_pool.broker.story import request_name
from geist_pool.errors import GeistPoolError, StoreFull
from geist_pool.protocol import (
    Assign,
    ContextCreate,
    ContextLoad,
    ContextSave,
    CreateWork,
    Envelope,
    Generate,
    GenerateWork,
    Geometry,
    Hello,
    LoadWork,
    Message,
    Publish,
    Said,
    SaveWork,
    Score,
    ScoreWork,
    Work,
    error_body,
)
from geist_pool.store import layout


def advance(books: Books) -> None:
    if not books.open or books.first is None:
        return
    while heads := books.lines.take_heads():
        for key in heads:
            job = books.jobs[key]
            if job.state == "held":
                admit(books, job, books.first)
    reserve(books, books.first.geometry)
    place(books)


# ---- out of the line


def admit(books: Books, job: Job, first: Hello) -> None:
    """The job's turn has come and its ids are known: it is checked and takes its place, or ends."""
    request = job.request
    try:
        if isinstance(request, ContextLoad):
            assert job.head is not None
            intake.check_saved(request, job.head, first.fingerprint, first.n_ctx)
        elif not isinstance(request, ContextSave):
            check_prompt(job, first.n_ctx)
    except GeistPoolError as error:
        books.fail_job(job, error)
        return
    if isinstance(request, ContextCreate):
        admit_create(books, job)
    elif job.makes_context:
        if isinstance(request, Generate) and job.base is None:
            find_base(books, job)
        books.move(job, "reserving")
    else:
        enqueue(books, job)


def check_prompt(job: Job, n_ctx: int) -> None:
    """Puts context and suffix together. Raises what is wrong with the whole."""
    request, text = job.request, job.text
    assert text is not None and isinstance(request, ContextCreate | Generate | Score)
    suffix = pack_ids(text.tokens)
    job.tokens = suffix if job.base is None else job.base.tokens + suffix
    intake.check_length(request, len(job.tokens) // ID_BYTES, text, n_ctx)


def admit_create(books: Books, job: Job) -> None:
    exists = books.directory.exact(job.space, job.tokens)
    if exists is not None:
        for ticket in tuple(job.tickets):
            give_context(books, job, ticket, exists)
            join_kind = None if job.text is None else job.text.join
            books.end_ticket(ticket, replies.ok(replies.existing_result(exists.info(), ticket, join_kind, books.now)))
        books.move(job, "ended", "exists")
        return
    other = books.making.get((job.space, job.tokens))
    if other is not None:
        join(books, job, books.jobs[other])
        books.move(job, "ended", f"joined {other}")
        return
    if job.base is None:
        find_base(books, job)
    books.share(job)
    books.move(job, "reserving")


def enqueue(books: Books, job: Job) -> None:
    books.move(job, "waiting")
    books.queue.push(job.key, job.space)


def join(books: Books, job: Job, other: Job) -> None:
    """Identical creates share one job: the tickets of the later one wait for the earlier one."""
    for ticket in job.tickets:
        ticket.job, ticket.created, ticket.text = other.key, False, job.text
        other.tickets.append(ticket)
        books.tell("request", request_name(ticket.request_id), "received", "joined", space=job.space, job=other.key)
    job.tickets = []


def find_base(books: Books, job: Job) -> None:
    """The longest context that the prompt begins with, if there is one."""
    base, job.mismatch = books.directory.longest_prefix(job.space, job.tokens)
    if base is not None:
        books.lease(job, base)


def give_context(books: Books, job: Job, ticket: Ticket, entry: Entry) -> None:
    """A request's wishes for the context that it gets: name, pin, time to live; and what it knows of it: its messages."""
    wish = wishes(job, ticket)
    expires = None if wish.ttl_s is None else books.now + wish.ttl_s
    books.directory.keep(entry, pin=wish.pin, expires=expires, now=books.now)
    if wish.name is not None:
        books.directory.bind(wish.name, entry)
    text = ticket.text or (job.text if isinstance(job.request, ContextCreate) else None)
    if text is not None:
        books.directory.learn(entry, text.messages, text.template_args)


def wishes(job: Job, ticket: Ticket) -> Publish:
    request = ticket.request
    if isinstance(request, Generate):
        assert request.publish is not None
        return request.publish
    assert isinstance(request, ContextCreate | ContextLoad)
    name = request.name
    if isinstance(request, ContextLoad) and name is None and job.head is not None:
        name = job.head.envelope.name
    return Publish(name=name, ttl_s=request.ttl_s, pin=request.pin)


# ---- into memory


def reserve(books: Books, geometry: Geometry) -> None:
    """Grants memory in order of arrival; the first one that has to wait for memory keeps the others waiting too."""
    while books.reserving:
        job = books.jobs[books.reserving[0]]
        if job.grant is None:
            envelope = envelope_of(books, job)
            job.grant = books.directory.plan(envelope, job.base, geometry, more=job.more)
        needed = job.grant.ref.image_bytes + job.grant.ref.kv_bytes
        try:
            if not books.directory.make_room(needed, job.space):
                return
        except StoreFull as error:
            books.log("store_full", job=job.key, needed=needed, used=books.directory.used, limit=books.directory.limit)
            cannot_keep(books, job, error)
            continue
        job.entry = books.directory.grant(job.grant, job.tokens, job.base, job.more)
        enqueue(books, job)


def cannot_keep(books: Books, job: Job, error: StoreFull) -> None:
    """No memory for its context: a generate answers without keeping it, what only makes a context ends."""
    if isinstance(job.request, Generate) and job.answer is None:
        job.publish_error = error_body(error)
        books.give_up_grant(job)
        enqueue(books, job)
    else:
        books.fail_job(job, error)


def envelope_of(books: Books, job: Job) -> Envelope:
    """What the store keeps in front of the image. Block figures and ancestors are filled in by the directory; sets `job.more`."""
    request, text = job.request, job.text
    wish = wishes(job, job.tickets[0])
    messages: tuple[Message, ...] | None
    n_tokens, job.more = len(job.tokens) // ID_BYTES, None
    if isinstance(request, ContextLoad):
        assert job.head is not None
        messages, template_args = job.head.envelope.messages, job.head.envelope.template_args
        n_tokens = job.head.n_tokens
    else:
        assert text is not None
        messages, template_args = text.messages, text.template_args
    if isinstance(request, Generate):
        # An answer behind anything but messages is no turn of its own.
        messages = None if messages is None or request.messages is None else with_place_for_answer(messages)
        if job.answer is None:
            n_bytes = 3 * request.max_tokens * books.config.token_bytes if messages is not None else 0
            job.more = More(tokens=request.max_tokens, text_bytes=n_bytes)  # three bytes for one that is no UTF-8
        elif messages is not None:
            messages = with_answer(messages, replies.text_of(job.answer.message.result.data))  # type: ignore[union-attr]
    return Envelope(
        id=books.new_context_id(),
        name=wish.name,
        space=job.space,
        parent=None,
        created=books.now,
        ttl_s=wish.ttl_s,
        pin=wish.pin,
        n_tokens=n_tokens,
        first_block=0,
        n_blocks=0,
        messages=messages,
        template_args=template_args if messages is not None else {},
    )


# ---- onto a worker


def place(books: Books) -> None:
    while len(books.queue) and books.fleet.has_room and (key := books.queue.pop()) is not None:
        job = books.jobs[key]
        if job.base is None and job.entry is None and isinstance(job.request, Generate | Score):
            find_base(books, job)
        worker = choose_worker(books.fleet.candidates(job.base))
        assert worker is not None
        assign(books, job, worker)


def assign(books: Books, job: Job, name: str) -> None:
    worker = books.fleet.get(name)
    assert worker is not None
    job.attempt += 1
    job.worker, job.assigned = name, books.now
    worker.assigned = books.now
    worker.running.add(job.key)
    books.move(job, "assigned", name)
    if job.answer is None:
        books.counters.queue_us += sum(max(0, round((books.now - t.arrived) * 1e6)) for t in job.tickets)
    chain = () if job.base is None else books.directory.chain(job.base)
    if job.base is not None:
        books.directory.mention(name, job.base)
    if isinstance(job.request, ContextSave):
        books.out.append(MakeDirectory(directory_of(books.config.saved_dir, job.space)))
    books.out.append(SendWorker(name, Assign(job=job.key, attempt=job.attempt, chain=chain, work=work_of(books, job))))


def work_of(books: Books, job: Job) -> Work:
    request, text = job.request, job.text
    if isinstance(request, ContextLoad):
        assert job.grant is not None
        return LoadWork(path=job.path, grant=job.grant)
    if isinstance(request, ContextSave):
        return SaveWork(path=job.path, envelope=saved_envelope(job))
    n_base = 0 if job.base is None else len(job.base.tokens)
    tokens = unpack_ids(job.tokens[n_base:])
    if isinstance(request, ContextCreate) or job.answer is not None:
        assert job.grant is not None
        return CreateWork(tokens=tokens, grant=job.grant)
    assert text is not None
    if isinstance(request, Score):
        return ScoreWork(tokens=tokens, labels=text.label_tokens)
    assert isinstance(request, Generate)
    return GenerateWork(
        tokens=tokens,
        max_tokens=request.max_tokens,
        sampling=msgspec.structs.replace(request.sampling, seed=job.seed),
        stop=tuple(stop.encode() for stop in request.stop),
        eog=() if request.ignore_eog else books.config.eog,
        stream=request.stream,
        logprobs=request.logprobs,
        n=request.n,
        grant=job.grant,
        said=said(job, request),
    )


def said(job: Job, request: Generate) -> tuple[Said, ...]:
    """What an attempt that died has streamed: the next one goes on behind it, since it would draw the same."""
    streams = job.streams or []
    if not any(s.tokens for s in streams):
        return ()
    with_logprobs = request.logprobs is not None
    return tuple(Said(tuple(s.tokens), tuple(s.logprobs) if with_logprobs else None) for s in streams)


def saved_envelope(job: Job) -> Envelope:
    """As the context is now, without ancestors: a file holds all its blocks."""
    entry = job.base
    assert entry is not None
    return msgspec.structs.replace(
        entry.envelope,
        name=entry.names[-1] if entry.names else None,
        pin=entry.pinned,
        parent=None,
        first_block=0,
        n_blocks=layout.whole_blocks(entry.n_tokens),
        chain=(),
    )
