"""DP-FedAvg and DP²-FedSAM as the plainest possible single loop, sharing no training code.

Only what must be common to compare at all is taken from the package: cohorts, batch orders, the
initial model and seeded noise.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy

from flower_ext.privacy import SeededNoise, seeded_generator
from flower_ext.privacy.randomness import derived_seed
from tests.worlds import Net, client_data, task


def batch_order(seed, client, server_round, kind="train"):
    return torch.Generator().manual_seed(derived_seed(seed, "client", kind, client, server_round))


def descend(model, part, data, *, epochs, batch, rate, momentum, radius, generator):
    """SGD with momentum, or SAM when radius > 0, on the parameters of ``part``."""
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


def federated(plan, *, seed, rounds, phases, shared, server_rate):
    """Global model after ``rounds``, and the clients' personal parts.

    ``phases`` is a list of (prefix of the trained part, LocalTraining); ``shared`` a prefix.
    """
    start = task().initial_params(seed)
    world = {n: p.clone() for n, p in start.items() if n.startswith(shared)}
    own = {}
    for t in range(1, rounds + 1):
        cohort = plan.sampling.draw(seeded_generator(seed, "cohort", t))
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
        for client in cohort:
            model = Net()
            kept = own.get(client, {n: p for n, p in start.items() if n not in world})
            model.load_state_dict({**world, **kept})
            generator = batch_order(seed, client, t)
            for part, training in phases:
                descend(
                    model,
                    part,
                    client_data(client).train,
                    epochs=training.epochs,
                    batch=training.batch_size,
                    rate=training.learning_rate * training.learning_rate_decay ** (t - 1),
                    momentum=training.momentum,
                    radius=training.sam_radius,
                    generator=generator,
                )
            after = {n: p.detach().clone() for n, p in model.named_parameters()}
            own[client] = {n: p for n, p in after.items() if n not in world}
            delta = {n: after[n] - world[n] for n in world}
            norm = math.sqrt(sum(float((d.double() ** 2).sum()) for d in delta.values()))
            factor = min(1.0, plan.clipping_norm / norm)
            clipped = {n: factor * d for n, d in delta.items()}
            stddev = plan.noise_multiplier * plan.clipping_norm / math.sqrt(len(cohort))
            noised = SeededNoise(seed, "client-noise", client, t).add_gaussian(clipped, stddev)
            for n in total:
                total[n] += noised[n].double()
        for n in world:
            step = total[n] / plan.sampling.expected_cohort_size
            world[n] = (world[n].double() + server_rate * step).float()
    return world, own
