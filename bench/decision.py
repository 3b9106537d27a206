"""What a decision costs: a question of 100 tokens behind a context of 700, and one token as the answer.

    python -m bench.decision [--model PATH.gguf] [--threads N] [--llama-server PATH] [--peer-python PATH] [--questions] [--quick]

Five sides take turns on the same token ids:

* geist-pool, through its client and broker, continuing the context that it keeps;
* geist-pool with the whole prompt, in a space of its own where there is nothing to reuse;
* llama-server with its prompt cache, one slot, asked context and question as one prompt, again and again; its reply says how much
  of it was prefilled again;
* another llama-server that was sent the context alone before the first question, so that it could keep the state behind it;
* the best loop on llama.cpp's C API: the context's state in a buffer, per question set, prefill of the question, one token.

No two questions begin alike, so no side can reuse a question that came before. Peers that are not there are skipped, with a word.
Times are the asker's, from the question to the answer; the loop's are its own, without the pipe to it. With --questions the
demo's questions follow (bench/questions.py), in the same pool.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import questions
from bench.harness import (
    Book,
    Check,
    Clock,
    Spread,
    arguments,
    fetched_model,
    finish,
    interleave,
    machine_facts,
    run,
    show_progress,
)
from bench.peers import llama, server
from bench.pools import effective_tier, running
from geist_pool import observe
from geist_pool.client import Client
from geist_pool.demo.world import CONTEXT_TEXT
from geist_pool.protocol import GenerateResult

CONTEXT_TOKENS: Final = 700
QUESTION_TOKENS: Final = 100
PEER_N_CTX: Final = 4096
CONTEXT: Final = "bench-decision"
GROUP: Final = f"{QUESTION_TOKENS} tokens behind {CONTEXT_TOKENS}, one token answered"
KEPT, WHOLE = "geist-pool, context kept", "geist-pool, whole prompt"
SERVER, PRIMED = "llama-server, prompt cache", "llama-server, sent the context alone first"
LOOP: Final = "llama.cpp, state in a buffer"
WORDS: Final = {SERVER: "llama_server", PRIMED: "llama_server_primed", LOOP: "llama_loop"}  # in the names of facts
REPEATS, QUICK_REPEATS = 9, 2
BARS: Final = f"{SERVER} / {KEPT} >= 20, {LOOP} / {KEPT} >= 4.5"


class Prompts:
    """A context and questions as token ids, from a text's ids over and over; no two questions begin with the same token."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._firsts = sorted(set(self._ids))
        self.context = self._from(0, CONTEXT_TOKENS)
        self.spare = [self._firsts.pop(), *self._from(0, QUESTION_TOKENS - 1)]  # a question that is none of those

    def question(self, i: int) -> list[int]:
        """The i-th. Raises ValueError where no first token is left that none had before."""
        if i >= len(self._firsts):
            raise ValueError(f"there are {len(self._firsts)} different questions")
        return [self._firsts[i], *self._from(37 * (i + 1), QUESTION_TOKENS - 1)]

    def _from(self, at: int, n: int) -> list[int]:
        return [self._ids[(at + k) % len(self._ids)] for k in range(n)]


class Given(NamedTuple):
    """An answer, and how much of the prompt was reused and how much was prefilled for it."""

    tokens: tuple[int, ...]
    reused: int
    prefilled: int
    seconds: float | None = None  # where a side has a clock of its own
    prefill_s: float | None = None  # of the pool's own account


class Side:
    """One way to answer; each turn puts the next question to it."""

    def __init__(self, name: str, answer: Callable[[list[int]], Given], prompts: Prompts) -> None:
        self.name = name
        self.given: list[Given] = []
        self._answer = answer
        self._prompts = prompts

    def turn(self, clock: Clock) -> None:
        question = self._prompts.question(len(self.given))
        with clock(self.name):
            given = self._answer(question)
        if given.seconds is not None:
            clock.taken[self.name] = given.seconds
        self.given.append(given)

    def stands_for(self, macs: questions.DecisionMacs) -> dict[str, int]:
        last = self.given[-1]
        work = {"reused": last.reused, "prefilled": last.prefilled, "answered": 1}
        return work | {"macs": macs.of_prompt(last.prefilled, last.reused)}


