"""Training steps that several reference loops share."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flower_ext.privacy.randomness import derived_seed
from tests.support.worlds import Net


def batch_order(seed, client, server_round, kind="train"):
    return torch.Generator().manual_seed(derived_seed(seed, "client", kind, client, server_round))


def descend(model, part, data, *, epochs, batch, rate, momentum, radius, generator):
    """Take steps of SGD with momentum, or of SAM if radius > 0, on the parameters of ``part``."""
    params = [p for n, p in model.named_parameters() if n.startswith(part)]
    velocity = [torch.zeros_like(p) for p in params]

    def gradient(x, y):
        return torch.autograd.grad(cross_entropy(model(x), y), params)

    for _ in range(epochs):
        order = torch.randperm(len(data), generator=generator)
        for start in range(0, len(data), batch):
            rows = order[start : start + batch]
            x, y = data.features[rows], data.targets[rows]
            g = gradient(x, y)
            if radius > 0:
                norm = math.sqrt(sum(float((a**2).sum()) for a in g))
                ascent = [radius * a / norm for a in g]
                with torch.no_grad():
                    for p, e in zip(params, ascent, strict=True):
                        p += e
                g = gradient(x, y)
                with torch.no_grad():
                    for p, e in zip(params, ascent, strict=True):
                        p -= e
            with torch.no_grad():
                for p, v, a in zip(params, velocity, g, strict=True):
                    v.mul_(momentum).add_(a)
                    p -= rate * v


def slope(w, x, y):
    """Return the gradient of the mean cross-entropy at ``w``."""
    model = Net()
    vector_to_parameters(w, model.parameters())
    loss = cross_entropy(model(x), y)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
