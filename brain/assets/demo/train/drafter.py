"""Trains the MTP drafter on the frozen target, unrolled as far as serving drafts.

For a position L whose token the model said, draft step k starts from the token at L + k and the hidden state of the step
before (the target's own at L - 1 for the first), sees the target's keys 0..L-1 and has to say the token at L + k + 1.
All positions of a packed row are trained at once.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import packing
from model import FULL, SLIDING, Config, Drafter, DrafterConfig, Target, count, rotations
from optim import Optimiser
from train import split_load, split_save

DEPTH = 8
FADE = 0.92


def balanced_clusters(table, clusters, rounds=25):
    """Token ids ordered so that each run of vocab / clusters ids lies close together in `table`."""
    x = F.normalize(table.float(), dim=-1)
    size = len(x) // clusters
    centres = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:clusters].to(x.device)]
    for _ in range(rounds):
        near = x @ centres.T
        order = near.max(-1).values.argsort(descending=True).tolist()
        choice, room, member = near.argsort(-1, descending=True).tolist(), [size] * clusters, [0] * len(x)
        for token in order:
            member[token] = next(c for c in choice[token] if room[c])
            room[member[token]] -= 1
        member = torch.tensor(member, device=x.device)
        centres = F.normalize(torch.stack([x[member == c].mean(0) for c in range(clusters)]), dim=-1)
    return member.argsort(stable=True)


def draft_row(drafter, embedded, hidden, position, kv):
    """One draft step for one row, over keys and values {kind: (k, v)} that are all visible: (logits, next hidden)."""
    turn = rotations(drafter.config, torch.tensor([position], device=embedded.device))

    def attend(kind, q):
        k, v = (t.transpose(0, 1)[None] for t in kv[kind])
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, scale=1.0, enable_gqa=True)[0].transpose(0, 1)

    x, following = drafter(embedded[None], hidden[None], turn, attend)
    return drafter.logits(x)[0], following[0]


def target_pass(target, stored, positions):
    """(hidden, {kind: (k, v)}) of the frozen target over a packed row."""
    ids, _, _ = packing.unpack(stored)
    attend = packing.Attend(positions, target.config.window)
    hidden = target(ids, positions, attend)
    return hidden, {kind: attend.kept[target.config.last_owner(kind)] for kind in (SLIDING, FULL)}


def draft_step(drafter, embedded, hidden, positions, kv):
    """One draft step for every position of a packed row: (normed hidden, the next step's hidden)."""
    masks = {SLIDING: packing.block_mask(positions, drafter.config.window, strict=True),
             FULL: packing.block_mask(positions, None, strict=True)}
    return drafter(embedded, hidden, rotations(drafter.config, positions), lambda kind, q: packing.flex(q, *kv[kind], masks[kind]))


def step_loss(drafter, embedded, hidden, positions, kv, answer, weight):
    """(loss sum, next hidden, right answers): dense loss plus the loss of choosing the answer's cluster."""
    x, following = draft_step(drafter, embedded, hidden, positions, kv)
    logits = drafter.dense_logits(x)
    loss = F.cross_entropy(logits, answer, reduction="none")
    loss = loss + F.cross_entropy(drafter.cluster_logits(x), drafter.clusters()[answer], reduction="none")
    return (loss * weight).sum(), following, ((logits.argmax(-1) == answer) & (weight > 0)).sum()


def chains(stored, depth):
    """For k = 0..depth-1: (token at L+k, token at L+k+1, whether L..L+k+1 are all the model's, in one step)."""
    ids, must, _ = packing.unpack(stored)
    out, valid = [], must
    for k in range(depth):
        valid = valid & torch.roll(must, -k - 1)
        out.append((torch.roll(ids, -k), torch.roll(ids, -k - 1).long(), valid))
    return out


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.rows = packing.Rows(77 + self.rank + 100 * int(time.time()), args.workers, args.tokens)
        self.rows.most.value, self.rows.brief.value = 48, 0.0
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if self.world > 1:
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        torch.manual_seed(2)
        torch.set_float32_matmul_precision("high")
        self.target = Target(Config()).to(args.device).requires_grad_(False)
        self.target.load_state_dict({k: v.float() for k, v in split_load(args.target, "target").items()})
        self.drafter = Drafter(DrafterConfig()).to(args.device)
        if args.warm and (weights := split_load(args.warm, "drafter")):
            self.drafter.load_state_dict({k: v if v.dtype == torch.int64 else v.float() for k, v in weights.items()})
        else:
            order = balanced_clusters(self.target.embed_tokens.weight, self.drafter.config.centroids)
            self.drafter.masked_embedding.token_ordering.copy_(order)
        compiled = args.device == "cuda"
        self.optimiser = Optimiser(self.drafter, args.matrix_lr, args.other_lr, compiled=compiled)
        self.pass_ = torch.compile(target_pass, dynamic=False) if compiled else target_pass
        self.loss = torch.compile(step_loss, dynamic=False) if compiled else step_loss

    def round(self):
        """One update over one packed row: (rows of each depth, right ones)."""
        stored, positions = self.rows.next(self.args.device)
        with torch.no_grad():
            hidden, kv = self.pass_(self.target, stored, positions)
            hidden = torch.roll(hidden, 1, 0)
        hidden.requires_grad_()
        total, seen, right = 0, [], []
        steps = chains(stored, DEPTH)
        scale = sum(FADE**k * float(s[2].sum()) for k, s in enumerate(steps))
        for k, (last, answer, valid) in enumerate(steps):
            embedded = self.target.embed(last, hidden.dtype)
            loss, hidden, ok = self.loss(self.drafter, embedded, hidden, positions, kv, answer, valid.float() * FADE**k)
            total = total + loss
            seen.append(valid.sum())
            right.append(ok)
        (total / max(scale, 1.0)).backward()
        return torch.stack(seen), torch.stack(right)

    def follow(self):
        """Takes over the target's final weights once they are there; tells whether they are in use."""
        if not self.args.follow:
            return True
        if not (self.args.follow / "done").exists():
            return False
        self.target.load_state_dict({k: v.float() for k, v in split_load(self.args.follow, "target").items()})
        return True

    def train(self):
        a, step, seen, right, final, progress, saved = self.args, 0, 0, 0, None, 0.0, time.time()
        if self.rank == 0:
            print(f"drafter {count(self.drafter) / 1e6:.3f} M parameters", flush=True)
        while True:
            s, r = self.round()
            now = time.time()
            if final is None and step % 10 == 0 and self.follow():
                final = now
                print(f"drafter step {step}: the target is final", flush=True)
            end = a.deadline or (final or now) + a.seconds
            spent = 0.0 if final is None else (now - final) / max(end - final, 1e-3)
            progress = min(1.0, float(self.optimiser.average(spent)))
            self.optimiser.step(min(1.0, (step + 1) / 100) * min(1.0, (1 - progress) / 0.85))
            self.optimiser.clear()
            seen, right, step = seen + s, right + r, step + 1
            done = progress >= 1 or step >= a.steps
            if step % a.every == 0 or done:
                if self.rank == 0:
                    print(f"drafter step {step} progress {progress:.3f} right by depth "
                          + " ".join(f"{x:.3f}" for x in (right / seen.clamp(min=1)).tolist()), flush=True)
                seen, right = 0, 0
            if now - saved > 25 or done:
                saved = now
                self.save()
            if done:
                break
        self.rows.close()
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def save(self):
        if self.rank == 0:
            state = self.drafter.state_dict()
            split_save({k: v if v.dtype == torch.int64 else v.bfloat16() for k, v in state.items()}, self.args.out, "drafter")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target", type=Path, required=True, help="folder of the target's weights")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--warm", type=Path, help="folder of drafter weights to go on from")
    p.add_argument("--seconds", type=float, default=60.0, help="training seconds from when the target is final")
    p.add_argument("--deadline", type=float, help="end at this time (seconds since 1970) instead")
    p.add_argument("--follow", type=Path, help="folder where the target is still being trained; final when it holds `done`")
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--every", type=int, default=50)
    p.add_argument("--matrix-lr", type=float, default=0.02)
    p.add_argument("--other-lr", type=float, default=3e-3)
    p.add_argument("--device", default="cuda")
    Run(p.parse_args()).train()


if __name__ == "__main__":
    main()