def pool_sides(address: str, prompts: Prompts, stack: ExitStack) -> list[Side]:
    """Both sides in the pool; the context is made here, and dropped in the end."""
    kept = stack.enter_context(Client(address, space="decision", timeout=None))
    bare = stack.enter_context(Client(address, space="whole", timeout=None))
    kept.create_context(prompts.context, name=CONTEXT)
    stack.callback(kept.drop_context, CONTEXT)

    def given(result: GenerateResult) -> Given:
        usage = result.usage
        return Given(result.tokens, usage.reused, usage.prefilled, prefill_s=result.timings.prefill * 1e-6)

    def continued(question: list[int]) -> Given:
        return given(kept.generate(question, context=CONTEXT, max_tokens=1, ignore_eog=True))

    def whole(question: list[int]) -> Given:
        return given(bare.generate(prompts.context + question, max_tokens=1, ignore_eog=True))

    return [Side(KEPT, continued, prompts), Side(WHOLE, whole, prompts)]


def server_side(name: str, program: Path, model: Path, threads: int, prompts: Prompts, stack: ExitStack) -> Side:
    """A llama-server of its own; PRIMED has been sent the context alone, the other one a question that is not asked again."""
    caller = stack.enter_context(server.running(program, model, threads=threads, n_ctx=PEER_N_CTX))
    caller.complete(prompts.context if name == PRIMED else prompts.context + prompts.spare)

    def answer(question: list[int]) -> Given:
        back = caller.complete(prompts.context + question)
        return Given(back.tokens, back.cache_n, back.prompt_n)

    return Side(name, answer, prompts)


def loop_side(peer: llama.LlamaPeer, prompts: Prompts) -> Side:
    """The loop on the C API, with the context's state in its buffer."""
    peer.prefill(prompts.context)
    peer.state_save()

    def answer(question: list[int]) -> Given:
        seconds, tokens = peer.decide(question)
        return Given(tuple(tokens), len(prompts.context), len(question), seconds)

    return Side(LOOP, answer, prompts)


def peer_sides(args: Any, model: Path, prompts: Prompts, stack: ExitStack) -> tuple[list[Side], dict[str, Any]]:
    """Those peers that there are, and words for the settings: what they are, or why they are not there. Raises PeerError."""
    sides: list[Side] = []
    program = None if args.no_peer else server.find(args.llama_server)
    if program is None:
        why = "none: by request" if args.no_peer else "none: not in PATH, and no --llama-server"
        print(f"measured without llama-server, {why} (bench/peers/README.md)", file=sys.stderr)
    else:
        why = server.version(program)
        sides += [server_side(name, program, model, args.threads, prompts, stack) for name in (SERVER, PRIMED)]
    peer, more = llama.opened(stack, args, model, threads=args.threads, n_ctx=PEER_N_CTX)
    if peer is not None:
        sides.append(loop_side(peer, prompts))
    return sides, {"llama_server": why} | more


def measure(
    pool_address: str, args: Any, model: Path, repeats: int, macs: questions.DecisionMacs, book: Book
) -> tuple[list[Check], dict[str, Any], dict[str, Any]]:
    """Checks, facts, and settings of the peers."""
    with Client(pool_address) as client:
        prompts = Prompts(client.tokenize(CONTEXT_TEXT).tokens)
    with ExitStack() as stack:
        ours = pool_sides(pool_address, prompts, stack)
        peers, words = peer_sides(args, model, prompts, stack)
        sides = [*ours, *peers]
        samples = interleave([side.turn for side in sides], repeats, progress=show_progress("decision"))
    book.add(GROUP, samples, {side.name: side.stands_for(macs) for side in sides})
    for side in sides[1:]:
        book.ratio(GROUP, side.name, KEPT)
    kept, whole = (side.given for side in ours)
    checks = [
        Check(
            what="the kept context and the whole prompt give the same answer",
            n=len(kept),
            failed=sum(k.tokens != w.tokens for k, w in zip(kept, whole, strict=True)),
        ),
        Check(
            what=f"exactly {CONTEXT_TOKENS} tokens were reused with the context kept, and none of a whole prompt",
            n=len(kept) + len(whole),
            failed=sum((g.reused, g.prefilled) != (CONTEXT_TOKENS, QUESTION_TOKENS) for g in kept)
            + sum((g.reused, g.prefilled) != (0, CONTEXT_TOKENS + QUESTION_TOKENS) for g in whole),
        ),
    ]
    return checks, facts_of(book, ours, peers), words


