"""What workers say, and what follows from it. Pure."""

from __future__ import annotations

import msgspec

from geist_pool.broker import replies
from geist_pool.broker.books import Books
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Adopted, AdoptStore, KillWorker, SendWorker, Unlink
from geist_pool.broker.fleet import Worker, misfit
from geist_pool.broker.jobs import HELD_BY_WORKER, Job
from geist_pool.broker.replies import failed
from geist_pool.broker.schedule import give_context
from geist_pool.errors import (
    Cancelled,
    DeadlineExceeded,
    GeistPoolError,
    ImageDamaged,
    ImageMismatch,
    Internal,
    WorkerLost,
)
from geist_pool.protocol import (
    Announce,
    ContextCreate,
    CreateDone,
    Done,
    Failed,
    Forgotten,
    FromWorker,
    GenerateDone,
    Hello,
    Mapped,
    Pong,
    Result,
    Tokens,
)

_DAMAGE = (ImageDamaged.code, ImageMismatch.code)


def heard(books: Books, name: str, message: FromWorker) -> None:
    if isinstance(message, Hello):
        hello(books, message)
        return
    worker = books.fleet.get(name)
    if worker is None:
        books.counters.stale += 1
        return
    worker.heard = books.now
    if isinstance(message, Pong):
        if message.n == worker.unanswered:
            worker.unanswered = None
    elif isinstance(message, Mapped):
        mapped(books, worker, message)
    elif isinstance(message, Forgotten):
        if not books.directory.forgotten(name, message.context):
            books.counters.stale += 1
    else:
        job = books.jobs.get(message.job)
        if job is None or job.worker != name or job.attempt != message.attempt or job.state not in HELD_BY_WORKER:
            books.counters.stale += 1
        elif isinstance(message, Tokens):
            tokens(books, job, worker, message)
        elif isinstance(message, Done):
            done(books, job, message)
        else:
            not_done(books, job, message)


def condemn(books: Books, worker: Worker, why: str) -> None:
    """To be killed: whatever it still says is believed until it is dead, but it gets nothing new."""
    if not worker.condemned:
        worker.condemned = True
        books.tell(worker.name, "ready", "condemned", why)
        books.log("worker_condemned", worker=worker.name, why=why)
        books.out.append(KillWorker(worker.name, why))


# ---- coming and going


def hello(books: Books, message: Hello) -> None:
    name = message.worker
    if name in books.fleet:  # a second life under the same name; the loop kills the first
        lost(books, name, "replaced")
    why = misfit(message, books.first)
    if why is not None or books.stopping:
        books.log("worker_refused", worker=name, why=why or "stopping")
        books.out.append(KillWorker(name, why or "stopping"))
        return
    books.fleet.add(message, books.now)
    books.tell(name, "new", "ready", f"pid {message.pid}")
    books.log("worker_ready", worker=name, pid=message.pid, tier=message.tier, threads=message.threads, slots=message.slots)
    if books.first is None:
        books.first = message
        books.out.append(AdoptStore(message.fingerprint, message.numerics, message.geometry))
    for entry in sorted(books.directory.sealed(), key=lambda e: e.last_used, reverse=True):
        announce(books, entry, name)


def adopted(books: Books, event: Adopted) -> None:
    taken = 0
    unlink = list(event.unlink)
    for found in event.contexts:
        if books.directory.adopt(found) is None:
            unlink += [name for name in (found.ref.image, found.ref.kv) if name is not None]
        else:
            taken += 1
    if unlink:
        books.out.append(Unlink(tuple(unlink)))
    too_many = books.directory.fit()
    expired = len(books.directory.expire(books.now))
    books.adopted = True
    books.log("adopted", contexts=taken, expired=expired, evicted=too_many, unlinked=len(unlink))
    for entry in books.directory.sealed():
        announce_to_all(books, entry)


def lost(books: Books, name: str, why: str) -> None:
    """A worker is dead: its jobs go to others, unless they have killed too many or nobody wants them."""
    if name not in books.fleet:
        return
    worker = books.fleet.remove(name)
    books.counters.workers_lost += 1
    books.directory.worker_lost(name)
    books.tell(name, "condemned" if worker.condemned else "ready", "lost", why)
    books.log("worker_lost", worker=name, why=why, jobs=len(worker.running))
    for key in sorted(worker.running, key=lambda k: books.jobs[k].assigned, reverse=True):
        job = books.jobs[key]
        job.deaths += 1
        if job.cancel is not None or not job.tickets:
            books.fail_job(job, DeadlineExceeded("the deadline passed") if job.cancel == "deadline" else Cancelled("cancelled"))
        elif job.deaths >= books.config.max_attempts:
            books.fail_job(job, WorkerLost(f"{job.deaths} workers died under this request; it is not tried again"))
        else:
            if job.entry is not None and books.first is not None:
                job.grant = books.directory.regrant(job.entry, books.first.geometry)
            books.counters.retried += 1
            books.move(job, "waiting", f"{name} lost")
            books.queue.push_front(key, job.space)


