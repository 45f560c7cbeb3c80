"""Three measurements of an exported checkpoint, on held-out tasks and with the bf16 weights.

teacher: errors and sampling risk on the model's forced tokens of taught runs.
free:    whole runs with simulated tools, sampled as the demo samples, judged by the oracle.
draft:   how many tokens a round of drafting and checking emits, with the coupled noise that serving uses.
"""

import argparse
import collections
import json
import random
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import packing
import render
import task
from drafter import DEPTH, chains, draft_step, target_pass
from export import ASSETS, load_drafter, load_target
from model import SLIDING
from sampling import filtered, noise_given, sample
from tokenizer import Encoder

HELD_OUT = 1_000_003


@torch.no_grad()
def teacher(target, args, device):
    """Forced tokens: wrong ones, and the chance that sampling leaves the taught path."""
    rows = packing.Rows(HELD_OUT + args.rank, args.workers, args.tokens)
    rows.most.value, rows.brief.value = 48, 0.0

    def measure(stored, positions):
        hidden, _ = target_pass(target, stored, positions)
        nxt, must, free, _ = packing.targets(stored, positions)
        logits = target.logits(hidden)
        forced = must & ~free
        log_p = logits.log_softmax(-1).gather(-1, nxt.long()[:, None])[:, 0]
        best = logits.argmax(-1) == nxt
        sure = best & (log_p > -0.0512)
        return forced.sum(), (forced & ~best).sum(), forced & ~sure, logits, nxt, must.sum()

    run = torch.compile(measure, dynamic=False) if device == "cuda" else measure
    forced = wrong = said = unsure_count = 0
    risk, kinds = 0.0, collections.Counter()
    while said < args.teacher_tokens:
        stored, positions = rows.next(device)
        f, w, unsure, logits, nxt, m = run(stored, positions)
        at = unsure.nonzero()[:, 0]
        if len(at):
            kept = filtered(logits[at]).log_softmax(-1)
            risk += float((1 - kept.gather(-1, nxt[at].long()[:, None]).exp()).sum())
            for i in at.tolist()[:20]:
                kinds[(int(stored[i]) & 0x3FFF, int(nxt[i]))] += 1
        forced, wrong, said, unsure_count = forced + int(f), wrong + int(w), said + int(m), unsure_count + len(at)
    rows.close()
    names = {v: k for k, v in Encoder().vocab.items()}
    return {"model_tokens": said, "forced": forced, "wrong": wrong, "wrong_share": wrong / forced, "unsure": unsure_count,
            "sampling_risk": risk, "sampling_risk_share": risk / forced,
            "where": [f"{names[a]!r} -> {names[b]!r} x{n}" for (a, b), n in kinds.most_common(12)]}


class Session:
    """One free run: its workspace, its prompt, and the tokens the model has not seen yet."""

    def __init__(self, encode, names, seed, files):
        rng = random.Random(seed)
        self.ws, self.names, self.encode, self.rng = task.make_workspace(rng, files, demo=True), names, encode, rng
        self.transcript = render.Transcript(encode, self.ws.goal, render.LIMIT)
        self.steps, self.own, self.failure, self.finished, self.deviation = 0, [], None, False, None
        self.pending, self.length = list(self.transcript.tokens), 0

    def say(self, token):
        """Takes a sampled token; at the stop token runs the tool and queues what the model has to read next."""
        self.own.append(token)
        if token != render.STOP:
            self.pending = [token]
            if len(self.own) >= render.MARGIN or token in (1, 106):
                self.failure = f"step {self.steps}: no call in {self.text()[:200]!r}"
            return
        parsed = re.fullmatch(r"(.*)<\|tool_call>call:(\w+)\{(.*)\}<tool_call\|><\|tool_response>", self.text(), re.S)
        if not parsed:
            self.failure = f"step {self.steps}: no call in {self.text()[:200]!r}"
            return
        pairs = dict(re.findall(r'(\w+):<\|"\|>(.*?)<\|"\|>', parsed[3], re.S))
        exchange = task.Exchange(parsed[1], parsed[2], pairs)
        _, name, wanted = task.decide(self.ws, self.transcript.visible(), self.rng)
        if self.deviation is None and name not in ("bash", "finish") and (name, wanted) != (exchange.name, pairs):
            self.deviation = f"step {self.steps}: {exchange.name} {pairs} instead of {name} {wanted}"
        exchange.result = task.perform(self.ws, exchange.name, pairs)
        before = len(self.transcript.tokens)
        self.transcript.add(exchange, self.own)
        self.steps, own = self.steps + 1, len(self.own)
        self.own = []
        if exchange.name == "finish":
            self.finished = True
        elif self.steps > 400:
            self.failure = "more than 400 steps"
        elif self.transcript.full():
            self.transcript.compact()
            self.pending, self.length = list(self.transcript.tokens), 0
        else:
            self.pending = self.transcript.tokens[before + own - 1:]

    def text(self):
        pieces = "".join(self.names[t] for t in self.own)
        return pieces.replace("▁", " ")

    def over(self):
        return self.finished or self.failure is not None

    def result(self):
        wrong = task.oracle(self.ws)
        return {"right": self.finished and not wrong, "steps": self.steps, "failure": self.failure, "wrong_files": wrong[:3],
                "deviation": self.deviation, "compactions": self.transcript.compactions}


