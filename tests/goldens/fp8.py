"""What the golden checkpoints give when their keys and values are stored in FP8, computed in NumPy
from the definition in docs/determinism.md and from nothing of ours.

Run by hand after make.py (numpy, safetensors):

    python tests/goldens/fp8.py [NAME ...]

Without FP8 the same code must give the logits that make.py wrote, or nothing is written. Each folder
gets `golden_fp8.safetensors`:

    logits    [tokens, vocab]   of every position, keys and values read as they are stored
    k_scale   [layers]          of the keys; 0 where a layer stores none of its own
    v_scale   [layers]          of the values, likewise
"""

import pathlib
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

from variants import BASE, F, S, VARIANTS, WINDOW

HERE = pathlib.Path(__file__).parent
EPS = BASE["rms_norm_eps"]

# Every finite number of E4M3 that is not negative, in the order of its codes.
E4M3 = np.array([(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7)
                 for e in range(16) for m in range(8)][:127])


def e4m3(x):
    """The nearest numbers of E4M3, ties to the even code, 448 from there on."""
    size = np.minimum(np.abs(x), E4M3[-1])
    above = np.searchsorted(E4M3, size).clip(1, len(E4M3) - 1)
    below = above - 1
    up, down = E4M3[above] - size, size - E4M3[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(E4M3[code], x)


def stored(x, scale):
    """What is read back of numbers that are stored in FP8, or the numbers if there is no scale."""
    if scale is None:
        return x
    # The quotient is one of fp32.
    quotient = x.astype(np.float32) / np.float32(scale)
    return e4m3(quotient.astype(np.float64)) * np.float64(np.float32(scale))


def norm(x, weight=None):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return y if weight is None else y * weight


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turn(x, kind):
    """Rotary embedding of [positions, heads, size]; only a quarter of the pairs of a full layer."""
    half = x.shape[-1] // 2
    turning = half if kind == S else half // 4
    theta = 1e4 if kind == S else 1e6
    frequency = np.zeros(half)
    frequency[:turning] = (theta ** (-2 * np.arange(turning) / x.shape[-1])).astype(np.float32)
    angle = np.arange(len(x))[:, None, None] * frequency
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * np.cos(angle) - high * np.sin(angle),
                           high * np.cos(angle) + low * np.sin(angle)], -1)


