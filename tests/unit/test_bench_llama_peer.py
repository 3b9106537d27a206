"""Properties of the child that drives llama.cpp, run as it is with a stand-in for llama_cpp: replies belong to their requests, a
saved state is where `decide` goes on from, a refusal is told and survived, whatever the engine prints is no reply, a missing
engine is one sentence, and no process is left. Tolerance: none. The stand-in's likeliest token is the sum of all tokens so far,
modulo its vocabulary.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    llama: Any = importlib.import_module("bench.peers.llama")
finally:
    sys.path.remove(str(ROOT))

N_VOCAB = 97
FAKE = f"""
import ctypes
__version__ = "0.0-fake"
llama_token = ctypes.c_int32
taken = []
class Params:
    use_extra_bufts, flash_attn_type = True, -1
def llama_log_callback(function): return function
def llama_log_set(function, data): pass
def llama_backend_init(): print("a line on stdout", flush=True)
def llama_model_default_params(): return Params()
def llama_context_default_params(): return Params()
def llama_model_load_from_file(path, params): return 0 if b"missing" in path else 1
def llama_init_from_model(model, params):
    assert params.n_threads == params.n_threads_batch and params.n_ubatch <= params.n_batch
    return 1
def llama_model_get_vocab(model): return 1
def llama_vocab_n_tokens(vocab): return {N_VOCAB}
def llama_print_system_info(): return b"FAKE = 1 | "
def llama_set_n_threads(context, a, b): print("threads", a, b)
def llama_get_memory(context): return 1
def llama_memory_clear(memory, data): taken.clear()
def llama_batch_get_one(ids, n): return list(ids[:n])
def llama_decode(context, batch):
    if 96 in batch: return -1
    taken.extend(batch)
    return 0
def llama_synchronize(context): pass
def llama_get_logits_ith(context, i):
    logits = (ctypes.c_float * {N_VOCAB})()
    logits[sum(taken) % {N_VOCAB}] = 1
    return logits
def llama_state_seq_get_size(context, sequence): return 4 * len(taken)
def llama_state_seq_get_data(context, buffer, n, sequence):
    ctypes.memmove(buffer, (ctypes.c_int32 * len(taken))(*taken), n)
    return n
def llama_state_seq_set_data(context, buffer, n, sequence):
    taken[:] = (ctypes.c_int32 * (n // 4)).from_buffer_copy(bytes(buffer)[:n])
    return n
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, where the child looks for llama_cpp."""
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("engine")
def test_everything_that_can_be_asked() -> None:
    with llama.LlamaPeer() as peer:
        about = peer.load(Path("some.gguf"), threads=1, n_ctx=64)
        assert (about["version"], about["system"], about["n_ubatch"], about["repacked"]) == ("0.0-fake", "FAKE = 1 |", 512, True)
        peer.set_threads(2)
        passed = peer.prefill([1, 2, 3])
        assert passed.token == 6 and passed.seconds > 0
        assert peer.prefill([4, 5]).token == 9  # from an empty sequence
        seconds, n = peer.state_save()
        assert seconds > 0 and n == 8
        times, token = peer.decode([10, 20, 30])
        assert len(times) == 3 and min(times) > 0 and token == 69
        assert peer.state_load() > 0
        assert peer.decode([1])[1] == 10
        for _ in range(2):
            assert peer.decide([1, 2], 3)[1] == [12, 24, 48]
        assert peer.decide([7])[1] == [16]
        assert peer.prefill([1] * 20).token == 20
        assert peer.state_save()[1] == 80  # a larger buffer
        assert peer.decide([1])[1] == [21]
        child = peer._child
    assert child is not None and child.returncode == 0


@pytest.mark.usefixtures("engine")
def test_refusals_are_told_and_survived() -> None:
    with llama.LlamaPeer() as peer:
        with pytest.raises(llama.PeerError, match=r"does not load missing\.gguf"):
            peer.load(Path("missing.gguf"), threads=1, n_ctx=64)
        peer.load(Path("some.gguf"), threads=1, n_ctx=64)
        with pytest.raises(llama.PeerError, match="no state was saved"):
            peer.state_load()
        with pytest.raises(llama.PeerError, match="llama_decode returned -1"):
            peer.prefill([96])
        with pytest.raises(llama.PeerError, match="nothing is called"):
            peer._ask("reboot")
        assert peer.prefill([1, 2]).token == 3


def test_an_engine_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such engine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for python in (None, str(tmp_path / "no-python")):
        with ExitStack() as stack:
            args = SimpleNamespace(no_peer=False, peer_python=python)
            peer, words = llama.opened(stack, args, Path("some.gguf"), threads=1, n_ctx=64)
        assert peer is None and words["peer"].startswith("none: ")
        assert capsys.readouterr().err.startswith("measured without llama.cpp: ")
    with ExitStack() as stack:
        assert llama.opened(stack, SimpleNamespace(no_peer=True), Path("x"), threads=1, n_ctx=64)[0] is None
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("engine")
def test_one_that_is_there_is_described() -> None:
    with ExitStack() as stack:
        args = SimpleNamespace(no_peer=False, peer_python=sys.executable)
        peer, words = llama.opened(stack, args, Path("some.gguf"), threads=1, n_ctx=64)
        assert peer is not None and peer.prefill([5]).token == 5
    assert words == {"peer": "llama.cpp of llama-cpp-python 0.0-fake", "peer_system": "FAKE = 1 |"}
