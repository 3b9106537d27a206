"""How fast one session goes on, token by token, beside llama.cpp and beside a plain read of the same weights.

    python -m bench.decode [--model NAME[,NAME...]] [--tokens 700] [--steps 16] [--threads 1,2] [--peer-python PATH] [--quick]

A token needs every weight once, so memory sets the limit. The plain read goes over the same packed weights, as they lie in
memory, with as many threads and no other work, in the fastest of several ways, and takes its turn with both engines. Bytes of a
token are the packed weights, the recurrent state twice (it is read and written), and the keys and values of all positions before
it. Where matrices are floats, which are not packed, the plain read goes over the model's file instead.
"""

from __future__ import annotations

import math
import sys

from bench import passes
from bench.contexts import prose
from bench.harness import Clock, Spread, Turn, interleave, ratios, show_progress
from bench.harness import run as run_bench
from bench.passes import OURS, Run, plural, settle
from bench.peers import llama
from bench.work import pass_macs
from geist_pool.engine import NUMERICS, PACKED_LAYOUT, Model, ModelInfo, Session, TensorInfo
from geist_pool.store.packed import FileMapping, PackedCache
from geist_pool.text.tokenizer import Tokenizer

TOKENS, STEPS = 700, 16
REPEATS, QUICK_REPEATS = 9, 2
READ = "plain read of the weights"
UNPACKED = ("F32", "F16", "BF16")


def token_bytes(info: ModelInfo, tensors: list[TensorInfo], before: int) -> int:
    """Bytes that a token must move behind `before` others. Matrices of floats are not packed; the model file has them."""
    return info.packed_bytes + float_bytes(tensors) + 2 * info.recurrent_bytes + info.kv_bytes_per_token * before


def float_bytes(tensors: list[TensorInfo]) -> int:
    """Bytes of the matrices that are read where they lie in the model's file."""
    matrices = (t for t in tensors if t.type in UNPACKED and sum(d > 1 for d in t.dims) >= 2)
    return sum(t.data_bytes for t in matrices if _is_used_whole(t, tensors))


def _is_used_whole(tensor: TensorInfo, tensors: list[TensorInfo]) -> bool:
    """Not an embedding that is looked up only, nor the taps of a convolution, which are packed."""
    if tensor.name == "token_embd.weight":
        return all(t.name != "output.weight" for t in tensors)
    return not tensor.name.endswith("ssm_conv1d.weight")


def measure(run: Run, model: Model, threads: int, n: int, steps: int, repeats: int) -> None:
    """The rows of one number of threads."""
    tensors = model.gguf.tensors()
    # One more step comes first and is not timed: it takes what a fork or a restored state put off.
    ids = prose(Tokenizer(model.vocabulary()), n + 1 + steps)
    first, rest = int(ids[n]), [int(t) for t in ids[n + 1 :]]
    packed = PackedCache(run.cache / "packed").path(model.fingerprint, PACKED_LAYOUT, NUMERICS)
    path = packed if model.info.packed_bytes > float_bytes(tensors) else model.path
    with Session(model, n_ctx=len(ids)) as live, Session(model, n_ctx=len(ids)) as whole:
        whole.prefill(ids)
        run.agreement.ours("all tokens", whole)
        live.prefill(ids[:n])
        mapping = FileMapping(path)
        try:
            reading = run.limits.reading(mapping.view, threads) if run.limits is not None else None
            if run.peer is not None:
                run.peer.prefill(ids[:n])
                run.peer.state_save()

            def ours(clock: Clock) -> None:
                with live.fork() as fork:
                    fork.decode(first)
                    settle()
                    with clock(OURS):
                        for token in rest:
                            fork.decode(token)
                    run.agreement.ours("all tokens", fork)

            def peers(clock: Clock) -> None:
                assert run.peer is not None
                settle()
                run.peer.state_load()
                seconds, token = run.peer.decode([first, *rest])
                clock.taken[llama.NAME] = sum(seconds[1:])
                run.agreement.peer(whole, token)

            def read(clock: Clock) -> None:
                assert reading is not None
                settle()
                with clock(READ):
                    reading()

            turns: list[Turn] = [ours]
            turns += [peers] if run.peer is not None else []
            turns += [read] if reading is not None else []
            group = plural(threads, "thread")
            samples = interleave(turns, repeats, progress=show_progress(f"{model.path.stem}, {group}"))
        finally:
            mapping.close()
    for name in samples.keys() - {READ}:
        samples[name] = [s / steps for s in samples[name]]
    middle = n + 1 + steps // 2
    n_bytes = token_bytes(model.info, tensors, middle)
    macs = pass_macs(model.info, tensors, 1, before=middle)
    ours_work = {"tokens": 1, "bytes": n_bytes, "macs": macs}
    work = {OURS: ours_work, llama.NAME: {"tokens": 1, "macs": macs}, READ: {"bytes": reading.n_bytes if reading else 0}}
    run.book.add(group, samples, {name: work[name] for name in work if name in samples})
    add_facts(run, group, threads, n_bytes)


def add_facts(run: Run, group: str, threads: int, n_bytes: int) -> None:
    """The figures that a reader looks for, by name."""
    end = f"{threads}t"
    ours = run.book.row(group, OURS)
    run.facts["bytes_per_token"] = n_bytes
    run.facts[f"decode_ms_{end}"] = ours.seconds.median * 1e3
    run.facts[f"decode_gb_s_{end}"] = n_bytes / ours.seconds.median / 1e9
    if run.limits is not None:
        run.book.ratio(group, OURS, READ)
        read = run.book.row(group, READ)
        in_bytes = n_bytes / read.stands_for["bytes"]
        run.facts[f"plain_read_gb_s_{end}"] = read.stands_for["bytes"] / read.seconds.median / 1e9
        run.facts[f"decode_share_of_read_{end}"] = in_bytes * Spread.of(ratios(read.samples, ours.samples)).median
    if run.peer is not None:
        run.book.ratio(group, llama.NAME, OURS)
        pairs = Spread.of(ratios(run.book.row(group, llama.NAME).samples, ours.samples))
        run.facts[f"decode_ratio_{end}"] = pairs.median


def main(argv: list[str] | None = None) -> int:
    parser = passes.parser(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens before the first that is timed; default {TOKENS}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"tokens a turn; default {STEPS}")
    args = parser.parse_args(argv)
    if min(args.tokens, args.steps) < 1:
        parser.error("at least one token and one step")
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    return passes.measure_models(
        args,
        "decode",
        n_ctx=math.ceil((args.tokens + 1 + args.steps) / 256) * 256,
        settings={"tokens": args.tokens, "steps": args.steps, "repeats": repeats},
        equal="logits behind the last step are those of one prefill, bit for bit, with any number of threads",
        measure=lambda run, model, threads: measure(run, model, threads, args.tokens, args.steps, repeats),
    )


if __name__ == "__main__":
    sys.exit(run_bench(main))
