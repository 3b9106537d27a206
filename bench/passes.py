"""What the measurements of single passes share: our side, the peer's answers, the run over models and numbers of threads."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench import shapes
from bench.harness import Book, Check, arguments, fetched_model, finish, machine_facts
from bench.limits import BuildError, Limits
from bench.peers import llama
from geist_pool.engine import Engine, Model, Session

MODELS: Final = ("qwen35-0.8b-q8_0", "qwen35-0.8b-q4_0", "smollm2")
THREADS: Final = (1, 2)
OURS: Final = "geist"
SETTLE_S: Final = 0.02  # before a side computes, so that the other's threads have gone to sleep
NEAR: Final = 0.5  # of a log-probability; another engine rounds activations and KV in its own way


def parser(about: str) -> ArgumentParser:
    """The options of these measurements."""
    made = arguments(about, models=MODELS, threads=THREADS)
    llama.add_argument(made)
    return made


def settle() -> None:
    time.sleep(SETTLE_S)


def plural(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


@contextmanager
def opened(path: Path, cache: Path, tier: str, threads: int) -> Iterator[Model]:
    """The model, on an engine of its own."""
    with Engine(tier, threads) as engine, Model(engine, path, cache_dir=cache) as model:
        yield model


class Agreement:
    """Whether answers are what they must be: ours the same bits each time, whoever computed them; the peer's likeliest token one
    of our likeliest, which random weights need not give."""

    def __init__(self, peer_must_agree: bool) -> None:
        self._peer_must_agree = peer_must_agree
        self._first: dict[str, bytes] = {}
        self.n_ours = self.n_peer = self.different = self.far = self.unequal = 0

    def ours(self, what: str, session: Session) -> None:
        """Logits of our side after `what`, the same for each thread count and round."""
        logits = session.logits().tobytes()
        self.n_ours += 1
        self.different += logits != self._first.setdefault(what, logits)

    def peer(self, session: Session, token: int) -> None:
        """The peer's likeliest token, where our session has taken in the same."""
        ids, best = session.top(1)
        self.n_peer += 1
        self.unequal += token != int(ids[0])
        self.far += float(session.logprobs([token])[0]) < float(best[0]) - NEAR

    def checks(self, what: str) -> list[Check]:
        """`what` says when the logits must be equal."""
        found = [Check(what=what, n=self.n_ours, failed=self.different)]
        if self._peer_must_agree and self.n_peer:
            words = f"the likeliest token of {llama.NAME} is ours, or less likely by at most {NEAR}"
            found.append(Check(what=words, n=self.n_peer, failed=self.far))
        return found

    def facts(self) -> dict[str, Any]:
        return {"peer_said_the_same": f"{self.n_peer - self.unequal} of {self.n_peer}"} if self.n_peer else {}


class Run:
    """One model's measurement in the making."""

    def __init__(self, args: Namespace, name: str, path: Path, cache: Path, stack: ExitStack, *, n_ctx: int) -> None:
        self.args = args
        self.path = path
        self.cache = cache
        self.book = Book()
        self.facts: dict[str, Any] = {}
        self.agreement = Agreement(peer_must_agree=not shapes.is_shape(name))
        self.peer, self.peer_words = llama.opened(stack, args, path, threads=args.threads[0], n_ctx=n_ctx)
        self.limits = _limits(stack)


def _limits(stack: ExitStack) -> Limits | None:
    """None where there is no compiler, which is said once."""
    try:
        return stack.enter_context(Limits())
    except BuildError as error:
        print(f"measured without the machine's limits: {error}", file=sys.stderr)
        return None


def measure_models(
    args: Namespace,
    bench: str,
    *,
    n_ctx: int,
    settings: dict[str, Any],
    equal: str,
    measure: Callable[[Run, Model, int], None],
) -> int:
    """A report for each model: `measure(run, model, threads)` adds its rows for each number of threads. The worst exit status."""
    worst = 0
    for name in args.model:
        path, cache = fetched_model(name, args.cache_dir)
        started, machine = time.time(), machine_facts()
        with ExitStack() as stack:
            run = Run(args, name, path, cache, stack, n_ctx=n_ctx)
            for threads in args.threads:
                with opened(path, cache, args.tier, threads) as model:
                    if run.peer is not None:
                        run.peer.set_threads(threads)
                    measure(run, model, threads)
                    info, tier, fingerprint = model.info, model.engine.tier, model.fingerprint
        subject = {
            "model": path.name,
            "architecture": info.architecture,
            "fingerprint": fingerprint[:16],
            "params": info.n_params,
        }
        used = {"tier": tier, "threads": ",".join(map(str, args.threads)), "kv": "f16", **settings, **run.peer_words}
        checks = run.agreement.checks(equal)
        facts = run.facts | run.agreement.facts()
        label = f"{bench}-{path.stem.lower()}"
        status = finish(args, label, started, machine, run.book, subject=subject, settings=used, checks=checks, facts=facts)
        worst = max(worst, status)
    return worst
