"""Gemma 4's text decoder and its query-only drafter in plain PyTorch, small and fast to train.

Parameters are kept in fp32 under the checkpoint's names and cast to the activation type where they are used, so a
bf16 forward pass here rounds where a bf16 checkpoint rounds. All shapes are [tokens, ...]: rows are packed
end to end and attention is told by the caller which keys a query may see.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SLIDING, FULL = "sliding_attention", "full_attention"
EPS = 1e-6


@dataclass
class Config:
    """The fields of a Gemma 4 text configuration that the mathematics needs."""

    vocab: int = 1024
    hidden: int = 256
    inter: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    global_head_dim: int = 128
    window: int = 512
    types: tuple = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL)
    shared: int = 2
    ple: int = 32
    softcap: float | None = 30.0
    positions: int = 4096
    backbone: int = 0

    def dim(self, kind):
        return self.global_head_dim if kind == FULL else self.head_dim

    def owner(self, layer):
        """The layer whose keys and values `layer` reads."""
        first_shared = len(self.types) - self.shared
        if layer < first_shared:
            return layer
        return max(i for i in range(first_shared) if self.types[i] == self.types[layer])

    def last_owner(self, kind):
        """The layer whose keys and values the drafter's layers of this kind read."""
        return max(i for i in range(len(self.types) - self.shared) if self.types[i] == kind)


@dataclass
class DrafterConfig(Config):
    """The drafter: four query-only layers and a two-step head."""

    hidden: int = 128
    inter: int = 128
    heads: int = 2
    types: tuple = (SLIDING, SLIDING, SLIDING, FULL)
    shared: int = 4
    ple: int = 0
    softcap: float | None = None
    backbone: int = 256
    centroids: int = 64
    shortlist: int = 8


def rms_norm(x, weight=None):
    """RMS norm in fp32, weight used as it is, rounded once at the end."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * weight.to(x.dtype).float()).to(x.dtype)


def frequencies(config, kind, device):
    """Inverse frequencies, half the head size; full layers rotate the first quarter of the pairs only."""
    dim = config.dim(kind)
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    if kind == SLIDING:
        return 10_000.0 ** -exponents
    turning = torch.arange(dim // 2, device=device) < int(0.25 * dim // 2)
    return torch.where(turning, 1_000_000.0 ** -exponents, torch.zeros_like(exponents))


def rotations(config, positions):
    """(cos, sin) for each layer kind, each [tokens, 1, half a head]."""
    out = {}
    for kind in (SLIDING, FULL):
        angle = positions.float()[:, None] * frequencies(config, kind, positions.device)[None, :]
        out[kind] = (angle.cos()[:, None], angle.sin()[:, None])
    return out


def rotate(x, rotation):
    """RoPE with the halves of the head as pairs, x [tokens, heads, dim]."""
    cos, sin = rotation
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def both_roots(size):
    """The square root as it is, and rounded to bf16."""
    return size**0.5, torch.tensor(size**0.5).bfloat16().item()


class Linear(nn.Module):
    """A bias-free product whose fp32 weight is cast to the type of its input."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, size, start=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))

    def forward(self, x):
        return rms_norm(x, self.weight)


class Table(nn.Module):
    def __init__(self, rows, size, std):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, size) * std)


class Attention(nn.Module):
    def __init__(self, config, kind, owns):
        super().__init__()
        dim = config.dim(kind)
        self.heads, self.kv_heads, self.dim, self.owns = config.heads, config.kv_heads, dim, owns
        self.q_proj = Linear(config.hidden, config.heads * dim)
        self.o_proj = Linear(config.heads * dim, config.hidden)
        sharpness = (2 / dim**0.5) ** 0.5
        self.q_norm = Norm(dim, sharpness)
        if owns:
            self.k_proj = Linear(config.hidden, config.kv_heads * dim)
            self.v_proj = Linear(config.hidden, config.kv_heads * dim)
            self.k_norm = Norm(dim, sharpness)

    def forward(self, x, rotation, attend):
        q = rotate(self.q_norm(self.q_proj(x).view(-1, self.heads, self.dim)), rotation)
        k = v = None
        if self.owns:
            k = rotate(self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.dim)), rotation)
            v = rms_norm(self.v_proj(x).view(-1, self.kv_heads, self.dim))
        return self.o_proj(attend(q, k, v).reshape(-1, self.heads * self.dim))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.inter)
        self.up_proj = Linear(config.hidden, config.inter)
        self.down_proj = Linear(config.inter, config.hidden)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        post = (2 * len(config.types)) ** -0.5
        kind = config.types[index]
        self.self_attn = Attention(config, kind, index < len(config.types) - config.shared)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden)
        self.post_attention_layernorm = Norm(config.hidden, post)
        self.pre_feedforward_layernorm = Norm(config.hidden)
        self.post_feedforward_layernorm = Norm(config.hidden, post)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.ple = config.ple
        if config.ple:
            self.per_layer_input_gate = Linear(config.hidden, config.ple)
            self.per_layer_projection = Linear(config.ple, config.hidden)
            self.post_per_layer_input_norm = Norm(config.hidden, post)

    def forward(self, x, ple, rotation, attend):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if self.ple:
            g = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * ple
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(g))
        return x * self.layer_scalar.to(x.dtype)


