#!/usr/bin/env python3
"""What llama.cpp makes of Gemma 3 270M (Q4_K_M): token ids, greedy continuations, teacher-forced arg-maxes.

    python make_refs.py --model gemma3-270m.gguf        # writes refs.npz and tokenizer.json beside this file

The arrays, the prose and how llama.cpp is called are those of ../smollm2/make_refs.py, and so are most strings; the prose
is one piece of 700 tokens, longer than the model's sliding window of 512. A base model: prompts are no chats. Every token
list begins with BOS where `bos` is said, as the file asks for it.

tokenizer.json:

  model    {file, sha256, llama_cpp_python}
  prompts  [{name, text}]                           text of prompt I; its ids begin with BOS
  cases    [{text, parse_special, ids}]             no BOS

Needs numpy and llama-cpp-python.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "smollm2"))
import make_refs as smollm2  # noqa: E402

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
N_PROSE = 700

HARD = (
    *smollm2.HARD,
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk><mask><unused7>[multimodal]",
    "<table><tr><td>a</td></tr></table>\n\n\n\n<h1>b</h1>",
    "a" + " " * 70 + "b" + "\n" * 70 + "c",
    "ends with two spaces  ",
    "a \u2581 b\u2581\u2581c\u2581",
    "aaa" * 30 + " " + "ha" * 25 + " " + "=-" * 20 + "\t\t\t\t\t",
    "x >\u2581</ y > </ z ></",
    "\x01\x02\uffff\U0010ffff\U0001f9ff",
    "<0x0A><0xFF> \\n",
)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--out", type=Path, default=HERE)
    ap.add_argument("--threads", type=int, default=2)
    args = ap.parse_args()
    found = hashlib.sha256(args.model.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{args.model} has SHA-256 {found}, expected {SHA256}")

    m = smollm2.Llama(args.model, n_ctx=1024, n_threads=args.threads)
    bos = [smollm2.C.llama_vocab_bos(m.vocab)]
    prompts = [(name, text) for name, text, special in smollm2.PROMPTS if not special]
    data: dict[str, np.ndarray] = {}
    ids, logits = [], []
    for i, (name, text) in enumerate(prompts):
        prompt = bos + m.tokenize(text, False)
        top_ids, top_logits = smollm2.greedy(m, prompt)
        data[f"prompt_{i}"] = np.array(prompt, np.int32)
        ids.append(top_ids)
        logits.append(top_logits)
        said = b"".join(m.piece(int(t)) for t in top_ids[:, 0])
        print(f"{name}: {len(prompt)} tokens, smallest margin {(top_logits[:, 0] - top_logits[:, 1]).min():.4f}: {said!r}")
    data["greedy_tokens"] = np.stack(ids)[..., 0]
    data["greedy_top_logits"] = np.stack(logits)

    text = "\n\n".join((HERE.parent / "smollm2" / file).read_text(encoding="utf-8") for file, _ in smollm2.PROSE)
    row = (bos + m.tokenize(text, False))[:N_PROSE]
    if len(row) < N_PROSE:
        raise SystemExit(f"the prose has {len(row)} tokens, expected {N_PROSE}")
    m.clear()
    top_ids, top_logits = smollm2.top2(m.decode(row))
    data["prose_tokens"] = np.array(row, np.int32)
    data["prose_top_ids"] = top_ids
    data["prose_top_logits"] = top_logits
    print(f"next token right {float((top_ids[:-1, 0] == data['prose_tokens'][1:]).mean()):.3f}")

    words = dict(
        model=dict(file="gemma-3-270m-q4_k_m.gguf", sha256=SHA256, llama_cpp_python=smollm2.C.__version__),
        prompts=[dict(name=n, text=t) for n, t in prompts],
        cases=[dict(text=t, parse_special=s, ids=m.tokenize(t, s)) for t in HARD for s in (False, True)],
    )
    m.close()
    np.savez_compressed(args.out / "refs.npz", **data)
    (args.out / "tokenizer.json").write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
