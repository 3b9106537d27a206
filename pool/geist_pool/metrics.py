"""Prometheus text about a running pool, made from the broker's `stats` when somebody reads it.

It lives in the supervisor's process, so that the broker does nothing for it but answer one `stats`, and at most one in CACHE_S
however many readers there are. The names are listed in docs/operations.md; counters begin anew when the broker does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from geist_pool.client import Client
from geist_pool.config import check_metrics_address
from geist_pool.errors import ConfigError, GeistPoolError
from geist_pool.protocol import StatsResult

PREFIX: Final = "geist_pool_"
CACHE_S: Final = 1.0
ANSWER_S: Final = 2.0  # a reader waits no longer for the broker
US: Final = 1e-6


class PoolCollector(Collector):
    """Asks for `stats` and says it in metrics. ask: raises GeistPoolError where nobody answers. deaths: of children, by name."""

    def __init__(self, ask: Callable[[], StatsResult], deaths: Callable[[], Mapping[str, int]]) -> None:
        self._ask = ask
        self._deaths = deaths
        self._lock = threading.Lock()  # readers come in threads; the answer is shared
        self._seen: StatsResult | None = None
        self._at = -1e9

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield _gauge("up", "1 if the broker answered", [((), float(stats is not None))])
        deaths = [((name,), float(n)) for name, n in sorted(self._deaths().items())]
        yield _counter("child_deaths", "Deaths of the pool's processes, each followed by a new start", deaths, ("child",))
        if stats is not None:
            yield from families(stats)

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked of the broker when this is registered."""
        return []

    def _stats(self) -> StatsResult | None:
        with self._lock:
            if time.monotonic() - self._at >= CACHE_S:
                try:
                    self._seen = self._ask()
                except GeistPoolError:
                    self._seen = None
                self._at = time.monotonic()
            return self._seen


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


def _gauge(name: str, about: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, about, labels=labels), samples)


def _counter(name: str, about: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, about, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    found: Metric = family
    return found


def families(s: StatsResult) -> Iterator[Metric]:
    """Every metric that follows from one `stats`."""
    for name, about, value in (
        ("uptime_seconds", "Since the broker's start", s.uptime_s),
        ("workers", "Workers that are there", s.workers),
        ("workers_busy", "Workers that hold a job", s.workers_busy),
        ("queue_requests", "Requests that wait for a worker", s.queue),
        ("active_requests", "Requests that have not had their last reply", s.requests_active),
        ("contexts", "Contexts that can be found", s.contexts),
        ("store_used_bytes", "Shared memory that counts against the limit", s.store_bytes),
        ("store_orphaned_bytes", "KV of contexts that are gone but have descendants", s.store_orphaned_bytes),
        ("store_unmapping_bytes", "Unlinked, but not yet unmapped by every worker", s.store_unmapping_bytes),
        ("store_limit_bytes", "Shared memory that contexts may take", s.store_limit),
    ):
        yield _gauge(name, about, [((), float(value))])
    yield _gauge("store_bytes", "What the used shared memory is made of", _each(s.store_bytes_by_kind), ("kind",))

    yield _counter("requests", "Requests by operation", _each(s.requests), ("op",))
    yield _counter("errors", "Requests that ended with an error, by code", _each(s.errors), ("code",))
    yield _counter("tokens", "Tokens reused, prefilled and generated", _tokens(s), ("kind",))
    yield _counter("contexts_removed", "Contexts that went, by cause", _each(s.evictions_by_cause), ("cause",))
    for name, about, value in (
        ("evictions", "Contexts evicted to make room", s.evictions),
        ("jobs_retried", "Jobs given to another worker", s.jobs_retried),
        ("workers_lost", "Workers that died or fell silent", s.workers_lost),
        ("worker_restarts", "Workers that came back", s.worker_restarts),
        ("chunks_dropped", "Pieces of streams that their reader did not take", s.chunks_dropped),
        ("messages_dropped", "Messages unreadable, stale, or from nobody known", s.messages_dropped),
        ("replies_replayed", "Answers given again to a repeated request id", s.replies_replayed),
        ("passes", "Forward passes", s.passes),
        ("queue_wait_seconds", "Time that requests waited for a worker, summed up", s.queue_us * US),
    ):
        yield _counter(name, about, [((), float(value))])
    attach = SummaryMetricFamily(PREFIX + "attach_seconds", "Time to attach a session to a context")
    attach.add_metric((), s.attach_count, s.attach_us * US)
    yield attach

    spaces = sorted(s.spaces.items())
    for name, about, field in (
        ("space_queue_requests", "Requests of a space that wait", "queue"),
        ("space_contexts", "Contexts of a space", "contexts"),
        ("space_bytes", "Shared memory of a space's contexts", "bytes"),
    ):
        yield _gauge(name, about, [((n,), float(getattr(of, field))) for n, of in spaces], ("space",))
    yield _counter("space_requests", "Requests of a space", [((n,), float(of.requests)) for n, of in spaces], ("space",))
    tokens = [((n, *kind), value) for n, of in spaces for kind, value in _tokens(of)]
    yield _counter("space_tokens", "Tokens of a space", tokens, ("space", "kind"))

    fleet = sorted(((w.worker.partition(".")[0], w) for w in s.fleet), key=lambda pair: pair[0])  # "w1.3" is w1's fourth life
    for name, about, field in (
        ("worker_jobs", "Jobs that a worker holds", "busy"),
        ("worker_slots", "Jobs that a worker can hold", "slots"),
        ("worker_contexts_mapped", "Contexts that a worker has mapped", "contexts_mapped"),
        ("worker_resident_bytes", "Resident memory, shared mappings included", "rss_bytes"),
        ("worker_private_bytes", "Resident memory private to the process", "private_bytes"),
    ):
        yield _gauge(name, about, [((n,), float(getattr(w, field))) for n, w in fleet], ("worker",))
    for name, about, field in (
        ("worker_jobs_done", "Jobs that a worker has ended", "jobs_done"),
        ("worker_passes", "Forward passes of a worker", "passes"),
        ("worker_tokens_prefilled", "Tokens that a worker has prefilled", "tokens_prefilled"),
        ("worker_tokens_generated", "Tokens that a worker has generated", "tokens_generated"),
    ):
        yield _counter(name, about, [((n,), float(getattr(w, field))) for n, w in fleet], ("worker",))


def _each(values: Mapping[str, int]) -> Samples:
    return [((key,), float(value)) for key, value in sorted(values.items())]


def _tokens(of: Any) -> Samples:
    return [((kind,), float(getattr(of, f"tokens_{kind}"))) for kind in ("reused", "prefilled", "generated")]


class MetricsServer:
    """Serves the metrics over HTTP in threads of its own while the block runs.

    address: as `config.check_metrics_address` takes it. pool: the broker's address for clients.
    Raises ConfigError where nothing can be served there.
    """

    def __init__(self, address: str, pool: str, deaths: Callable[[], Mapping[str, int]]) -> None:
        host, port = check_metrics_address(address)
        registry = CollectorRegistry()
        registry.register(PoolCollector(lambda: _ask(pool), deaths))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as e:
            raise ConfigError(f"metrics cannot be served at {address}: {e.strerror}", path="metrics") from None
        self.address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _ask(pool: str) -> StatsResult:
    """A client of its own for each time: a connection costs less than a millisecond, and readers come in any thread."""
    with Client(pool, timeout=ANSWER_S, connect_timeout=ANSWER_S) as client:
        return client.stats()
