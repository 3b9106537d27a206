#!/usr/bin/env python3
"""A plain numpy forward pass of GGUF architecture `qwen35`, straight from the file.

The third opinion beside transformers and llama.cpp: it works only from what
docs/qwen35.md says, in float64 by default, one token at a time through the state
that a snapshot has to hold.  Slow, and meant for tiny models.

    python qwen35_numpy.py MODEL.gguf --refs REFS.npz                # compare with reference logits
    python qwen35_numpy.py MODEL.gguf --refs REFS.npz --q8-activations
    python qwen35_numpy.py MODEL.gguf --refs REFS.npz --mutations    # what each convention is worth
"""
import argparse

import numpy as np


def load(path):
    import gguf
    r = gguf.GGUFReader(str(path))
    kv = {k: f.contents() for k, f in r.fields.items()}
    w, types = {}, {}
    for t in r.tensors:
        shape = [int(x) for x in reversed(t.shape)]
        a = t.data if t.tensor_type == gguf.GGMLQuantizationType.F32 else gguf.quants.dequantize(t.data, t.tensor_type)
        w[t.name] = np.asarray(a, dtype=np.float64).reshape(shape)
        types[t.name] = t.tensor_type.name
    return kv, w, types


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0, x)


def q8_round(x):
    """x as llama.cpp sees it when it multiplies it with a Q8_0 matrix: 8 bits per value, one f16 scale per 32."""
    b = x.astype(np.float32).reshape(-1, 32)
    amax = np.abs(b).max(1, keepdims=True)
    d = (amax / np.float32(127)).astype(np.float32)
    inv = np.where(d > 0, 1 / np.where(d > 0, d, 1), 0).astype(np.float32)
    q = np.round(b * inv)
    return (q * d.astype(np.float16).astype(np.float32)).reshape(x.shape).astype(np.float64)


def q8k_round(x):
    """The same for a K-quant matrix: 8 bits per value, one f32 scale per 256, the peak mapped to -127."""
    b = x.astype(np.float32).reshape(-1, 256)
    peak = np.take_along_axis(b, np.abs(b).argmax(1)[:, None], 1)
    inv = np.where(peak != 0, np.float32(-127) / np.where(peak != 0, peak, 1), 0).astype(np.float32)
    q = np.minimum(np.round(b * inv), 127)
    d = np.where(inv != 0, 1 / np.where(inv != 0, inv, 1), 0).astype(np.float32)
    return (q * d).reshape(x.shape).astype(np.float64)


