#!/usr/bin/env python3
"""What llama.cpp makes of SmolLM2-135M-Instruct: token ids, greedy continuations, teacher-forced arg-maxes.

    python make_refs.py --model smollm2.gguf        # writes refs.npz and tokenizer.json beside this file

refs.npz, with P = 10 prompts, G = 64 steps, R = 2 pieces of prose, N = 512 positions:

  prompt_I          int32 [n_I]          token ids of prompt I = 0 .. P-1, no BOS
  greedy_tokens     int32 [P, G]         arg-max after the prompt, after it and one more token, ...; goes on
                                         past an end-of-generation token
  greedy_top_ids    int32 [P, G, 2]      best and second-best id of each step; [..., 0] is greedy_tokens
  greedy_top_logits float32 [P, G, 2]    their logits
  greedy_length     int32 [P]            tokens before the first end-of-generation token, or G
  greedy_text_I     uint8 [bytes]        bytes of these greedy_length[I] tokens
  prose_tokens      int32 [R, N]         token ids of the prose
  prose_top_ids     int32 [R, N, 2]      best and second-best id after positions 0 .. i
  prose_top_logits  float32 [R, N, 2]    their logits
  prose_margin      float32 [R, N]       best minus second-best

tokenizer.json:

  model    {file, sha256, llama_cpp_python}
  prompts  [{name, text, parse_special}]            text of prompt I
  prose    [{file, source}]                         order of the R axis
  cases    [{text, parse_special, ids}]             32 strings, control tokens parsed and not, no BOS

float32 KV, no flash attention, no repacked weights. A prompt is one batch and each greedy token a batch of
its own; the prose is one batch.

llama.cpp rounds activations to 8 bits with an f16 scale, and its order of additions is its own: an engine
with another order agrees in nearly every arg-max, and may differ where the two best logits are close. That
is why both are stored.

Needs numpy and llama-cpp-python.
"""

import argparse
import ctypes
import hashlib
import json
from pathlib import Path

import llama_cpp as C
import numpy as np

HERE = Path(__file__).resolve().parent
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
N_GREEDY = 64
N_PROSE = 512
GGML_TYPE_F32 = 0
FLASH_ATTENTION_OFF = 0

PROSE = (
    ("prose_inn.txt", "the context of this project's demo, as it was when the references were made"),
    ("prose_austen.txt", "Jane Austen, Pride and Prejudice (1813), opening of chapter I; public domain"),
)

SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)

# (name, text, whether control tokens in the text count as such)
PROMPTS = (
    ("one word", "The", False),
    ("fact", "The three largest rivers of Africa are", False),
    ("list", "Things to pack for a week at the sea:\n1.", False),
    (
        "code",
        'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n    if n < 2:\n',
        False,
    ),
    (
        "json",
        '{"name": "Ada Lovelace", "born": 1815, "occupation": "mathematician"}\n'
        '{"name": "Alan Turing",',
        False,
    ),
    ("german", "Es war einmal ein König, der hatte drei Söhne. Der älteste", False),
    ("french", "Le petit chat est monté sur le toit parce qu'il", False),
    (
        "long",
        "Lighthouse keepers were paid badly and read a great deal. The keeper at Corrie Point, a Mr. "
        "Laing, is known to have owned four books: a Bible, an almanac, a treatise on the diseases of "
        "sheep, and the second volume of a novel in three. He wrote eleven letters to the publisher in "
        "Edinburgh asking how it ended, and, when no answer came, he wrote the third volume himself, "
        "in the margins of the treatise on sheep. The manuscript was found in 1904 by his successor, "
        "who had brought the first volume with him and had been wondering for some years what happened "
        "next. Together the three parts make a strange book. The hero, who in the printed chapters is "
        "a lawyer, keeps, in the last part, a lighthouse; and the heroine",
        False,
    ),
    (
        "chat",
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "Explain in simple words why the sky is blue.<|im_end|>\n"
        "<|im_start|>assistant\n",
        True,
    ),
    (
        "chat with turns",
        "<|im_start|>system\n"
        "You are Odo, a ferryman who cannot swim. You like to tell long stories.<|im_end|>\n"
        "<|im_start|>user\n"
        "Good evening. Does the ferry still go tonight?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "Not while the river stands over the third step.<|im_end|>\n"
        "<|im_start|>user\n"
        "Then pass the time. Tell me the story of how you built the ferry.<|im_end|>\n"
        "<|im_start|>assistant\n",
        True,
    ),
)