class Decoder:
    """The target over many ragged sequences at once, with one cache line per sequence."""

    def __init__(self, target, batch, device):
        self.target, self.batch, self.device, c = target, batch, device, target.config
        self.size = render.LIMIT + 1
        owners = sorted({c.owner(i) for i in range(len(c.types))})
        self.cache = {o: [torch.zeros(batch, self.size, c.kv_heads, c.dim(c.types[o]), dtype=torch.bfloat16, device=device)
                          for _ in "kv"] for o in owners}

    @torch.no_grad()
    def feed(self, chunks, lengths, width):
        """Feeds up to `width` tokens to each sequence; logits after the last one of each."""
        ids = torch.zeros(self.batch, width, dtype=torch.long)
        slots = torch.full((self.batch, width), self.size - 1)
        for b, chunk in enumerate(chunks):
            ids[b, :len(chunk)] = torch.tensor(chunk, dtype=torch.long)
            slots[b, :len(chunk)] = torch.arange(lengths[b], lengths[b] + len(chunk))
        ids, slots = ids.to(self.device), slots.to(self.device)
        reach = max(n + len(c) for n, c in zip(lengths, chunks))
        reach = min(self.size, (reach + 127) // 128 * 128)
        index = torch.arange(reach, device=self.device)
        causal = index <= slots[..., None]
        window = causal & (index > slots[..., None] - self.target.config.window)
        line = torch.arange(self.batch, device=self.device)[:, None].expand_as(slots)

        def attend(owner, kind, q, k, v):
            keys, values = self.cache[owner]
            if k is not None:
                keys[line, slots] = k.view(self.batch, width, *k.shape[1:])
                values[line, slots] = v.view(self.batch, width, *v.shape[1:])
            mask = (window if kind == SLIDING else causal)[:, None]
            q = q.view(self.batch, width, *q.shape[1:]).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, keys[:, :reach].transpose(1, 2), values[:, :reach].transpose(1, 2),
                                                 attn_mask=mask, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2).reshape(-1, *q.shape[1:2], q.shape[-1])

        hidden = self.target(ids.view(-1), slots.view(-1), attend).view(self.batch, width, -1)
        last = torch.tensor([max(len(c), 1) - 1 for c in chunks], device=self.device)
        return self.target.logits(hidden[torch.arange(self.batch, device=self.device), last])


def free(target, args, device):
    """`args.runs` whole runs side by side."""
    encode = Encoder()
    names = {v: k for k, v in encode.vocab.items()}
    sessions = [Session(encode, names, HELD_OUT + 10_000 * args.rank + i, args.files) for i in range(args.runs)]
    decoder = Decoder(target, args.runs, device)
    noise = torch.Generator(device=device).manual_seed(9 + args.rank)
    turn, started = 0, time.time()
    while not all(s.over() for s in sessions) and time.time() - started < args.free_seconds:
        turn += 1
        single = [not s.over() and len(s.pending) == 1 for s in sessions]
        waiting = any(not s.over() and len(s.pending) > 1 for s in sessions)
        width = 64 if waiting and (turn % 12 == 0 or not any(single)) else 1
        chunks = [s.pending[:width] if not s.over() and (width > 1 or alone) else [] for s, alone in zip(sessions, single)]
        logits = decoder.feed(chunks, [s.length for s in sessions], width)
        tokens = sample(logits, noise).tolist()
        for session, chunk, token in zip(sessions, chunks, tokens):
            session.length += len(chunk)
            session.pending = session.pending[len(chunk):]
            if chunk and not session.pending:
                session.say(token)
    results = [s.result() for s in sessions]
    steps = [r["steps"] for r in results]
    return {"runs": len(results), "right": sum(r["right"] for r in results), "calls": [min(steps), max(steps)],
            "compactions": sum(r["compactions"] for r in results), "seconds": round(time.time() - started, 1),
            "failures": [r for r in results if not r["right"]][:6]}


