"""What Prometheus reads.

Property: every field of `stats` is in some metric; readers share one question to the broker; a broker that does not answer is
`up 0`, not an error; the text is what a Prometheus parser takes. Tolerance: none. Reason: a dashboard that silently lacks a
number is worse than none.
"""

from __future__ import annotations

import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from geist_pool.config import check_metrics_address
from geist_pool.errors import ConfigError, NoAnswer
from geist_pool.metrics import MetricsServer, PoolCollector, families
from geist_pool.protocol import SpaceStats, StatsResult, WorkerStats


def distinct_stats() -> StatsResult:
    """Every number in it is another one."""
    n = iter(range(1001, 9999))

    def fill(kind: type[msgspec.Struct], **given: object) -> dict[str, object]:
        names = [f for f in kind.__struct_fields__ if f not in given]
        return {**{name: next(n) for name in names}, **given}

    kinds = {k: {word: next(n)} for k, word in (("requests", "score"), ("errors", "busy"), ("store_bytes_by_kind", "kv"))}
    kinds["evictions_by_cause"] = {"ttl": next(n)}
    space = SpaceStats(**fill(SpaceStats))  # type: ignore[arg-type]
    worker = WorkerStats(**fill(WorkerStats, worker="w1.3"))  # type: ignore[arg-type]
    return StatsResult(**fill(StatsResult, **kinds, spaces={'a"b': space}, fleet=(worker,), uptime_s=0.5))  # type: ignore[arg-type]


def numbers(value: object) -> set[float]:
    if isinstance(value, dict):
        return {n for v in value.values() for n in numbers(v)}
    if isinstance(value, list | tuple):
        return {n for v in value for n in numbers(v)}
    return {float(value)} if isinstance(value, int | float) else set()


def test_nothing_of_stats_is_missing() -> None:
    stats = distinct_stats()
    found = {s.value for family in families(stats) for s in family.samples}
    in_seconds = {stats.attach_us, stats.queue_us}
    wanted = numbers(msgspec.to_builtins(stats)) - {float(stats.fleet[0].pid)}  # an id, no measure
    expected = {v * 1e-6 if v in in_seconds else v for v in wanted}
    assert {round(v, 9) for v in expected} <= {round(v, 9) for v in found}


def test_names_and_labels() -> None:
    by_name = {s.name: s for family in families(distinct_stats()) for s in family.samples}
    assert by_name["geist_pool_requests_total"].labels == {"op": "score"}
    assert by_name["geist_pool_errors_total"].labels == {"code": "busy"}
    assert by_name["geist_pool_worker_private_bytes"].labels == {"worker": "w1"}  # its lives are one series
    assert by_name["geist_pool_space_tokens_total"].labels == {"space": 'a"b', "kind": "generated"}
    assert {"geist_pool_attach_seconds_sum", "geist_pool_attach_seconds_count"} <= set(by_name)


def test_readers_share_an_answer() -> None:
    asked: list[int] = []

    def ask() -> StatsResult:
        asked.append(1)
        return distinct_stats()

    collector = PoolCollector(ask, lambda: {"w0": 2})
    for _ in range(5):
        names = {s.name: s.value for family in collector.collect() for s in family.samples}
        assert names["geist_pool_up"] == 1 and names["geist_pool_child_deaths_total"] == 2
    assert len(asked) == 1


def test_served_as_text_also_without_a_broker(tmp_path: object) -> None:
    with MetricsServer("127.0.0.1:0", f"ipc://{tmp_path}/nobody", dict) as server:
        text = urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30).read().decode()
        samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        assert samples == {"geist_pool_up": 0.0}
        with pytest.raises(ConfigError, match="cannot be served"):
            MetricsServer(server.address, "ipc:///nobody", dict)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10)


def test_broker_that_does_not_answer_is_down() -> None:
    def ask() -> StatsResult:
        raise NoAnswer("nobody")

    found = {s.name: s.value for family in PoolCollector(ask, dict).collect() for s in family.samples}
    assert found == {"geist_pool_up": 0.0}
    assert check_metrics_address("9464") == ("127.0.0.1", 9464)