HARD = (
    "",
    " ",
    "\n",
    "\t",
    "   ",
    "\n\n\n  \n",
    "a",
    "Hello, world!",
    "  two  spaces   and\ttabs\t\t ",
    "line one\nline two\r\n\r\n  line three \n\n\n",
    "It's they'LL we'Ve I'd 'tis 'S y'all'd've",
    "x=1234567;y=3.14159e-10",
    "2024-01-31 10:05:59 1/2 ½ ²³ \u0661\u0662\u0663",
    "def f(a, b):\n    return a[0] + b['k']  # comment\n\n\tpass\n",
    "über Fluß café naïve",
    "cafe\u0301 A\u030a e\u0301\u0323",
    "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430 2024 \u0433\u043e\u0434\u0430",
    "\u654f\u6377\u7684\u72d0\u72f8\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea \U0001f9d9\U0001f3fd",
    "\xa0nbsp\u2003em\u3000wide\u200bzero\ufeffbom",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|> <|im_end|>",
    "<|im_start|",
    "<|im_start|>assistant<|im_start|><repo_name>a/b<file_sep>x<jupyter_code>",
    "<s>a</s> [INST] <unk> [PAD500]",
    "a\x00b\x7f\x1b[0m",
    "--------====......!!!??? ... \u2026 \u2014\u2013",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA00000000000000000000",
    "MixedCASE snake_case camelCase kebab-case HTTPServer2Go",
    "$100.00 \u20ac5,00 50% #1 @you &c. C:\\dir\\*.txt",
)


