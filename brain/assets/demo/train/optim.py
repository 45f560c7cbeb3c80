"""Muon for the matrices, Adam for the tables, norms and scalars, over one averaged gradient.

Muon steps along the orthogonalised momentum (Newton-Schulz iteration in bf16), matrices of one shape at a time.
"""

import torch
import torch.distributed as dist

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(g):
    """Nearly orthogonal matrices with the singular directions of g [n, rows, cols], rows <= cols."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def _muon_direction(g, momentum, beta, scale):
    momentum.lerp_(g, 1 - beta)
    return orthogonalise(g.lerp(momentum, beta)).float() * scale


class Optimiser:
    """`step(rate)` applies one update; `rate` in 0..1 scales both learning rates."""

    def __init__(self, model, matrix_lr=0.02, other_lr=3e-3, adam_only=False, compiled=True):
        tables = ("embed_tokens", "embed_tokens_per_layer", "centroids")
        named = list(model.named_parameters())
        matrix = [] if adam_only else [p for n, p in named if p.ndim == 2 and not any(t in n for t in tables)]
        rest = [p for _, p in named if not any(p is m for m in matrix)]
        self.parameters = [p for _, p in named]
        self.matrix_lr, self.other_lr, self.beta = matrix_lr, other_lr, 0.95
        self.adam = torch.optim.Adam(rest, lr=other_lr, betas=(0.9, 0.97), eps=1e-10, fused=rest[0].is_cuda)
        self.groups = []
        shapes = sorted({tuple(sorted(p.shape)) for p in matrix})
        for shape in shapes:
            members = [p for p in matrix if tuple(sorted(p.shape)) == shape]
            scale = torch.tensor([max(1.0, p.shape[0] / p.shape[1]) ** 0.5 for p in members], device=members[0].device)
            momentum = torch.zeros(len(members), *shape, device=members[0].device)
            self.groups.append((members, scale[:, None, None], momentum))
        self.direction = torch.compile(_muon_direction, dynamic=False) if compiled else _muon_direction

    @torch.no_grad()
    def average(self, extra):
        """Averages the gradients over all processes, and with them the scalar `extra`, which is returned."""
        if not dist.is_initialized():
            return extra
        grads = [p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in grads] + [torch.tensor([extra], device=grads[0].device)])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        torch._foreach_copy_(grads, [f.view_as(g) for f, g in zip(flat.split([g.numel() for g in grads] + [1]), grads)])
        return flat[-1]

    @torch.no_grad()
    def step(self, rate):
        for group in self.adam.param_groups:
            group["lr"] = self.other_lr * rate
        self.adam.step()
        for members, scale, momentum in self.groups:
            grads = torch.stack([p.grad if p.shape[0] <= p.shape[1] else p.grad.T for p in members])
            move = self.direction(grads, momentum, self.beta, scale)
            moves = [m if p.shape[0] <= p.shape[1] else m.T for m, p in zip(move.unbind(), members)]
            torch._foreach_add_(members, moves, alpha=-self.matrix_lr * rate)

    def clear(self):
        for p in self.parameters:
            p.grad = None

    def state(self):
        return {"adam": self.adam.state_dict(), "momentum": [m for _, _, m in self.groups]}

    def load(self, state):
        self.adam.load_state_dict(state["adam"])
        for (_, _, momentum), saved in zip(self.groups, state["momentum"]):
            momentum.copy_(saved)