class Qwen35:
    def __init__(self, path, dtype=np.float64, q8_activations=False, mutate=()):
        self.kv, w, self.types = load(path)
        self.w = {k: v.astype(dtype) for k, v in w.items()}
        self.dtype, self.q8, self.mut = dtype, q8_activations, set(mutate)
        p = lambda k: self.kv["qwen35." + k]
        self.layers = p("block_count") - self.kv.get("qwen35.nextn_predict_layers", 0)
        self.eps = p("attention.layer_norm_rms_epsilon")
        self.nh, self.nkv, self.hd = p("attention.head_count"), p("attention.head_count_kv"), p("attention.key_length")
        self.rot, self.theta = p("rope.dimension_count"), p("rope.freq_base")
        self.lk, self.lv = p("ssm.group_count"), p("ssm.time_step_rank")      # DeltaNet K and V heads
        self.dk, self.dv = p("ssm.state_size"), p("ssm.inner_size") // p("ssm.time_step_rank")
        self.kernel = p("ssm.conv_kernel")
        self.every = self.kv.get("qwen35.full_attention_interval", 4)
        self.reset()

    def recurrent(self, i):
        return (i + 1) % self.every != 0

    def reset(self):
        self.pos = 0
        channels = 2 * self.lk * self.dk + self.lv * self.dv
        self.state = []
        for i in range(self.layers):
            if self.recurrent(i):
                self.state.append(dict(conv=np.zeros((channels, self.kernel - 1), self.dtype),
                                       rec=np.zeros((self.lv, self.dk, self.dv), self.dtype)))
            else:
                self.state.append(dict(k=[], v=[]))

    # -- pieces

    def mul(self, name, x):
        if self.q8 and self.types[name] == "Q8_0":
            x = q8_round(x)
        if self.q8 and self.types[name].endswith("_K"):
            x = q8k_round(x)
        return self.w[name] @ x

    def rms(self, x, w, eps=None):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + (self.eps if eps is None else eps)) * w

    def rope(self, x):
        if "no rope" in self.mut:
            return x
        half = self.rot // 2
        theta = 10000.0 if "theta 10000" in self.mut else self.theta
        dim = self.hd if "frequencies over the whole head" in self.mut else self.rot
        angle = self.pos * theta ** (-2.0 * np.arange(half) / dim)
        c, s = np.cos(angle), np.sin(angle)
        y = x.copy()
        if "rope pairs adjacent" in self.mut:
            a, b = x[..., 0:self.rot:2], x[..., 1:self.rot:2]
            y[..., 0:self.rot:2], y[..., 1:self.rot:2] = a * c - b * s, a * s + b * c
        elif "rope pairs across the whole head" in self.mut:
            h = self.hd // 2
            a, b = x[..., :half], x[..., h:h + half]
            y[..., :half], y[..., h:h + half] = a * c - b * s, a * s + b * c
        elif "rope rotates the last dims" in self.mut:
            o = self.hd - self.rot
            a, b = x[..., o:o + half], x[..., o + half:]
            y[..., o:o + half], y[..., o + half:] = a * c - b * s, a * s + b * c
        else:
            a, b = x[..., :half], x[..., half:self.rot]
            y[..., :half], y[..., half:self.rot] = a * c - b * s, a * s + b * c
        return y

    def delta_net(self, i, x):
        w = lambda n: self.w[f"blk.{i}.{n}"]
        st = self.state[i]
        qkv = self.mul(f"blk.{i}.attn_qkv.weight", x)
        z = self.mul(f"blk.{i}.attn_gate.weight", x).reshape(self.lv, self.dv)
        beta = sigmoid(self.mul(f"blk.{i}.ssm_beta.weight", x))
        g = w("ssm_a") * softplus(self.mul(f"blk.{i}.ssm_alpha.weight", x) + w("ssm_dt.bias"))
        if "ssm_a is A_log" in self.mut:
            g = -np.exp(w("ssm_a")) * softplus(self.mul(f"blk.{i}.ssm_alpha.weight", x) + w("ssm_dt.bias"))
        if "no dt bias" in self.mut:
            g = w("ssm_a") * softplus(self.mul(f"blk.{i}.ssm_alpha.weight", x))
        if "beta without sigmoid" in self.mut:
            beta = self.mul(f"blk.{i}.ssm_beta.weight", x)
        window = np.concatenate([st["conv"], qkv[:, None]], axis=1)
        kernel = w("ssm_conv1d.weight")
        if "conv reversed" in self.mut:
            kernel = kernel[:, ::-1]
        c = (window * kernel).sum(1)
        st["conv"] = window[:, 1:]
        if "no SiLU after conv" not in self.mut:
            c = silu(c)
        kd = self.lk * self.dk
        q, k, v = c[:kd].reshape(self.lk, self.dk), c[kd:2 * kd].reshape(self.lk, self.dk), c[2 * kd:].reshape(self.lv, self.dv)
        if "k before q" in self.mut:
            q, k = k, q
        norm = lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + self.eps)
        if "no l2norm" not in self.mut:
            q, k = norm(q), norm(k)
        if "l2norm as rms norm" in self.mut:
            q, k = q * np.sqrt(self.dk), k * np.sqrt(self.dk)
        if "no q scale" not in self.mut:
            q = q / np.sqrt(self.dk)
        out = np.empty((self.lv, self.dv), self.dtype)
        for h in range(self.lv):
            kh = h // (self.lv // self.lk) if "V heads grouped" in self.mut else h % self.lk
            s = st["rec"][h] * (1.0 if "no decay" in self.mut else np.exp(g[h]))
            if "decay after update" in self.mut:
                s = st["rec"][h]
            d = beta[h] * (v[h] - (0 if "no delta rule" in self.mut else k[kh] @ s))
            s = s + np.outer(k[kh], d)
            out[h] = q[kh] @ s
            st["rec"][h] = s * np.exp(g[h]) if "decay after update" in self.mut else s
        weight = w("ssm_norm.weight")
        if "1 + ssm_norm" in self.mut:
            weight = 1 + weight
        if "gate before norm" in self.mut:
            y = self.rms(out * silu(z), weight)
        elif "gate is sigmoid" in self.mut:
            y = self.rms(out, weight) * sigmoid(z)
        else:
            y = self.rms(out, weight) * silu(z)
        return self.mul(f"blk.{i}.ssm_out.weight", y.reshape(-1))

    def attention(self, i, x):
        w = lambda n: self.w[f"blk.{i}.{n}"]
        st = self.state[i]
        qg = self.mul(f"blk.{i}.attn_q.weight", x)
        if "q and gate in two halves" in self.mut:
            q, gate = qg[:self.nh * self.hd].reshape(self.nh, self.hd), qg[self.nh * self.hd:].reshape(self.nh, self.hd)
        elif "gate before q" in self.mut:
            gate, q = np.split(qg.reshape(self.nh, 2 * self.hd), 2, axis=1)
        else:
            q, gate = np.split(qg.reshape(self.nh, 2 * self.hd), 2, axis=1)
        k = self.mul(f"blk.{i}.attn_k.weight", x).reshape(self.nkv, self.hd)
        v = self.mul(f"blk.{i}.attn_v.weight", x).reshape(self.nkv, self.hd)
        qn, kn = w("attn_q_norm.weight"), w("attn_k_norm.weight")
        if "q/k norm after rope" in self.mut:
            q, k = self.rms(self.rope(q), qn), self.rms(self.rope(k), kn)
        else:
            q, k = self.rope(self.rms(q, qn)), self.rope(self.rms(k, kn))
        st["k"].append(k)
        st["v"].append(v)
        keys, values = np.stack(st["k"], 1), np.stack(st["v"], 1)          # [kv heads, tokens, head dim]
        out = np.empty((self.nh, self.hd), self.dtype)
        for h in range(self.nh):
            kh = h % self.nkv if "kv heads tiled" in self.mut else h // (self.nh // self.nkv)
            s = keys[kh] @ q[h] / (np.sqrt(self.rot) if "scale by rotary dim" in self.mut else np.sqrt(self.hd))
            p = np.exp(s - s.max())
            out[h] = (p / p.sum()) @ values[kh]
        if "no output gate" not in self.mut:
            out = out * (silu(gate) if "output gate is SiLU" in self.mut else sigmoid(gate))
        return self.mul(f"blk.{i}.attn_output.weight", out.reshape(-1))

    def mlp(self, i, x):
        return self.mul(f"blk.{i}.ffn_down.weight",
                        silu(self.mul(f"blk.{i}.ffn_gate.weight", x)) * self.mul(f"blk.{i}.ffn_up.weight", x))

    def step(self, token):
        """Logits after one more token; also leaves the layer inputs in self.hidden."""
        add = 1.0 if "1 + norm weights" in self.mut else 0.0
        x = self.w["token_embd.weight"][token]
        self.hidden = [x]
        for i in range(self.layers):
            y = self.rms(x, add + self.w[f"blk.{i}.attn_norm.weight"])
            x = x + (self.delta_net(i, y) if self.recurrent(i) else self.attention(i, y))
            x = x + self.mlp(i, self.rms(x, add + self.w[f"blk.{i}.post_attention_norm.weight"]))
            self.hidden.append(x)
        self.pos += 1
        head = "output.weight" if "output.weight" in self.w else "token_embd.weight"
        return self.mul(head, self.rms(x, add + self.w["output_norm.weight"]))

    def run(self, tokens):
        self.reset()
        return np.stack([self.step(int(t)) for t in tokens])


