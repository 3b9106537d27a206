"""What workers say, and what follows from it. Pure."""

from __future__ import annotations

import msgspec

from geist_pool.broker import bindings, keeping, replies
from geist_pool.broker.books import Books
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Adopted, AdoptStore, KillWorker, Unlink
from geist_pool.broker.fleet import Worker, misfit
from geist_pool.broker.jobs import HELD_BY_WORKER, Answer, Job, Ticket
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
    ContextLoad,
    ContextSave,
    CreateDone,
    Done,
    Failed,
    Forgotten,
    FromWorker,
    Generate,
    GenerateDone,
    Hello,
    LoadDone,
    Mapped,
    Pong,
    Result,
    SavedInfo,
    SaveDone,
    SavedResult,
    Score,
    ScoreDone,
    Tokens,
    error_body,
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
        worker.pong = message
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
            done(books, job, worker, message)
        else:
            not_done(books, job, message)


def condemn(books: Books, worker: Worker, why: str) -> None:
    """To be killed: whatever it still says is believed until it is dead, but it gets nothing new."""
    if not worker.condemned:
        worker.condemned = True
        books.tell("worker", worker.name, "ready", "condemned", why)
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
    books.counters.worker_restarts += books.fleet.add(message, books.now)
    books.tell("worker", name, "new", "ready", f"pid {message.pid}")
    books.log("worker_ready", worker=name, pid=message.pid, tier=message.tier, threads=message.threads, slots=message.slots)
    if books.first is None:
        books.first = message
        books.out.append(AdoptStore(message.fingerprint, message.numerics, message.geometry))
    for entry in sorted(books.directory.sealed(), key=lambda e: e.last_used, reverse=True):
        keeping.announce(books, entry, name)


def adopted(books: Books, event: Adopted) -> None:
    taken: list[Entry] = []
    unlink = list(event.unlink)
    for found in event.contexts:
        entry = books.directory.adopt(found)
        if entry is None:
            # Its blocks may be those of a context that is here, if it is here itself.
            kv = None if found.envelope.id in books.directory else found.ref.kv
            unlink += [name for name in (found.ref.image, kv) if name is not None]
        else:
            taken.append(entry)
    bindings.restore(books.directory, taken, event.bindings)
    if unlink:
        books.out.append(Unlink(tuple(unlink)))
    too_many = books.directory.fit()
    expired = len(books.directory.expire(books.now))
    books.adopted = True
    books.log("adopted", contexts=len(taken), expired=expired, evicted=too_many, unlinked=len(unlink))
    for entry in books.directory.sealed():
        keeping.announce_to_all(books, entry)


def lost(books: Books, name: str, why: str) -> None:
    """A worker is dead: its jobs go to others, unless they have killed too many or nobody wants them."""
    if name not in books.fleet:
        return
    worker = books.fleet.remove(name)
    books.counters.lost(worker.pong)
    books.directory.worker_lost(name)
    books.tell("worker", name, "condemned" if worker.condemned else "ready", "lost", why)
    books.log("worker_lost", worker=name, why=why, jobs=len(worker.running))
    for key in sorted(worker.running, key=lambda k: books.jobs[k].assigned, reverse=True):
        job = books.jobs[key]
        job.deaths += 1
        if job.cancel is not None or not job.tickets:
            books.fail_job(job, called_off(job.cancel))
        elif job.deaths >= books.config.max_attempts:
            books.fail_job(job, WorkerLost(f"{job.deaths} workers died under this request; it is not tried again"))
        else:
            if job.entry is not None and books.first is not None:
                job.grant = books.directory.regrant(job.entry, books.first.geometry)
            books.counters.retried += 1
            books.move(job, "waiting", f"{name} lost")
            books.queue.push_front(key, job.space)


# ---- contexts on workers


def mapped(books: Books, worker: Worker, message: Mapped) -> None:
    if message.error is None:
        books.directory.mapped(worker.name, message.context)
        return
    if message.context not in books.directory or books.directory.entry(message.context).state == "gone":
        return  # it was dropped before the worker came to it
    books.log("not_mapped", worker=worker.name, context=message.context, code=message.error.code)
    if message.error.code in _DAMAGE:
        drop_damaged(books, books.directory.entry(message.context), message.error.code)


def drop_damaged(books: Books, entry: Entry, code: str) -> None:
    """It would fail everyone who uses it."""
    if entry.state == "sealed":
        books.tell("context", entry.id, "sealed", "gone", code, space=entry.space)
        books.log("context_damaged", context=entry.id, code=code)
        books.directory.drop(entry, "damaged")


# ---- answers


def tokens(books: Books, job: Job, worker: Worker, message: Tokens) -> None:
    if job.streams is None or job.answer is not None:
        books.counters.stale += 1
        return
    try:
        chunk = replies.next_chunk(job.streams, message)
    except Internal as error:
        condemn(books, worker, error.message)
        return
    if chunk is not None:
        send_chunk(books, job, chunk)


