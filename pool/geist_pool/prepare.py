"""Packs a model's weights once, in a process of its own: `python -m geist_pool.prepare JSON`.

The supervisor runs it before any worker, so that workers find the packed weights in the cache, compared with their checksum, so
that a broken or unsupported model is one clear error at the start, and so that a signal can end even a long packing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from geist_pool import lifeline
from geist_pool.errors import GeistPoolError, Internal, from_wire
from geist_pool.protocol import ErrorBody, error_body
from geist_pool.store.packed import Identity, PackedCache, draft_path


class Order(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to prepare. verify: hash the whole file again instead of trusting its size and times."""

    model_path: str
    cache_dir: str
    threads: int = 1
    verify: bool = False
    parent_fd: int = -1


class Facts(Struct, frozen=True, kw_only=True):
    """What is known of a model once its weights are packed; *_bytes are bytes."""

    architecture: str
    fingerprint: str
    n_vocab: int
    n_ctx_train: int
    n_params: int
    file_bytes: int
    packed_bytes: int
    recurrent_bytes: int
    kv_bytes_per_token: int


class _Outcome(Struct, frozen=True, omit_defaults=True):
    facts: Facts | None = None
    error: ErrorBody | None = None


def was_prepared(model_path: Path, cache_dir: Path) -> bool:
    """Whether this very file was understood and packed at an earlier start, so that preparing it now is likely to be short and
    to find no fault. Nothing is read but names, sizes and times; only `prepare_model` says what can be relied on."""
    packed = cache_dir / "packed"
    if not packed.is_dir():
        return False
    try:
        fingerprint = PackedCache(packed).known(Identity.of(model_path))
    except GeistPoolError:
        return False
    return fingerprint is not None and any(packed.glob(f"{fingerprint[:32]}-*.packed"))


def prepare_model(model_path: Path, cache_dir: Path, *, threads: int, verify: bool = False, parent_fd: int = -1) -> Facts:
    """Packs the weights unless they are there, in a short-lived process.

    parent_fd: a lifeline that the process is to hold; -1 for none.
    Raises what the engine said (ModelError, Unsupported, ...); Internal if the process died.
    """
    order = Order(model_path=str(model_path), cache_dir=str(cache_dir), threads=threads, verify=verify, parent_fd=parent_fd)
    command = [sys.executable, "-P", "-m", "geist_pool.prepare", msgspec.json.encode(order).decode()]
    fds = (parent_fd,) if parent_fd >= 0 else ()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=fds, start_new_session=True
    ) as child:
        try:
            output = child.communicate()[0]
        except BaseException:
            child.kill()
            child.wait()
            draft_path(cache_dir / "packed", child.pid).unlink(missing_ok=True)  # as large as the model
            raise
    try:
        outcome = msgspec.json.decode(output, type=_Outcome)
    except msgspec.DecodeError:
        how = f"by signal {-child.returncode}" if child.returncode < 0 else f"with exit code {child.returncode}"
        raise Internal(f"preparing {model_path} ended {how}") from None
    if outcome.error is not None:
        e = outcome.error
        raise from_wire(e.code, e.message, e.path, e.retry_after, e.data)
    if outcome.facts is None:
        raise Internal(f"preparing {model_path} ended without a word")
    return outcome.facts


def main(argv: list[str]) -> int:
    """Prints the outcome as one JSON object; the exit status is 0 also for an error that the object tells."""
    if len(argv) != 2:
        print("usage: python -m geist_pool.prepare JSON", file=sys.stderr)
        return 2
    order = msgspec.json.decode(argv[1], type=Order)
    lifeline.hold(order.parent_fd)
    try:
        outcome = _Outcome(facts=_pack(order))
    except GeistPoolError as e:
        outcome = _Outcome(error=error_body(e))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return 0


def _pack(order: Order) -> Facts:
    from geist_pool.engine import Engine, Model  # only in this process: the supervisor needs no engine

    with (
        Engine("auto", order.threads) as engine,
        Model(engine, order.model_path, cache_dir=order.cache_dir, verify=order.verify, check=True) as model,
    ):
        known = {f: getattr(model.info, f) for f in Facts.__struct_fields__ if f != "fingerprint"}
        return Facts(fingerprint=model.fingerprint, **known)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