MUTATIONS = [
    "1 + norm weights", "1 + ssm_norm", "ssm_a is A_log", "no dt bias", "beta without sigmoid", "conv reversed",
    "no SiLU after conv", "k before q", "no l2norm", "l2norm as rms norm", "no q scale", "V heads grouped",
    "no decay", "decay after update", "no delta rule", "gate before norm", "gate is sigmoid",
    "q and gate in two halves", "gate before q", "q/k norm after rope", "kv heads tiled", "no output gate",
    "output gate is SiLU", "scale by rotary dim", "no rope", "rope pairs adjacent", "rope pairs across the whole head",
    "rope rotates the last dims", "theta 10000", "frequencies over the whole head"]


def diff(a, b):
    d = np.abs(a - b)
    return f"max abs {d.max():9.3g}  rms rel {np.sqrt((d ** 2).mean() / (a ** 2).mean()):9.3g}"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--refs", required=True)
    ap.add_argument("--lengths", default="1,17,130")
    ap.add_argument("--float32", action="store_true")
    ap.add_argument("--q8-activations", action="store_true", help="round activations as llama.cpp does for Q8_0 and K-quant matrices")
    ap.add_argument("--mutations", action="store_true")
    args = ap.parse_args()
    refs = np.load(args.refs)
    dtype = np.float32 if args.float32 else np.float64
    lengths = [int(n) for n in args.lengths.split(",")]
    m = Qwen35(args.model, dtype, args.q8_activations)
    for n in lengths:
        got = m.run(refs[f"tokens_{n}"])
        for who in ("hf", "llama"):
            if f"{who}_{n}" in refs:
                print(f"{n:4} tokens, numpy vs {who:5}: {diff(got, refs[f'{who}_{n}'])}")
    if args.mutations:
        n = lengths[-1]
        base = m.run(refs[f"tokens_{n}"])
        for mut in MUTATIONS:
            m = Qwen35(args.model, dtype, args.q8_activations, [mut])
            with np.errstate(all="ignore"):
                print(f"  {mut:34} {diff(base, m.run(refs[f'tokens_{n}']))}")


if __name__ == "__main__":
    main()