class Model:
    def __init__(self, name):
        self.v = {**BASE, **VARIANTS[name]}
        self.w = {}
        for file in sorted((HERE / name).glob("model*.safetensors")):
            for key, tensor in load_file(file).items():
                short = key.removeprefix("model.").removeprefix("language_model.")
                self.w[short] = tensor.astype(np.float64)
        self.kinds = self.v["layer_types"]
        self.owners = len(self.kinds) - self.v.get("num_kv_shared_layers", 0)

    def owner(self, i):
        if i < self.owners:
            return i
        return max(j for j in range(self.owners) if self.kinds[j] == self.kinds[i])

    def values_only(self, i):
        return self.kinds[i] == F and self.v.get("attention_k_eq_v", False)

    def cache(self, i, x, scales):
        """Keys and values of a layer as attention reads them."""
        get = lambda part: self.w[f"layers.{i}.self_attn.{part}"]
        size = self.v["head_dim"] if self.kinds[i] == S else self.v["global_head_dim"]
        heads = lambda y: y.reshape(len(y), -1, size)
        k = heads(x @ get("k_proj.weight").T)
        v = k if self.values_only(i) else heads(x @ get("v_proj.weight").T)
        k_scale, v_scale = (None, None) if scales is None else scales[i]
        v = stored(norm(v), v_scale)
        if self.values_only(i):
            # Keys are formed from what is stored of the values.
            return turn(v * get("k_norm.weight"), F), v
        return stored(turn(norm(k, get("k_norm.weight")), self.kinds[i]), k_scale), v

    def attention(self, i, x, cache):
        k, v = cache
        q = (x @ self.w[f"layers.{i}.self_attn.q_proj.weight"].T).reshape(len(x), -1, k.shape[-1])
        q = turn(norm(q, self.w[f"layers.{i}.self_attn.q_norm.weight"]), self.kinds[i])
        group = q.shape[1] // k.shape[1]
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1))
        at = np.arange(len(x))
        seen = at[None] <= at[:, None]
        if self.kinds[i] == S:
            seen &= at[None] > at[:, None] - WINDOW
        weights = softmax(np.where(seen, scores, -np.inf))
        out = np.einsum("hqk,khd->qhd", weights, v.repeat(group, 1)).reshape(len(x), -1)
        return out @ self.w[f"layers.{i}.self_attn.o_proj.weight"].T

    def experts(self, get, x):
        v = self.v
        raw = norm(x) * get("router.scale") * v["hidden_size"] ** -0.5
        share = softmax(raw @ get("router.proj.weight").T)
        inner = norm(x, get("pre_feedforward_layernorm_2.weight"))
        out = np.zeros_like(x)
        for t, shares in enumerate(share):
            best = np.argsort(-shares, kind="stable")[:v["top_k_experts"]]
            for e in best:
                gate, up = np.split(get("experts.gate_up_proj")[e] @ inner[t], 2)
                result = get("experts.down_proj")[e] @ (gelu(gate) * up)
                out[t] += shares[e] / shares[best].sum() * get("router.per_expert_scale")[e] * result
        return norm(out, get("post_feedforward_layernorm_2.weight"))

    def per_layer(self, tokens, x):
        v, w = self.v, self.w
        size = v["hidden_size_per_layer_input"]
        if not size:
            return None
        shape = (len(tokens), len(self.kinds), size)
        own = (w["embed_tokens_per_layer.weight"][tokens] * np.sqrt(size)).reshape(shape)
        context = (x @ w["per_layer_model_projection.weight"].T * v["hidden_size"] ** -0.5).reshape(shape)
        return (norm(context, w["per_layer_projection_norm.weight"]) + own) / np.sqrt(2)

    def logits(self, tokens, scales=None):
        v, w = self.v, self.w
        x = w["embed_tokens.weight"][tokens] * np.sqrt(v["hidden_size"])
        inputs = self.per_layer(tokens, x)
        caches = {}
        for i in range(len(self.kinds)):
            get = lambda part: w[f"layers.{i}.{part}"]
            a = norm(x, get("input_layernorm.weight"))
            if i < self.owners:
                caches[i] = self.cache(i, a, scales)
            branch = self.attention(i, a, caches[self.owner(i)])
            x = x + norm(branch, get("post_attention_layernorm.weight"))
            a = norm(x, get("pre_feedforward_layernorm.weight"))
            branch = gelu(a @ get("mlp.gate_proj.weight").T) * (a @ get("mlp.up_proj.weight").T)
            branch = branch @ get("mlp.down_proj.weight").T
            if v.get("enable_moe_block"):
                dense = norm(branch, get("post_feedforward_layernorm_1.weight"))
                branch = dense + self.experts(get, x)
            x = x + norm(branch, get("post_feedforward_layernorm.weight"))
            if inputs is not None:
                gate = gelu(x @ get("per_layer_input_gate.weight").T) * inputs[:, i]
                x = x + norm(gate @ get("per_layer_projection.weight").T,
                             get("post_per_layer_input_norm.weight"))
            x = x * get("layer_scalar")
        z = norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T
        cap = v["final_logit_softcapping"]
        return np.tanh(z / cap) * cap


def make(name):
    model = Model(name)
    golden = load_file(HERE / name / "golden.safetensors")
    tokens = golden["tokens"]
    plain = model.logits(tokens)
    far = np.abs(plain - golden["logits"]).max()
    assert far < 5e-4, f"{name}: {far} from what make.py wrote"
    layers = len(model.kinds)
    k_scale, v_scale = np.zeros(layers, np.float32), np.zeros(layers, np.float32)
    for i in range(model.owners):
        # None is a power of two; values reach at most the root of a head's size, 4.
        v_scale[i] = 0.0101 + 0.0013 * i
        k_scale[i] = 0.0 if model.values_only(i) else 0.0093 + 0.0017 * i
    scales = list(zip(k_scale, v_scale))
    logits = model.logits(tokens, scales)
    moved = np.abs(logits - plain).max()
    save_file({"logits": logits.astype(np.float32), "k_scale": k_scale, "v_scale": v_scale},
              HERE / name / "golden_fp8.safetensors")
    print(f"{name}: {far:.1e} from make.py without FP8; FP8 moves a logit by up to {moved:.2f}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or VARIANTS:
        make(wanted)
