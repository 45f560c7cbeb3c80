"""Trains the target. One process per GPU (torchrun), any number of calls: each goes on where the last one stopped.

Progress is counted in seconds of training, because the machine is lent by the second: the learning rate and the
curriculum follow elapsed / total.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import packing
from model import Config, Target, count
from optim import Optimiser

CURRICULUM = [(0.0, 3, 1.0), (0.06, 6, 1.0), (0.12, 12, 0.8), (0.25, 24, 0.5), (0.4, 48, 0.3), (0.6, 48, 0.1), (0.8, 48, 0.0)]
DECAY_FROM = 0.55
WARM_UP_STEPS = 150


def stage(progress):
    """(most records, share of short heads) at this progress."""
    return [s for s in CURRICULUM if s[0] <= progress][-1][1:]


def rate(progress, step):
    """Learning-rate factor: warm-up by steps, flat, then linear to zero."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, max(0.0, 1.0 - progress) / (1.0 - DECAY_FROM))


def measure(model, stored, positions, read_weight, free_weight):
    """(loss, statistics): loss over the model's forced tokens, less over free ones, a little over what it only reads.

    Statistics: forced tokens, wrong ones, those with less than 0.95 probability, sums of forced and free loss.
    """
    ids, _, _ = packing.unpack(stored)
    nxt, must, free, follows = packing.targets(stored, positions)
    hidden = model(ids, positions, packing.Attend(positions, model.config.window))
    logits = model.logits(hidden)
    each = F.cross_entropy(logits, nxt.long(), reduction="none")
    forced, choice = must & ~free, must & free
    weight = forced.float() + free_weight * choice.float() + read_weight * (follows & ~must).float()
    loss = (each * weight).sum() / weight.sum()
    with torch.no_grad():
        wrong = forced & (logits.argmax(-1) != nxt)
        unsure = forced & (each > 0.05129)
        zero = torch.zeros_like(each)
        stats = torch.stack([forced.sum(), wrong.sum(), unsure.sum(), torch.where(forced, each, zero).sum(), choice.sum(),
                             torch.where(choice, each, zero).sum()])
    return loss, stats


def split_save(state, folder, name, part=14 << 20):
    """Saves tensors in files of at most `part` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, size = [{}], 0
    for key, tensor in state.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > part and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][key] = tensor.contiguous()
        size += bytes_
    for number, tensors in enumerate(parts):
        save_file(tensors, folder / f"{name}-{number}.safetensors")


def split_load(folder, name):
    out = {}
    for path in sorted(Path(folder).glob(f"{name}-*.safetensors")):
        out.update(load_file(path))
    return out


class Run:
    def __init__(self, args):
        self.args, self.device = args, args.device
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.rows = packing.Rows(args.seed + self.rank + 100 * int(time.time()), args.workers, args.tokens)
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if self.world > 1:
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.model = Target(Config()).to(self.device)
        self.step, self.before = 0, 0.0
        compiled = self.device == "cuda"
        self.optimiser = Optimiser(self.model, args.matrix_lr, args.other_lr, args.adam_only, compiled)
        self.measure = torch.compile(measure, dynamic=False) if compiled else measure
        self.resume()

    def resume(self):
        whole = self.args.state / "state.pt"
        if whole.exists():
            saved = torch.load(whole, map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load(saved["optimiser"])
            self.step, self.before = saved["step"], saved["elapsed"]
        elif weights := split_load(self.args.warm, "target") if self.args.warm else {}:
            self.model.load_state_dict({k: v.float() for k, v in weights.items()})
            self.before = self.args.warm_elapsed

    def save(self, elapsed):
        if self.rank:
            return
        self.args.state.mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "optimiser": self.optimiser.state(), "step": self.step, "elapsed": elapsed},
                   self.args.state / "state.pt.new")
        (self.args.state / "state.pt.new").rename(self.args.state / "state.pt")
        if self.args.out:
            split_save({k: v.bfloat16() for k, v in self.model.state_dict().items()}, self.args.out, "target")

    def train(self):
        a = self.args
        if self.rank == 0:
            print(f"{count(self.model) / 1e6:.2f} M parameters, step {self.step}, {self.before:.0f} s before", flush=True)
        progress, started, stats, shown, saved = self.before / a.total, None, 0, time.time(), time.time()
        if a.deadline:
            progress = a.from_progress
        first = self.step
        while True:
            self.rows.most.value, self.rows.brief.value = stage(progress)
            stored, positions = self.rows.next(self.device)
            loss, part = self.measure(self.model, stored, positions, *self.weights(progress))
            loss.backward()
            now = time.time()
            if started is None:
                started = now
                print(f"rank {self.rank}: first step ready", flush=True)
                if a.deadline:
                    a.total = (a.deadline - now) / (1 - a.from_progress)
                    self.before = a.total * a.from_progress
            spent = min(self.before + now - started, a.total) / a.total
            progress = float(self.optimiser.average(spent))
            self.optimiser.step(rate(progress, self.step))
            self.optimiser.clear()
            stats = stats + part
            self.step += 1
            done = progress >= 1 or progress * a.total - self.before >= a.seconds or self.step - first >= a.steps
            if self.step % a.every == 0 or done:
                self.show(stats, progress, now - shown, loss)
                stats, shown = 0, now
            if now - saved > a.save_every:
                saved = now
                self.save(progress * a.total)
            if done:
                self.save(progress * a.total)
                break
        self.rows.close()
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def weights(self, progress):
        """Loss weights of read and of free tokens. Reading helps copying to form; both are only noise at the end."""
        pair = (0.05, 0.3) if progress < DECAY_FROM else (0.01, 0.1)
        return [torch.tensor(w, device=self.device) for w in pair]

    def show(self, stats, progress, seconds, loss):
        forced, wrong, unsure, forced_loss, free, free_loss = stats.tolist()
        if self.rank == 0 and seconds > 0:
            speed = self.args.every * self.args.tokens * self.world / seconds
            print(f"step {self.step} progress {progress:.3f} wrong {wrong / forced:.2e} unsure {unsure / forced:.2e} "
                  f"forced {forced_loss / forced:.5f} free {free_loss / max(free, 1):.3f} loss {float(loss.detach()):.4f} "
                  f"{speed / 1e6:.2f} Mtok/s rows waiting {self.rows.queue.qsize()}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--seconds", type=float, default=1e9, help="training seconds of this call")
    p.add_argument("--total", type=float, default=1000.0, help="training seconds of the whole schedule")
    p.add_argument("--deadline", type=float, help="end the schedule at this time (seconds since 1970), whenever the first step comes")
    p.add_argument("--from-progress", type=float, default=0.0, help="where in the schedule a run with a deadline starts")
    p.add_argument("--steps", type=int, default=10**9, help="stop after this many steps")
    p.add_argument("--tokens", type=int, default=49152, help="tokens per step and process, a multiple of 128")
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--every", type=int, default=100)
    p.add_argument("--save-every", type=float, default=120)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--matrix-lr", type=float, default=0.02)
    p.add_argument("--other-lr", type=float, default=3e-3)
    p.add_argument("--adam-only", action="store_true")
    p.add_argument("--device", default="cuda")
    p.add_argument("--state", type=Path, required=True, help="folder of the full state, for the next call on this machine")
    p.add_argument("--out", type=Path, help="folder for the weights alone")
    p.add_argument("--warm", type=Path, help="folder of weights to start from if there is no state")
    p.add_argument("--warm-elapsed", type=float, default=0.0)
    Run(p.parse_args()).train()


if __name__ == "__main__":
    main()
