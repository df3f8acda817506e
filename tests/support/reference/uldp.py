"""The methods of Uldp-FL as the plainest possible loops over silos, users and mini-batches.

The loops take from the package only what a comparison needs in common: the sampled users, batch
orders, the initial model, seeded noise, and the records that ULDP-GROUP keeps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.privacy import SeededNoise, seeded_generator
from tests.support.reference.steps import batch_order, descend
from tests.support.worlds import Net


def of_user(silo, user):
    rows = np.flatnonzero(silo.owners.numpy() == user)
    return Examples(silo.train.features[rows], silo.train.targets[rows])


def clipped(delta, bound):
    norm = math.sqrt(sum(float((d.double() ** 2).sum()) for d in delta.values()))
    return {
        n: d.double() * min(1.0, bound / norm) if norm else d.double() for n, d in delta.items()
    }


def trained(world, data, local, generator):
    """Return x_s,u − x after Q epochs on ``data``."""
    model = Net()
    model.load_state_dict(world)
    descend(
        model,
        "",
        data,
        epochs=local.epochs,
        batch=local.batch_size,
        rate=local.learning_rate,
        momentum=local.momentum,
        radius=0.0,
        generator=generator,
    )
    return {n: p.detach() - world[n] for n, p in model.named_parameters()}


def against_gradient(world, data):
    """Return the negative gradient of the loss over all records."""
    model = Net()
    model.load_state_dict(world)
    params = dict(model.named_parameters())
    loss = cross_entropy(model(data.features), data.targets)
    return {n: -g for n, g in zip(params, torch.autograd.grad(loss, params.values()), strict=True)}


def weights_of(silos, num_users, weighting):
    counts = np.stack([np.bincount(s.owners, minlength=num_users) for s in silos])
    if weighting == "equal":
        return np.full(counts.shape, 1 / len(silos))
    return np.array(
        [[n / counts[:, u].sum() if n else 0.0 for u, n in enumerate(row)] for row in counts]
    )


def averaging(silos, start, plan, *, seed, rounds, weighting, local, server_rate):
    """Run Algorithms 3 and 4, or ULDP-SGD if ``local`` is None."""
    num_users = plan.sampling.population
    weights = weights_of(silos, num_users, weighting)
    world = {n: p.clone() for n, p in start.items()}
    for t in range(1, rounds + 1):
        sampled = plan.sampling.draw(seeded_generator(seed, "cohort", t))
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
        for s, silo in enumerate(silos):
            orders = torch.randint(2**63 - 1, (num_users,), generator=batch_order(seed, s, t))
            upload = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
            for u in sampled:
                data = of_user(silo, u)
                if len(data) == 0:
                    continue
                if local is None:
                    delta = against_gradient(world, data)
                else:
                    generator = torch.Generator().manual_seed(int(orders[u]))
                    delta = trained(world, data, local.in_round(t), generator)
                for n, d in clipped(delta, plan.clipping_norm).items():
                    upload[n] += weights[s, u] * d
            stddev = plan.noise_multiplier * plan.clipping_norm / math.sqrt(len(silos))
            noised = SeededNoise(seed, "client-noise", s, t).add_gaussian(upload, stddev)
            for n in total:
                total[n] += noised[n]
        divisor = plan.sampling.sampling_rate * num_users * len(silos)
        for n in world:
            world[n] = (world[n].double() + server_rate * total[n] / divisor).float()
    return world


def naive(silos, start, plan, *, seed, rounds, local, server_rate):
    """Run Algorithm 1, with Δ = x_s − x."""
    world = {n: p.clone() for n, p in start.items()}
    for t in range(1, rounds + 1):
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
        for s, silo in enumerate(silos):
            delta = {n: torch.zeros_like(p) for n, p in world.items()}
            if len(silo.train):
                delta = trained(world, silo.train, local.in_round(t), batch_order(seed, s, t))
            stddev = plan.noise_multiplier * plan.clipping_norm * math.sqrt(len(silos))
            noised = SeededNoise(seed, "client-noise", s, t).add_gaussian(
                clipped(delta, plan.clipping_norm), stddev
            )
            for n in total:
                total[n] += noised[n]
        for n in world:
            world[n] = (world[n].double() + server_rate * total[n] / len(silos)).float()
    return world


def group(silos, start, limits, training, *, seed, rounds, server_rate):
    """Run Algorithm 2, with DP-SGD as a loop over single records."""
    kept = [
        silo.limited(limit, seeded_generator(seed, "kept records")).train
        for silo, limit in zip(silos, limits, strict=True)
    ]
    world = {n: p.clone() for n, p in start.items()}
    for t in range(1, rounds + 1):
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
        for s, data in enumerate(kept):
            numbers = torch.randint(2**63 - 1, (1,), generator=batch_order(seed, s, t))
            drawn = seeded_generator(int(numbers), "records")
            noise = SeededNoise(seed, "training-noise", s, t)
            model = {n: p.clone() for n, p in world.items()}
            drawn.integers(2**62)  # the seed of the model's own draws, which it has none of
            for _ in range(training.steps):
                taken = np.flatnonzero(drawn.random(len(data)) < training.sampling_rate)
                step = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.items()}
                for row in taken:
                    descent = against_gradient(model, data.subset([row]))
                    for n, g in clipped(descent, training.clipping_norm).items():
                        step[n] -= g
                stddev = training.noise_multiplier * training.clipping_norm
                step = noise.add_gaussian(step, stddev)
                rate = training.learning_rate / training.batch_size
                model = {n: p - (rate * step[n]).float() for n, p in model.items()}
            for n in total:
                total[n] += (model[n] - world[n]).double()
        for n in world:
            world[n] = (world[n].double() + server_rate * total[n] / len(silos)).float()
    return world


def records_of(owners, users):
    """Return n_{s,u} (silos, users), counted one by one."""
    counts = np.zeros((len(owners), users), dtype=int)
    for silo, of_records in enumerate(owners):
        for owner in of_records:
            counts[silo, owner] += 1
    return counts