class Llama:
    """llama.cpp's C API, as far as logits for given token ids need it."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int) -> None:
        self._log = C.llama_log_callback(lambda level, text, data: None)
        C.llama_log_set(self._log, ctypes.c_void_p(0))
        C.llama_backend_init()
        mp = C.llama_model_default_params()
        mp.n_gpu_layers = 0
        mp.use_extra_bufts = False
        self.model = C.llama_model_load_from_file(str(path).encode(), mp)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        cp = C.llama_context_default_params()
        cp.n_ctx = cp.n_batch = cp.n_ubatch = n_ctx
        cp.n_threads = cp.n_threads_batch = n_threads
        cp.type_k = cp.type_v = GGML_TYPE_F32
        cp.flash_attn_type = FLASH_ATTENTION_OFF
        self.ctx = C.llama_init_from_model(self.model, cp)
        if not self.ctx:
            raise SystemExit("llama.cpp cannot make a context")
        self.vocab = C.llama_model_get_vocab(self.model)
        self.n_vocab = C.llama_vocab_n_tokens(self.vocab)
        self.n_past = 0

    def clear(self) -> None:
        C.llama_memory_clear(C.llama_get_memory(self.ctx), True)
        self.n_past = 0

    def decode(self, tokens: list[int]) -> np.ndarray:
        """Append the tokens in one batch; logits float32 [len(tokens), n_vocab]."""
        b = C.llama_batch_init(len(tokens), 0, 1)
        b.n_tokens = len(tokens)
        for i, t in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = t, self.n_past + i, 1, 1
            b.seq_id[i][0] = 0
        rc = C.llama_decode(self.ctx, b)
        C.llama_batch_free(b)
        if rc:
            raise SystemExit(f"llama_decode returned {rc}")
        self.n_past += len(tokens)
        return np.stack([np.ctypeslib.as_array(C.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy()
                         for i in range(len(tokens))])

    def tokenize(self, text: str, parse_special: bool) -> list[int]:
        raw = text.encode()
        buf = (C.llama_token * (len(raw) + 8))()
        n = C.llama_tokenize(self.vocab, raw, len(raw), buf, len(buf), False, parse_special)
        if n < 0:
            raise SystemExit(f"llama_tokenize wants {-n} tokens for {text!r}")
        return list(buf[:n])

    def piece(self, token: int) -> bytes:
        buf = ctypes.create_string_buffer(256)
        n = C.llama_token_to_piece(self.vocab, token, buf, len(buf), 0, True)
        if n < 0:
            raise SystemExit(f"token {token} is longer than {len(buf)} bytes")
        return buf.raw[:n]

    def ends(self, token: int) -> bool:
        return bool(C.llama_vocab_is_eog(self.vocab, token))

    def close(self) -> None:
        C.llama_free(self.ctx)
        C.llama_model_free(self.model)


def top2(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [..., 2] and logits [..., 2] of the two largest; of equal ones the lower id is the larger."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :2]
    return ids.astype(np.int32), np.take_along_axis(logits, ids, -1)


def greedy(m: Llama, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Top-two ids and logits of N_GREEDY steps behind the prompt, each step taking the best."""
    m.clear()
    row = m.decode(prompt)[-1]
    steps = []
    for _ in range(N_GREEDY):
        steps.append(top2(row))
        row = m.decode([int(steps[-1][0][0])])[-1]
    return np.stack([s[0] for s in steps]), np.stack([s[1] for s in steps])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--out", type=Path, default=HERE)
    ap.add_argument("--threads", type=int, default=2)
    args = ap.parse_args()
    found = hashlib.sha256(args.model.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{args.model} has SHA-256 {found}, expected {SHA256}")
    if len(HARD) != 32:
        raise SystemExit(f"{len(HARD)} tokenizer strings, expected 32")

    m = Llama(args.model, n_ctx=1024, n_threads=args.threads)
    data: dict[str, np.ndarray] = {}
    ids, logits, length = [], [], []
    for i, (name, text, special) in enumerate(PROMPTS):
        prompt = m.tokenize(text, special)
        top_ids, top_logits = greedy(m, prompt)
        chosen = [int(t) for t in top_ids[:, 0]]
        n = next((k for k, t in enumerate(chosen) if m.ends(t)), N_GREEDY)
        said = b"".join(m.piece(t) for t in chosen[:n])
        data[f"prompt_{i}"] = np.array(prompt, np.int32)
        data[f"greedy_text_{i}"] = np.frombuffer(said, np.uint8)
        ids.append(top_ids)
        logits.append(top_logits)
        length.append(n)
        margin = top_logits[:, 0] - top_logits[:, 1]
        print(f"{name}: {len(prompt)} + {n} tokens, smallest margin {margin.min():.4f}: {said!r}")
    data["greedy_tokens"] = np.stack(ids)[..., 0]
    data["greedy_top_ids"] = np.stack(ids)
    data["greedy_top_logits"] = np.stack(logits)
    data["greedy_length"] = np.array(length, np.int32)

    tokens, ids, logits = [], [], []
    for file, _ in PROSE:
        row = m.tokenize((HERE / file).read_text(encoding="utf-8"), False)[:N_PROSE]
        if len(row) < N_PROSE:
            raise SystemExit(f"{file} has {len(row)} tokens, expected {N_PROSE}")
        m.clear()
        top_ids, top_logits = top2(m.decode(row))
        tokens.append(np.array(row, np.int32))
        ids.append(top_ids)
        logits.append(top_logits)
        right = float((top_ids[:-1, 0] == tokens[-1][1:]).mean())
        margin = top_logits[:, 0] - top_logits[:, 1]
        print(f"{file}: next token right {right:.3f}, margin below 0.1 / 0.25 / 0.5 at "
              f"{(margin < 0.1).mean():.3f} / {(margin < 0.25).mean():.3f} / {(margin < 0.5).mean():.3f}")
    data["prose_tokens"] = np.stack(tokens)
    data["prose_top_ids"] = np.stack(ids)
    data["prose_top_logits"] = np.stack(logits)
    data["prose_margin"] = data["prose_top_logits"][..., 0] - data["prose_top_logits"][..., 1]

    words = dict(
        model=dict(file="SmolLM2-135M-Instruct.Q4_1.gguf", sha256=SHA256, llama_cpp_python=C.__version__),
        prompts=[dict(name=n, text=t, parse_special=s) for n, t, s in PROMPTS],
        prose=[dict(file=f, source=s) for f, s in PROSE],
        cases=[dict(text=t, parse_special=s, ids=m.tokenize(t, s)) for t in HARD for s in (False, True)],
    )
    m.close()
    np.savez_compressed(args.out / "refs.npz", **data)
    (args.out / "tokenizer.json").write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
