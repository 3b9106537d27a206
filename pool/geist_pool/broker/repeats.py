"""A request that comes again: under the same id, with the same body. It is not computed twice. Pure.

On the connection of the first one it takes over that one's route: its reply goes to the later message, once. On another
connection it waits beside the first one for the same job, and both get the answer; where the first one's connection has ended, it
takes that one's place. If the answer is there already and remembered, it is given again. A stream begins again with one chunk
(for each sample) that holds everything so far. The same id with another body, while the first is in flight on the same
connection, is a mistake.
"""

from __future__ import annotations

from geist_pool.broker import replies
from geist_pool.broker.books import REMEMBERED, Books
from geist_pool.broker.events import Received
from geist_pool.broker.jobs import Job, JobRequest, Ticket
from geist_pool.errors import BadRequest
from geist_pool.protocol import ContextResult, Generate, GenerateResult, Reply, Request


def taken_care_of(books: Books, event: Received, request: Request) -> bool:
    """True if the request has been asked before and nothing more needs to be done. Raises BadRequest for an id that is in use."""
    same_peer = books.tickets.get((event.peer, event.request_id))
    if same_peer is not None:
        if not event.digest or event.digest != same_peer.digest:
            raise BadRequest("a request of this id is in flight already", path="id")
        same_peer.route, same_peer.json, same_peer.left = event.route, event.json, None
        _catch_up(books, books.jobs[same_peer.job], same_peer)
        return True
    if not event.digest or not isinstance(request, REMEMBERED):
        return False
    key = (request.space, event.request_id, event.digest)
    reply = books.remembered.find(key, books.now)
    if reply is not None and _still_true(books, request.space, reply):
        books.counters.replayed += 1
        if isinstance(request, Generate) and request.stream and isinstance(reply.result, GenerateResult):
            for chunk in replies.chunks_of(reply.result):
                books.reply(event.route, event.request_id, replies.ok(chunk, final=False), json=event.json)
        books.reply(event.route, event.request_id, reply, json=event.json)
        return True
    in_flight = books.repeats.get(key)
    if in_flight is None or books.jobs[in_flight.job].state == "cancelling" or books.stopping:
        return False
    _join(books, event, request, in_flight)
    return True


def remember(books: Books, event: Received, request: Request, reply: Reply) -> None:
    """The answer to a request that needed no job."""
    if event.digest and isinstance(request, REMEMBERED):
        books.remembered.keep((request.space, event.request_id, event.digest), reply, books.now)


def _join(books: Books, event: Received, request: JobRequest, first: Ticket) -> None:
    job = books.jobs[first.job]
    ticket = Ticket(
        route=event.route,
        request_id=event.request_id,
        json=event.json,
        arrived=books.now,
        deadline=None if request.deadline_ms is None else books.now + request.deadline_ms / 1000,
        request=request,
        job=job.key,
        created=first.created,
        digest=event.digest,
        text=first.text,
    )
    job.tickets.append(ticket)
    books.open_ticket(ticket)
    for other in tuple(job.tickets):
        if other.left is not None and other.repeat_key == ticket.repeat_key:  # its client has come back by this connection
            books.end_ticket(other, None)
    _catch_up(books, job, ticket)


def _catch_up(books: Books, job: Job, ticket: Ticket) -> None:
    """What a stream has brought so far."""
    if job.streams is None or not isinstance(job.request, Generate):
        return
    with_logprobs = job.request.logprobs is not None
    for chunk in replies.chunks_so_far(job.streams, with_logprobs=with_logprobs, whole=job.answer is not None):
        books.reply(ticket.route, ticket.request_id, replies.ok(chunk, final=False), json=ticket.json)


def _still_true(books: Books, space: str, reply: Reply) -> bool:
    """A context that has gone since has to be made again."""
    result = reply.result
    return not isinstance(result, ContextResult) or books.directory.find(space, result.context.id) is not None