def facts_of(book: Book, ours: list[Side], peers: list[Side]) -> dict[str, Any]:
    """What the table of results shows: how many times longer each other side takes, and what the peers prefilled and said."""
    median = {ratio.over: ratio.pairs.median for ratio in book.ratios if ratio.group == GROUP}
    facts: dict[str, Any] = {"context_tokens": CONTEXT_TOKENS, "question_tokens": QUESTION_TOKENS}
    kept = book.row(GROUP, KEPT)
    facts["decision_ms"] = 1e3 * kept.seconds.median
    prefills = [given.prefill_s or 0.0 for given in ours[0].given[-len(kept.samples) :]]
    facts["decision_outside_prefill_ms"] = 1e3 * Spread.of(s - p for s, p in zip(kept.samples, prefills, strict=True)).median
    facts["whole_prompt_over_kept"] = median[WHOLE]
    facts["share_of_a_whole_prompt"] = 1 / median[WHOLE]
    for side in peers:
        word = WORDS[side.name]
        facts[f"{word}_over_kept"] = median[side.name]
        facts[f"{word}_prefilled"] = spoken([g.prefilled for g in side.given[1:]])
        facts[f"{word}_reused"] = spoken([g.reused for g in side.given[1:]])
        same = sum(a.tokens[:1] == b.tokens[:1] for a, b in zip(side.given, ours[0].given, strict=True))
        facts[f"{word}_same_answer"] = f"{same} of {len(side.given)}"
    return facts | {"target": BARS}


def spoken(counts: list[int]) -> int | str:
    """One number where all are equal, else the range."""
    return counts[0] if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}, median {Spread.of(counts).median:g}"


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1, help="worker processes; default 1")
    parser.add_argument("--questions", action="store_true", help="then the demo's questions, with and without the context kept")
    parser.add_argument("--llama-server", metavar="PATH", help="default: llama-server in PATH; without one that side is skipped")
    llama.add_argument(parser)
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error("at least one worker is needed")
    observe.set_up("bench", log_level="warning")
    started, machine = time.time(), machine_facts()
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    book = Book()
    model, cache = fetched_model(args.model, args.cache_dir)
    macs = questions.DecisionMacs(model, cache)
    with running(model, cache, workers=args.workers, threads=args.threads, tier=args.tier) as pool:
        n_params = pool.facts.n_params if pool.facts is not None else None
        with Client(pool.config.address) as client:
            info = client.info()
        checks, figures, peers = measure(pool.config.address, args, model, repeats, macs, book)
        if args.questions:
            more, further = questions.measure(pool, args, repeats, macs, book)
            checks, figures = checks + more, figures | further
        pinned = pool.config.pin_cores and pool.cores.usable >= args.workers * args.threads
    subject = {
        "model": model.name,
        "architecture": info.architecture,
        "fingerprint": info.fingerprint[:16],
        "params": n_params,
    }
    settings = {
        "tier": effective_tier(args.tier),
        "workers": args.workers,
        "threads": args.threads,
        "kv": info.kv_type,
        "pinned": pinned,
        "repeats": repeats,
        **peers,
    }
    bench = f"decision-{model.stem.lower()}-w{args.workers}t{args.threads}"
    return finish(args, bench, started, machine, book, subject=subject, settings=settings, checks=checks, facts=figures)


if __name__ == "__main__":
    sys.exit(run(main))