class Target(nn.Module):
    """The decoder. `attend(owner, kind, q, k, v)` sees k and v only from the layers that own them."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        n, h, p = len(config.types), config.hidden, config.ple
        self.embed_tokens = Table(config.vocab, h, h**-0.5)
        self.embed_tokens_per_layer = Table(config.vocab, n * p, p**-0.5)
        self.per_layer_model_projection = Linear(h, n * p)
        self.per_layer_projection_norm = Norm(p)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(n))
        self.norm = Norm(h)
        self.token_scale, self.ple_scale = both_roots(h), both_roots(p)

    def embed(self, tokens, dtype):
        """Scaled token embeddings [tokens, hidden]."""
        return F.embedding(tokens, self.embed_tokens.weight).to(dtype) * self.token_scale[1 if dtype == torch.bfloat16 else 0]

    def forward(self, tokens, positions, attend, dtype=torch.bfloat16):
        """Hidden states after the final norm, [tokens, hidden]."""
        c = self.config
        n = len(c.types)
        x = self.embed(tokens, dtype)
        identity = F.embedding(tokens, self.embed_tokens_per_layer.weight).to(dtype)
        identity = identity * self.ple_scale[1 if dtype == torch.bfloat16 else 0]
        context = (self.per_layer_model_projection(x) * c.hidden**-0.5).view(-1, n, c.ple)
        ple = (identity.view(-1, n, c.ple) + self.per_layer_projection_norm(context)) * 2.0**-0.5
        turn = rotations(c, positions)
        for i, layer in enumerate(self.layers):
            kind = c.types[i]

            def seen(q, k, v, owner=c.owner(i), kind=kind):
                return attend(owner, kind, q, k, v)

            x = layer(x, ple[:, i], turn[kind], seen)
        return self.norm(x)

    def logits(self, hidden):
        """Soft-capped logits in fp32."""
        z = F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()
        return self.config.softcap * torch.tanh(z / self.config.softcap)


class Drafter(nn.Module):
    """The MTP assistant. Reads the target's keys and values; writes none."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.pre_projection = Linear(2 * config.backbone, config.hidden)
        self.post_projection = Linear(config.hidden, config.backbone)
        self.model = nn.Module()
        self.model.embed_tokens = Table(config.vocab, config.hidden, config.hidden**-0.5)
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.types)))
        self.model.norm = Norm(config.hidden)
        self.masked_embedding = nn.Module()
        self.masked_embedding.centroids = Linear(config.hidden, config.centroids)
        self.masked_embedding.register_buffer("token_ordering", torch.arange(config.vocab))

    def forward(self, embedded, hidden, turn, attend):
        """One draft step for every row: (normed hidden [T, d], the `hidden` of the next step [T, backbone]).

        `embedded` is the target's scaled embedding of the last token; `attend(kind, q)` reads the target's cache.
        """
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        for i, layer in enumerate(self.model.layers):
            kind = self.config.types[i]
            x = layer(x, None, turn[kind], lambda q, k, v, kind=kind: attend(kind, q))
        x = self.model.norm(x)
        return x, self.post_projection(x)

    def dense_logits(self, x):
        return F.linear(x, self.model.embed_tokens.weight.to(x.dtype)).float()

    def cluster_logits(self, x):
        return self.masked_embedding.centroids(x).float()

    def clusters(self):
        """The cluster of each token id."""
        order = self.masked_embedding.token_ordering
        size = self.config.vocab // self.config.centroids
        out = torch.empty_like(order)
        out[order] = torch.arange(self.config.vocab, device=order.device) // size
        return out

    def logits(self, x):
        """What serving uses: tokens outside the best clusters are -inf."""
        best = self.cluster_logits(x).topk(self.config.shortlist, -1).indices
        inside = torch.zeros(*x.shape[:-1], self.config.centroids, dtype=torch.bool, device=x.device).scatter_(-1, best, True)
        return self.dense_logits(x).masked_fill(~inside[..., self.clusters()], -math.inf)


def count(module):
    return sum(p.numel() for p in module.parameters())
