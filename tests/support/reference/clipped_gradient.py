"""The sum of clipped gradients, by one backward pass for each record."""

import math

import torch

from flower_ext.data import trees


def by_loop(task, params, data, clipping_norm, names):
    """Run one backward pass for each record."""
    summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in names}
    for x, y in trees.each((data.features, data.targets)):
        leaves = {n: p.clone().requires_grad_(n in names) for n, p in params.items()}
        x = trees.mapped(lambda leaf: leaf.unsqueeze(0), x)
        given, named = ((), x) if isinstance(x, dict) else ((x,), {})
        out = torch.func.functional_call(task.model(), leaves, given, named)
        slopes = torch.autograd.grad(
            task.loss(out, y.unsqueeze(0)),
            [leaves[n] for n in names],
            allow_unused=True,
            materialize_grads=True,
        )
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in slopes))
        for name, slope in zip(names, slopes, strict=True):
            summed[name] += slope * min(1.0, clipping_norm / max(norm, 1e-30))
    return summed