def send_chunk(books: Books, job: Job, chunk: Result) -> None:
    for ticket in job.tickets:
        if ticket.left is None:
            books.reply(ticket.route, ticket.request_id, replies.ok(chunk, final=False), json=ticket.json)


def done(books: Books, job: Job, worker: Worker, message: Done) -> None:
    worker.done += 1
    books.counters.used(job.space, message.usage, message.timings, books.now - job.assigned)
    try:
        if type(message.result) is not expected(job):
            raise Internal(f"worker {job.worker} answered a {expected(job).__name__} with a {type(message.result).__name__}")
        if isinstance(message.result, GenerateDone):
            generated(books, job, message, message.result)
        elif job.makes_context:
            made(books, job, message)
        else:
            results = [(ticket, plain_result(books, job, ticket, message)) for ticket in job.tickets]
            for ticket, result in results:
                books.end_ticket(ticket, replies.ok(result))
            books.move(job, "ended", "done")
    except GeistPoolError as error:
        books.log("bad_answer", job=job.key, worker=job.worker, why=error.message)
        books.fail_job(job, error)


def expected(job: Job) -> type[CreateDone | GenerateDone | ScoreDone | SaveDone | LoadDone]:
    request = job.request
    if isinstance(request, Generate) and job.answer is None:
        return GenerateDone
    if isinstance(request, Score):
        return ScoreDone
    if isinstance(request, ContextSave):
        return SaveDone
    return LoadDone if isinstance(request, ContextLoad) else CreateDone


def plain_result(books: Books, job: Job, ticket: Ticket, message: Done) -> Result:
    if isinstance(message.result, ScoreDone):
        return replies.score_result(job, ticket, message, books.now)
    assert isinstance(message.result, SaveDone) and job.base is not None and books.first is not None
    return SavedResult(
        SavedInfo(
            saved=job.saved,
            space=job.space,
            n_tokens=job.base.n_tokens,
            bytes=message.result.bytes,
            written=books.now,
            fingerprint=books.first.fingerprint,
        )
    )


def made(books: Books, job: Job, message: Done) -> None:
    """A context is sealed: everyone who asked for these tokens gets it, and every worker hears of it."""
    if isinstance(message.result, LoadDone):
        keeping.loaded(job, message.result)
    entry, new = keeping.sealed(books, job)
    info = entry.info()
    for ticket in tuple(job.tickets):
        result: Result
        if job.answer is not None:
            answer = replace_message(job.answer, keeping.together(job.answer.message, message))
            result = replies.generate_result(job, ticket, answer, books.now, published=info)
        else:
            result = replies.context_result(job, ticket, info, message, books.now, new=new)
        books.end_ticket(ticket, replies.ok(result))
    books.move(job, "ended", "done")
    if new:
        keeping.announce_to_all(books, entry)


def replace_message(answer: Answer, message: Done) -> Answer:
    return Answer(message, answer.worker, answer.attempts, answer.assigned, answer.context)


def generated(books: Books, job: Job, message: Done, result: GenerateDone) -> None:
    """An answer is there; with `publish` its context too, or it is computed now, or it cannot be kept."""
    replies.check_samples(job, result)
    if job.streams is not None:
        result = replies.at_least(job.streams, result)
        message = msgspec.structs.replace(message, result=result)
        for chunk in replies.last_chunks(job.streams, result):
            send_chunk(books, job, chunk)
    answer = keeping.answer_of(job, message)
    entry: Entry | None = None
    new = False
    if job.makes_context:
        if result.published is not None:
            try:
                keeping.measured(books, job, result, result.published)
                entry, new = keeping.sealed(books, job)
            except Internal as error:
                books.log("bad_answer", job=job.key, worker=job.worker, why=error.message)
                job.publish_error = error_body(error)
        elif result.publish_error is not None or result.publish_error is not None:
            job.publish_error = result.publish_error
        elif job.cancel is not None or result.finish_reason in ("cancelled", "deadline"):
            job.publish_error = error_body(called_off(job.cancel or result.finish_reason))
        else:
            job.answer = answer
            keeping.compute_from_text(books, job)
            return
    info = None if entry is None else entry.info()
    for ticket in tuple(job.tickets):
        reply = replies.generate_result(job, ticket, answer, books.now, published=info, publish_error=job.publish_error)
        books.end_ticket(ticket, replies.ok(reply))
    books.move(job, "ended", "done")
    if entry is not None and new:
        keeping.announce_to_all(books, entry)


def called_off(why: str | None) -> Cancelled | DeadlineExceeded:
    if why == "deadline":
        return DeadlineExceeded("the request's deadline passed")
    return Cancelled("the request was cancelled")


def not_done(books: Books, job: Job, message: Failed) -> None:
    books.log("job_failed", job=job.key, worker=job.worker, code=message.error.code)
    if message.error.code in _DAMAGE and job.base is not None:
        drop_damaged(books, job.base, message.error.code)
    books.fail_job(job, message.error)
