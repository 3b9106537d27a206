"""llama.cpp through its C API, told what to do line by line. Run by path with a Python that has llama-cpp-python; see llama.py.

A request is one JSON object with `do`, the reply one with `ok`; a request that fails is answered with `error`, and the next one
is taken. Only the calls of the C API that do the work are timed, with everything prepared that can be. The engine keeps its own
best: flash attention and repacked weights as it chooses, KV in f16, 512 tokens in a physical batch. What it logs is dropped.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp as C

N_UBATCH = 512
SEQUENCE = 0


class Engine:
    """One model, one context, one sequence."""

    def __init__(self) -> None:
        self._silence = C.llama_log_callback(lambda level, text, data: None)  # kept: the engine calls it
        C.llama_log_set(self._silence, ctypes.c_void_p(0))
        C.llama_backend_init()
        self._context: Any = None
        self._n_vocab = 0
        self._state: Any = None  # kept buffer
        self._state_bytes = 0

    def load(self, model: str, threads: int, n_ctx: int, n_batch: int) -> dict[str, Any]:
        mp = C.llama_model_default_params()
        mp.n_gpu_layers = 0
        began = time.perf_counter()
        loaded = C.llama_model_load_from_file(model.encode(), mp)
        if not loaded:
            raise RuntimeError(f"llama.cpp does not load {model}")
        cp = C.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = n_ctx, n_batch, min(N_UBATCH, n_batch), 1
        cp.n_threads = cp.n_threads_batch = threads
        self._context = C.llama_init_from_model(loaded, cp)
        if not self._context:
            raise RuntimeError(f"llama.cpp gives no context of {n_ctx} tokens")
        self._n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(loaded))
        return {
            "seconds": time.perf_counter() - began,
            "version": C.__version__,
            "system": C.llama_print_system_info().decode().strip(),
            "n_vocab": self._n_vocab,
            "n_ubatch": min(N_UBATCH, n_batch),
            "flash_attention": cp.flash_attn_type,
            "repacked": bool(mp.use_extra_bufts),
        }

    def set_threads(self, threads: int) -> dict[str, Any]:
        C.llama_set_n_threads(self._context, threads, threads)
        return {}

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """From an empty sequence; the logits of the last token are computed."""
        self._forget()
        return {"seconds": self._take_in(tokens), "token": self._likeliest()}

    def decode(self, tokens: list[int]) -> dict[str, Any]:
        """Takes in these tokens, one a call, whatever it would have said itself."""
        seconds = [self._take_in([token]) for token in tokens]
        return {"seconds": seconds, "token": self._likeliest()}

    def state_save(self) -> dict[str, Any]:
        """The sequence's state into a buffer that is kept. The buffer is touched before the clock runs."""
        n = C.llama_state_seq_get_size(self._context, SEQUENCE)
        if self._state is None or len(self._state) < n:
            self._state = (ctypes.c_uint8 * n)()
            ctypes.memset(self._state, 1, n)
        began = time.perf_counter()
        written = C.llama_state_seq_get_data(self._context, self._state, n, SEQUENCE)
        seconds = time.perf_counter() - began
        if written == 0:
            raise RuntimeError("llama.cpp saved no state")
        self._state_bytes = written
        return {"seconds": seconds, "bytes": written}

    def state_load(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._restore()
        return {"seconds": time.perf_counter() - began, "bytes": self._state_bytes}

    def decide(self, tokens: list[int], n: int) -> dict[str, Any]:
        """The saved state, the suffix, `n` greedy tokens: the shortest loop for it that this API allows."""
        began = time.perf_counter()
        self._restore()
        batch = (C.llama_token * len(tokens))(*tokens)
        self._decode(batch, len(tokens))
        said = [self._likeliest()]
        one = (C.llama_token * 1)()
        for _ in range(n - 1):
            one[0] = said[-1]
            self._decode(one, 1)
            said.append(self._likeliest())
        return {"seconds": time.perf_counter() - began, "tokens": said}

    def _forget(self) -> None:
        C.llama_memory_clear(C.llama_get_memory(self._context), False)

    def _restore(self) -> None:
        if not self._state_bytes:
            raise RuntimeError("no state was saved")
        if C.llama_state_seq_set_data(self._context, self._state, self._state_bytes, SEQUENCE) == 0:
            raise RuntimeError("llama.cpp took no state in")

    def _take_in(self, tokens: list[int]) -> float:
        ids = (C.llama_token * len(tokens))(*tokens)
        began = time.perf_counter()
        self._decode(ids, len(tokens))
        return time.perf_counter() - began

    def _decode(self, ids: Any, n: int) -> None:
        if status := C.llama_decode(self._context, C.llama_batch_get_one(ids, n)):
            raise RuntimeError(f"llama_decode returned {status}")
        C.llama_synchronize(self._context)

    def _likeliest(self) -> int:
        logits = ctypes.cast(C.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return arg_max(logits, self._n_vocab)


def arg_max(logits: Any, n: int) -> int:
    """The lowest index of the greatest value."""
    import numpy as np

    return int(np.ctypeslib.as_array(logits, (n,)).argmax())


def serve(engine: Engine, lines: Any, reply: Callable[[dict[str, Any]], None]) -> None:
    """Answers each line until there are no more."""
    for line in lines:
        request = json.loads(line)
        what = request.pop("do")
        try:
            if what not in ("load", "set_threads", "prefill", "decode", "state_save", "state_load", "decide"):
                raise ValueError(f"nothing is called {what!r}")
            reply({"ok": True, **getattr(engine, what)(**request)})
        except Exception as error:  # whatever it is, the parent is told and goes on or ends
            reply({"ok": False, "error": f"{type(error).__name__}: {error}"})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed here is no answer
    serve(Engine(), sys.stdin, lambda answer: print(json.dumps(answer), file=answers))


if __name__ == "__main__":
    main()