# ---- contexts on workers


def announce(books: Books, entry: Entry, worker: str) -> None:
    books.directory.mention(worker, entry)
    books.out.append(SendWorker(worker, Announce(books.directory.chain(entry))))


def announce_to_all(books: Books, entry: Entry) -> None:
    for worker in books.fleet:
        if not worker.condemned:
            announce(books, entry, worker.name)


def mapped(books: Books, worker: Worker, message: Mapped) -> None:
    if message.error is None:
        books.directory.mapped(worker.name, message.context)
        return
    books.log("not_mapped", worker=worker.name, context=message.context, code=message.error.code)
    if message.error.code in _DAMAGE and message.context in books.directory:
        drop_damaged(books, books.directory.entry(message.context), message.error.code)


def drop_damaged(books: Books, entry: Entry, code: str) -> None:
    """It would fail everyone who uses it."""
    if entry.state == "sealed":
        books.tell(entry.id, "sealed", "gone", code)
        books.log("context_damaged", context=entry.id, code=code)
        books.directory.drop(entry)


# ---- answers


def tokens(books: Books, job: Job, worker: Worker, message: Tokens) -> None:
    if job.stream is None:
        books.counters.stale += 1
        return
    try:
        chunk = replies.next_chunk(job.stream, message)
    except Internal as error:
        condemn(books, worker, error.message)
        return
    if chunk is not None:
        send_chunk(books, job, chunk)


def send_chunk(books: Books, job: Job, chunk: Result) -> None:
    for ticket in job.tickets:
        books.reply(ticket.route, ticket.request_id, replies.ok(chunk, final=False), json=ticket.json)


def done(books: Books, job: Job, message: Done) -> None:
    books.counters.used(message.usage, books.now - job.assigned)
    try:
        if isinstance(job.request, ContextCreate):
            created(books, job, message)
            return
        for ticket in tuple(job.tickets):
            books.end_ticket(ticket, replies.ok(answer(books, job, message)))
    except GeistPoolError as error:
        books.log("bad_answer", job=job.key, worker=job.worker, why=error.message)
        books.fail_job(job, error)
        return
    books.move(job, "ended", "done")


def answer(books: Books, job: Job, message: Done) -> Result:
    (ticket,) = job.tickets
    if not isinstance(message.result, GenerateDone):
        return replies.score_result(job, ticket, message, books.now)
    if job.stream is not None:
        whole = replies.at_least(job.stream, message.result)
        message = msgspec.structs.replace(message, result=whole)
        chunk = replies.last_chunk(job.stream, whole)
        if chunk is not None:
            send_chunk(books, job, chunk)
    return replies.generate_result(job, ticket, message, books.now)


def created(books: Books, job: Job, message: Done) -> None:
    """The context is sealed: everyone who asked for these tokens gets it, and every worker hears of it."""
    entry = job.entry
    if not isinstance(message.result, CreateDone) or entry is None:
        raise Internal(f"worker {job.worker} answered a create with a {type(message.result).__name__}")
    assert job.worker is not None
    same = books.directory.exact(entry.space, entry.tokens)
    if same is None:
        books.directory.seal(entry, books.now)
        books.directory.mention(job.worker, entry)
        books.tell(entry.id, "granted", "sealed", job.key)
        books.log("context_sealed", context=entry.id, tokens=entry.n_tokens, bytes=entry.own_bytes, worker=job.worker)
    else:  # an identical create that was being cancelled finished after all
        books.directory.abandon(entry)
        entry = job.entry = same
    for ticket in job.tickets:
        give_context(books, ticket, entry)
    info = entry.info()
    for ticket in tuple(job.tickets):
        books.end_ticket(ticket, replies.ok(replies.context_result(job, ticket, info, message, books.now)))
    books.move(job, "ended", "done")
    if same is None:
        announce_to_all(books, entry)


def not_done(books: Books, job: Job, message: Failed) -> None:
    books.log("job_failed", job=job.key, worker=job.worker, code=message.error.code)
    if message.error.code in _DAMAGE and job.base is not None:
        drop_damaged(books, job.base, message.error.code)
    books.end_job(job, failed(message.error), message.error.code)
