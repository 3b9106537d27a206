"""How jobs move on of their own: out of their client's line, into memory, onto a worker. Pure.

`advance` runs after every event, until nothing moves.
"""

from __future__ import annotations

import msgspec

from geist_pool.broker import intake, replies
from geist_pool.broker.books import Books
from geist_pool.broker.content import ID_BYTES, pack_ids, unpack_ids
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import SendWorker
from geist_pool.broker.jobs import Job, Ticket
from geist_pool.broker.placement import choose_worker
from geist_pool.errors import GeistPoolError, StoreFull
from geist_pool.protocol import (
    Assign,
    ContextCreate,
    CreateWork,
    Envelope,
    Generate,
    GenerateWork,
    Geometry,
    Score,
    ScoreWork,
    Work,
)


def advance(books: Books) -> None:
    if not books.open or books.first is None:
        return
    while heads := books.lines.take_heads():
        for key in heads:
            job = books.jobs[key]
            if job.state == "held":
                admit(books, job, books.first.n_ctx)
    reserve(books, books.first.geometry)
    place(books)


# ---- out of the line


def admit(books: Books, job: Job, n_ctx: int) -> None:
    """The job's turn has come and its ids are known: it is checked and takes its place, or ends."""
    request, text = job.request, job.text
    assert text is not None and isinstance(request, ContextCreate | Generate | Score)
    suffix = pack_ids(text.tokens)
    job.tokens = suffix if job.base is None else job.base.tokens + suffix
    try:
        n_base = 0 if job.base is None else job.base.n_tokens
        intake.check_length(request, n_base + len(text.tokens), text, n_ctx)
    except GeistPoolError as error:
        books.fail_job(job, error)
        return
    if not isinstance(request, ContextCreate):
        books.move(job, "waiting")
        books.queue.push(job.key, job.space)
        return
    exists = books.directory.exact(job.space, job.tokens)
    if exists is not None:
        for ticket in tuple(job.tickets):
            give_context(books, ticket, exists)
            books.end_ticket(ticket, replies.ok(replies.existing_result(exists.info(), ticket, text.join, books.now)))
        books.move(job, "ended", "exists")
        return
    other = books.making.get((job.space, job.tokens))
    if other is not None:
        join(job, books.jobs[other])
        books.move(job, "ended", f"joined {other}")
        return
    if job.base is None:
        find_base(books, job)
    books.share(job)
    books.move(job, "reserving")


def join(job: Job, other: Job) -> None:
    """Identical creates share one job: the tickets of the later one wait for the earlier one."""
    for ticket in job.tickets:
        ticket.job, ticket.created = other.key, False
        other.tickets.append(ticket)
    job.tickets = []


def find_base(books: Books, job: Job) -> None:
    """The longest context that the prompt begins with, if there is one."""
    base, job.mismatch = books.directory.longest_prefix(job.space, job.tokens)
    if base is not None:
        books.lease(job, base)


def give_context(books: Books, ticket: Ticket, entry: Entry) -> None:
    """A create's wishes for the context that it gets: name, pin, time to live."""
    request = ticket.request
    assert isinstance(request, ContextCreate)
    expires = None if request.ttl_s is None else books.now + request.ttl_s
    books.directory.keep(entry, pin=request.pin, expires=expires, now=books.now)
    if request.name is not None:
        books.directory.bind(request.name, entry)


# ---- into memory


def reserve(books: Books, geometry: Geometry) -> None:
    """Grants memory in order of arrival; the first one that has to wait for memory keeps the others waiting too."""
    while books.reserving:
        job = books.jobs[books.reserving[0]]
        if job.grant is None:
            job.grant = books.directory.plan(envelope_of(books, job), job.base, geometry)
        needed = job.grant.ref.image_bytes + job.grant.ref.kv_bytes
        try:
            if not books.directory.make_room(needed):
                return
        except StoreFull as error:
            books.log("store_full", job=job.key, needed=needed, used=books.directory.used, limit=books.directory.limit)
            books.fail_job(job, error)
            continue
        job.entry = books.directory.grant(job.grant, job.tokens, job.base)
        books.move(job, "waiting")
        books.queue.push(job.key, job.space)


def envelope_of(books: Books, job: Job) -> Envelope:
    """What the store keeps in front of the image. Block figures and parent are filled in by the directory."""
    request, text = job.request, job.text
    assert isinstance(request, ContextCreate) and text is not None
    return Envelope(
        id=books.new_context_id(),
        name=request.name,
        space=job.space,
        parent=None,
        created=books.now,
        ttl_s=request.ttl_s,
        pin=request.pin,
        n_tokens=len(job.tokens) // ID_BYTES,
        first_block=0,
        n_blocks=0,
        messages=text.messages,
        template_args=text.template_args,
    )


# ---- onto a worker


def place(books: Books) -> None:
    while books.fleet.has_room and (key := books.queue.pop()) is not None:
        job = books.jobs[key]
        if job.base is None and not isinstance(job.request, ContextCreate):
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
    chain = () if job.base is None else books.directory.chain(job.base)
    if job.base is not None:
        books.directory.mention(name, job.base)
    books.out.append(SendWorker(name, Assign(job=job.key, attempt=job.attempt, chain=chain, work=work_of(books, job))))


def work_of(books: Books, job: Job) -> Work:
    request, text = job.request, job.text
    assert text is not None
    n_base = 0 if job.base is None else len(job.base.tokens)
    tokens = unpack_ids(job.tokens[n_base:])
    if isinstance(request, ContextCreate):
        assert job.grant is not None
        return CreateWork(tokens=tokens, grant=job.grant)
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
    )
