"""What a worker has published becomes a context. Pure."""

from __future__ import annotations

import msgspec

from geist_pool.broker import replies
from geist_pool.broker.books import Books
from geist_pool.broker.content import ID_BYTES, pack_ids
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import SendWorker, StartText
from geist_pool.broker.jobs import Answer, Job
from geist_pool.broker.schedule import give_context
from geist_pool.broker.text_types import TextJob
from geist_pool.errors import Internal
from geist_pool.protocol import Announce, ContextRef, Done, GenerateDone, LoadDone
from geist_pool.store import layout


def announce(books: Books, entry: Entry, worker: str) -> None:
    books.directory.mention(worker, entry)
    books.out.append(SendWorker(worker, Announce(books.directory.chain(entry))))


def announce_to_all(books: Books, entry: Entry) -> None:
    for worker in books.fleet:
        if not worker.condemned:
            announce(books, entry, worker.name)


def sealed(books: Books, job: Job) -> tuple[Entry, bool]:
    """The context that the job's worker has finished, as the job's requests want it; True if it is new and to be announced."""
    entry = job.entry
    assert entry is not None and job.worker is not None
    same = books.directory.exact(entry.space, entry.tokens)
    if same is None:
        books.directory.seal(entry, books.now)
        books.directory.mention(job.worker, entry)
        books.tell("context", entry.id, "granted", "sealed", space=entry.space, job=job.key, worker=job.worker)
        books.log("context_sealed", context=entry.id, tokens=entry.n_tokens, bytes=entry.own_bytes, worker=job.worker)
    else:  # another job made the same meanwhile
        books.directory.abandon(entry)
        books.directory.learn(same, entry.messages, entry.template_args)
        books.tell("context", entry.id, "granted", "gone", f"is {same.id}", space=entry.space, job=job.key)
        entry = job.entry = same
    for ticket in job.tickets:
        give_context(books, job, ticket, entry)
    return entry, same is None


def loaded(job: Job, message: LoadDone) -> None:
    """The ids are known now. Raises Internal if they are not those of the file."""
    entry = job.entry
    assert entry is not None
    if len(message.tokens) != entry.envelope.n_tokens:
        raise Internal(f"worker {job.worker} loaded {len(message.tokens)} tokens of {entry.envelope.n_tokens}")
    entry.tokens = pack_ids(message.tokens)


def measured(books: Books, job: Job, answer: GenerateDone, made: ContextRef) -> None:
    """What a generate left has been published with its true length. Raises Internal if that is not what was granted."""
    entry, grant = job.entry, job.grant
    assert entry is not None and grant is not None
    assert books.first is not None
    n_answer = made.n_tokens - len(job.tokens) // ID_BYTES
    cut = layout.cut_to(grant, made.n_tokens, books.first.geometry, replies.text_of(answer.data))
    if cut.ref != made or not 0 <= n_answer <= len(answer.tokens):
        raise Internal(f"worker {job.worker} published something else than it was granted ({made.n_tokens} tokens)")
    books.directory.measure(entry, made, cut.envelope, job.tokens + pack_ids(answer.tokens[:n_answer]))


def compute_from_text(books: Books, job: Job) -> None:
    """The text of the answer ends inside a token, so that no state of the generation is its context's: its ids are made from the
    text, and a worker takes them in."""
    assert job.answer is not None
    answer = job.answer.message.result
    assert isinstance(answer, GenerateDone)
    books.give_up_grant(job)
    books.move(job, "text", "computed from the answer's text")
    books.out.append(StartText(TextJob(key=job.key, answer=answer.tokens, answer_data=answer.data)))


def text_is_known(books: Books, job: Job, tokens: tuple[int, ...]) -> None:
    """The ids of a published answer; what they are the context of is made now."""
    job.tokens += pack_ids(tokens)
    if job.base is None:
        base, _ = books.directory.longest_prefix(job.space, job.tokens)
        if base is not None:
            books.lease(job, base)
    books.move(job, "reserving")


def together(first: Done, second: Done) -> Done:
    """The answer of a generate, and what computing its context took on top."""
    one, two = first.timings, second.timings
    names = ("attach", "prefill", "decode", "score", "publish")
    return msgspec.structs.replace(
        first,
        usage=msgspec.structs.replace(first.usage, prefilled=first.usage.prefilled + second.usage.prefilled),
        timings=msgspec.structs.replace(one, **{name: getattr(one, name) + getattr(two, name) for name in names}),
    )


def answer_of(job: Job, message: Done) -> Answer:
    context = None if job.base is None else job.base.id
    return Answer(message, job.worker or "", job.attempt, job.assigned, context)
