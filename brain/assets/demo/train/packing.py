"""Packed rows: worker processes that make them, and the attention masks that keep documents apart.

A batch is one long row of documents laid end to end. A token is stored in 16 bits: id, LOSS_BIT (the model must
say it) and FREE_BIT (any choice would do), next to its position inside its document.
"""

import multiprocessing
import random

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import render
from model import FULL, SLIDING
from tokenizer import Encoder

BLOCK = 128


def fill(encode, rng, most, brief, length):
    """One packed row: (tokens, positions), both uint16 of `length`. `brief` is the share of runs with a short head."""
    tokens, positions = np.zeros(length, np.uint16), np.zeros(length, np.uint16)
    at = 0
    while at < length:
        for row in render.random_rows(encode, rng, most, brief=rng.random() < brief):
            take = min(len(row), length - at)
            tokens[at:at + take] = row[:take]
            positions[at:at + take] = np.arange(take)
            at += take
            if at == length:
                break
    return tokens, positions


def _work(seed, length, queue, most, brief):
    encode, rng = Encoder(), random.Random(seed)
    while True:
        queue.put(fill(encode, rng, most.value, brief.value, length))


class Rows:
    """Endless fresh rows from `workers` processes; `most` and `brief` can be changed while they run."""

    def __init__(self, seed, workers, length):
        context = multiprocessing.get_context("fork")
        self.most, self.brief = context.Value("i", 4), context.Value("d", 1.0)
        self.queue = context.Queue(maxsize=4 * workers)
        self.processes = [
            context.Process(target=_work, args=(seed * 1000 + i, length, self.queue, self.most, self.brief), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()

    def next(self, device):
        tokens, positions = self.queue.get()
        both = torch.from_numpy(np.stack([tokens, positions]).astype(np.int32))
        if device != "cpu":
            both = both.pin_memory().to(device, non_blocking=True)
        return both[0], both[1]

    def close(self):
        for process in self.processes:
            process.terminate()


def unpack(stored):
    """(ids, must-say, free) of stored tokens."""
    return stored & 0x3FFF, (stored & render.LOSS_BIT) > 0, (stored & render.FREE_BIT) > 0


def targets(stored, positions):
    """What comes after each token, and which of these are the model's to say and forced or free: (ids, loss, free)."""
    ids, loss, free = unpack(stored)
    follows = torch.cat([positions[1:] > 0, positions.new_zeros(1, dtype=torch.bool)])
    nxt = torch.roll(ids, -1)
    return nxt, torch.roll(loss, -1) & follows, torch.roll(free, -1) & follows, follows


def _ordered(dense):
    return dense.sum(-1, dtype=torch.int32)[None, None], dense.argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None]


def block_mask(positions, window, strict=False):
    """Causal attention inside each document, over the newest `window` keys (None: all).

    `strict` hides the query's own key: a drafter at position L sees 0..L-1, or the newest `window` of them.
    """
    document = (positions == 0).cumsum(0)
    blocks = document.view(-1, BLOCK)
    first, last = blocks[:, 0], blocks[:, -1]
    index = torch.arange(len(first), device=positions.device)
    q, k = index[:, None], index[None, :]
    some = (k <= q) & (last[None, :] >= first[:, None])
    whole = (k < q) & (first[None, :] == last[:, None])
    reach = None
    if window is not None:
        reach = window + (1 if strict else 0)
        some &= (q - k) * BLOCK - (BLOCK - 1) < reach
        whole &= (q - k) * BLOCK + (BLOCK - 1) < reach

    def visible(b, h, q_idx, kv_idx):
        ok = (kv_idx < q_idx if strict else kv_idx <= q_idx) & (document[q_idx] == document[kv_idx])
        return ok if reach is None else ok & (q_idx - kv_idx < reach)

    part_count, part_index = _ordered(some & ~whole)
    full_count, full_index = _ordered(whole)
    return BlockMask.from_kv_blocks(part_count, part_index, full_count, full_index, BLOCK_SIZE=BLOCK, mask_mod=visible)


def flex(q, k, v, mask):
    """Attention with scale 1 over [tokens, heads, dim]; on a CPU (tests) with a dense mask."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if not q.is_cuda:
        index = torch.arange(q.shape[2])
        seen = mask.mask_mod(0, 0, index[:, None], index[None, :])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)[0].transpose(0, 1)
    return flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1)


class Attend:
    """The `attend` of the target over packed rows; keeps the keys and values for the layers that share them."""

    def __init__(self, positions, window):
        self.masks = {SLIDING: block_mask(positions, window), FULL: block_mask(positions, None)}
        self.kept = {}

    def __call__(self, owner, kind, q, k, v):
        if k is not None:
            self.kept[owner] = (k, v)
        return flex(q, *self.kept[owner], self.masks[kind])
