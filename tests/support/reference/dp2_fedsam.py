"""DP-FedAvg and DP²-FedSAM as the plainest possible single loop, sharing no training code.

The loop takes from the package only what a comparison needs in common: cohorts, batch orders, the
initial model and seeded noise.
"""

from __future__ import annotations

import math

import torch

from flower_ext.privacy import SeededNoise, seeded_generator
from tests.support.reference.steps import batch_order, descend
from tests.support.worlds import Net, client_data, task


def federated(plan, *, seed, rounds, phases, shared, server_rate):
    """Return the global model after ``rounds``, and the clients' personal parts.

    ``phases`` is a list of (prefix of the trained part, LocalTraining); ``shared`` is a prefix.
    """
    start = task().initial_params(seed)
    world = {n: p.clone() for n, p in start.items() if n.startswith(shared)}
    heads = {}
    for t in range(1, rounds + 1):
        cohort = plan.sampling.draw(seeded_generator(seed, "cohort", t))
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in world.items()}
        for client in cohort:
            model = Net()
            kept = heads.get(client, {n: p for n, p in start.items() if n not in world})
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
            heads[client] = {n: p for n, p in after.items() if n not in world}
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
    return world, heads