@torch.no_grad()
def accepted(target, drafter, stored, positions, generator):
    """[depth, rows]: whether the draft for L+k+1 equals the taught token, noise shared; and the rows' validity."""
    hidden, kv = target_pass(target, stored, positions)
    logits = target.logits(hidden)
    hidden = torch.roll(hidden, 1, 0)
    ids, must, _ = packing.unpack(stored)
    kept = filtered(torch.roll(logits, 1, 0))
    noise = noise_given(kept, ids.long(), generator)
    legal = torch.isfinite(kept.gather(-1, ids.long()[:, None])[:, 0])
    out, wins = [], []
    for k, (last, answer, valid) in enumerate(chains(stored, DEPTH)):
        x, hidden = draft_step(drafter, target.embed(last, hidden.dtype), hidden, positions, kv)
        draft = (filtered(drafter.logits(x)) + torch.roll(noise, -k - 1, 0)).argmax(-1)
        out.append((draft == answer) & torch.roll(legal, -k - 1) & valid)
        wins.append(valid)
    return torch.stack(out), torch.stack(wins), must


def rounds(ok, must, depth):
    """(tokens, rounds) with `depth` drafts a round, and accepted counts by position.

    The first token of a step comes with the prefill and is not counted; a round's own token is.
    """
    tokens = count = 0
    hits, tries = np.zeros(depth), np.zeros(depth)
    starts = np.flatnonzero(must & ~np.roll(must, 1))
    ends = np.flatnonzero(must & ~np.roll(must, -1))
    if len(ends) and len(starts) and ends[0] < starts[0]:
        ends = ends[1:]
    for start, end in zip(starts, ends):
        at = start
        while at < end:
            n = 0
            while n < depth and at + n + 1 <= end:
                tries[n] += 1
                if not ok[n, at]:
                    break
                hits[n] += 1
                n += 1
            emitted = min(n + 1, end - at)
            tokens, count, at = tokens + emitted, count + 1, at + emitted
    return tokens, count, hits, tries


def draft(target, drafter, args, device):
    rows = packing.Rows(HELD_OUT + 500 + args.rank, args.workers, args.tokens)
    rows.most.value, rows.brief.value = 48, 0.0
    generator = torch.Generator(device=device).manual_seed(3)
    kinds = {}
    for _ in range(args.draft_rows):
        stored, positions = rows.next(device)
        ok, _, must = (t.cpu().numpy() for t in accepted(target, drafter, stored, positions, generator))
        for depth in (3, 4, 5, 6, 8):
            tokens, count, hits, tries = rounds(ok, must, depth)
            entry = kinds.setdefault(depth, [0, 0, np.zeros(depth), np.zeros(depth)])
            for i, value in enumerate((tokens, count, hits, tries)):
                entry[i] = entry[i] + value
    rows.close()
    return {str(d): {"tokens_per_round": round(t / c, 3), "accepted_given_reached": [round(x, 3) for x in (h / np.maximum(n, 1)).tolist()]}
            for d, (t, c, h, n) in kinds.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("what", nargs="+", choices=["teacher", "free", "draft"])
    p.add_argument("--assets", type=Path, default=ASSETS)
    p.add_argument("--device", default="cuda")
    p.add_argument("--teacher-tokens", type=int, default=5_000_000)
    p.add_argument("--runs", type=int, default=50)
    p.add_argument("--files", type=int, default=40)
    p.add_argument("--free-seconds", type=float, default=1e9)
    p.add_argument("--draft-rows", type=int, default=8)
    p.add_argument("--tokens", type=int, default=49152)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--rank", type=int, default=0, help="another share of the held-out tasks")
    args = p.parse_args()
    torch.set_float32_matmul_precision("high")
    target = load_target(args.assets).to(args.device)
    for what in args.what:
        started = time.time()
        if what == "teacher":
            result = teacher(target, args, args.device)
        elif what == "free":
            result = free(target, args, args.device)
        else:
            result = draft(target, load_drafter(args.assets).to(args.device), args, args.device)
        print(json.dumps({what: result, "took": round(time.time() - started, 1)}, indent=1), flush=True)


if __name__ == "__main__":
    main()
