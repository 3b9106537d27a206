"""How fast a prompt is taken in, beside llama.cpp and beside what the machine's multiply-add unit could do.

    python -m bench.prefill [--model NAME[,NAME...]] [--tokens 512,100] [--threads 1,2] [--peer-python PATH] [--quick]

Both engines take the same token ids from an empty session and compute the logits of the last one, in turns: ours in this
process, llama.cpp in a child that sleeps meanwhile. Multiply-adds are counted from the model's tensor table (bench/work.py) and
are the same for both. The peak is that of as many threads with nothing but vpdpbusd, measured before and after; the products of
quantised matrices could run at it, the recurrent state and attention, which are f32, could not.
"""

from __future__ import annotations

import sys

from bench import passes
from bench.contexts import prose
from bench.harness import Clock, Spread, Turn, interleave, show_progress
from bench.harness import run as run_bench
from bench.passes import OURS, Run, plural, settle
from bench.peers import llama
from bench.work import pass_macs
from geist_pool.engine import Model, Session
from geist_pool.text.tokenizer import Tokenizer

TOKENS = (512, 100)
REPEATS, QUICK_REPEATS = 7, 2


def measure(run: Run, model: Model, threads: int, lengths: list[int], repeats: int) -> None:
    """The rows of one number of threads."""
    tensors = model.gguf.tensors()
    ids = prose(Tokenizer(model.vocabulary()), max(lengths))
    with Session(model, n_ctx=max(lengths)) as session:
        for n in lengths:
            tokens = ids[:n]

            def ours(clock: Clock, n: int = n) -> None:
                session.reset()
                settle()
                with clock(OURS):
                    session.prefill(ids[:n])
                run.agreement.ours(f"{n} tokens", session)

            def peers(clock: Clock, n: int = n) -> None:
                assert run.peer is not None
                settle()
                clock.taken[llama.NAME], token = run.peer.prefill(ids[:n])
                run.agreement.peer(session, token)

            peak = run.limits.vpdpbusd(threads) if run.limits is not None else 0.0
            session.prefill(tokens)  # whichever side comes first, our session stands behind these tokens
            turns: list[Turn] = [ours] if run.peer is None else [ours, peers]
            group = f"{n} tokens, {plural(threads, 'thread')}"
            samples = interleave(turns, repeats, progress=show_progress(f"{model.path.stem}, {group}"))
            if run.limits is not None:
                peak = max(peak, run.limits.vpdpbusd(threads))
            session.reset()
            macs = pass_macs(model.info, tensors, n)
            run.book.add(group, samples, {name: {"tokens": n, "macs": macs} for name in samples})
            if run.peer is not None:
                run.book.ratio(group, llama.NAME, OURS)
            add_facts(run, group, n, threads, macs, peak)


def add_facts(run: Run, group: str, n: int, threads: int, macs: int, peak: float) -> None:
    """The figures that a reader looks for, by name."""
    end = f"{threads}t"
    rate = macs / run.book.row(group, OURS).seconds.median
    run.facts[f"prefill_{n}_tokens_s_{end}"] = n / run.book.row(group, OURS).seconds.median
    run.facts[f"prefill_{n}_gmac_s_{end}"] = rate / 1e9
    if peak:
        run.facts[f"vpdpbusd_gmac_s_{end}"] = max(peak / 1e9, run.facts.get(f"vpdpbusd_gmac_s_{end}", 0.0))
        run.facts[f"prefill_{n}_share_of_vpdpbusd_{end}"] = rate / peak
    if run.peer is not None:
        run.facts[f"prefill_{n}_ratio_{end}"] = ratio(run, group).median
        if peak:
            peer_rate = macs / run.book.row(group, llama.NAME).seconds.median
            run.facts[f"prefill_{n}_peer_share_of_vpdpbusd_{end}"] = peer_rate / peak


def ratio(run: Run, group: str) -> Spread:
    """How many times longer the peer took."""
    return next(r.pairs for r in run.book.ratios if r.group == group and r.over == llama.NAME)


def main(argv: list[str] | None = None) -> int:
    parser = passes.parser(__doc__ or "")
    parser.add_argument("--tokens", help=f"lengths, separated by commas; default {','.join(map(str, TOKENS))}")
    args = parser.parse_args(argv)
    lengths = [int(word) for word in args.tokens.split(",")] if args.tokens else list(TOKENS)
    if min(lengths) < 1:
        parser.error("a length is at least 1 token")
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    return passes.measure_models(
        args,
        "prefill",
        n_ctx=max(lengths),
        settings={"repeats": repeats},
        equal="logits of every prefill of a length are the same bits, with any number of threads",
        measure=lambda run, model, threads: measure(run, model, threads, lengths, repeats),
    )


if __name__ == "__main__":
    sys.exit(run_bench(main))
