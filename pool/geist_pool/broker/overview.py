"""What the broker tells of itself: info, stats, stories. Pure."""

from __future__ import annotations

from collections import Counter

from geist_pool.broker.books import Books
from geist_pool.broker.stats import SpaceCounters
from geist_pool.protocol import PROTOCOL_VERSION, InfoResult, SpaceStats, StatsResult, StoryResult


def info(books: Books) -> InfoResult:
    first = books.first
    return InfoResult(
        protocol=PROTOCOL_VERSION,
        version=books.config.version,
        pool=books.config.pool,
        model=books.config.model,
        architecture="" if first is None else first.architecture,
        fingerprint="" if first is None else first.fingerprint,
        n_vocab=books.config.n_vocab if first is None else first.n_vocab,
        n_ctx=0 if first is None else first.n_ctx,
        kv_type=books.config.kv_type if first is None else first.kv_type,
        has_template=books.config.has_template,
        workers=books.fleet.n_ready,
        slots=books.config.slots if first is None else first.slots,
    )


def stats(books: Books) -> StatsResult:
    counters, directory = books.counters, books.directory
    kinds = directory.bytes_by_kind()
    fleet = tuple(worker.stats() for worker in books.fleet)
    return StatsResult(
        uptime_s=books.now - (books.now if counters.started is None else counters.started),
        workers=books.fleet.n_ready,
        workers_busy=books.fleet.n_busy,
        queue=books.n_queued,
        requests=dict(counters.requests),
        errors=dict(counters.errors),
        tokens_reused=counters.reused,
        tokens_prefilled=counters.prefilled,
        tokens_generated=counters.generated,
        contexts=directory.n_sealed,
        store_bytes=directory.used,
        store_limit=directory.limit,
        store_orphaned_bytes=kinds["orphaned"],
        store_unmapping_bytes=kinds["unmapping"],
        evictions=directory.evictions,
        jobs_retried=counters.retried,
        workers_lost=counters.workers_lost,
        chunks_dropped=counters.chunks_dropped,
        store_bytes_by_kind=kinds,
        evictions_by_cause={cause: directory.removed[cause] for cause in ("room", "ttl", "dropped", "damaged")},
        spaces=space_stats(books),
        fleet=fleet,
        passes=counters.lost_passes + sum(w.passes for w in fleet),
        attach_count=counters.attach_count,
        attach_us=counters.attach_us,
        queue_us=counters.queue_us,
        worker_restarts=counters.worker_restarts,
        replies_replayed=counters.replayed,
        messages_dropped=counters.unreadable + counters.stale,
        requests_active=len(books.tickets),
    )


def space_stats(books: Books) -> dict[str, SpaceStats]:
    counters, ledger = books.counters.spaces, books.directory.ledger
    contexts = Counter(entry.space for entry in books.directory.sealed())
    found: dict[str, SpaceStats] = {}
    for space in sorted({*counters, *ledger.used_in, *books.queued}):
        own = counters.get(space) or SpaceCounters()
        found[space] = SpaceStats(
            requests=own.requests,
            queue=books.queued[space],
            contexts=contexts[space],
            bytes=ledger.used_in[space],
            tokens_reused=own.reused,
            tokens_prefilled=own.prefilled,
            tokens_generated=own.generated,
        )
    return found


def story(books: Books, key: str, space: str) -> StoryResult:
    return StoryResult(id=key, events=tuple(chapter.event() for chapter in books.story.about(key, space)))
