"""Sampling as the demo does it (temperature 1, top_k 64, top_p 0.95), and the Gumbel coupling of drafter and target."""

import math

import torch

TOP_K, TOP_P = 64, 0.95


def filtered(logits):
    """Logits with everything outside top_k and then top_p at -inf; the token that crosses top_p stays."""
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    values[..., TOP_K:] = -math.inf
    share = values.softmax(-1)
    before = share.cumsum(-1) - share
    values = values.masked_fill(before >= TOP_P, -math.inf)
    return torch.full_like(values, -math.inf).scatter_(-1, ids, values)


def gumbel(shape, device, generator=None):
    u = torch.rand(shape, device=device, generator=generator, dtype=torch.float64).clamp_(1e-12, 1 - 1e-12)
    return -torch.log(-torch.log(u))


def sample(logits, generator=None):
    """One token for each row of logits."""
    kept = filtered(logits).double()
    return (kept + gumbel(kept.shape, kept.device, generator)).argmax(-1)


def noise_given(kept, token, generator=None):
    """Gumbel noise [rows, vocab] drawn given that `token` wins over the filtered logits `kept`."""
    kept = kept.double()
    noise = gumbel(kept.shape, kept.device, generator)
    top = kept.logsumexp(-1, keepdim=True) + gumbel(kept.shape[:-1] + (1,), kept.device, generator)
    held = -torch.log(torch.exp(-top) + torch.exp(-(kept + noise)))
    held = torch.where(torch.isfinite(kept), held, kept)
    held.scatter_(-1, token[..., None], top)
    return torch.where(torch.isfinite(kept), held - kept, noise)
