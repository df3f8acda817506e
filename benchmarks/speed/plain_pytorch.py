"""A plain PyTorch loop over clients, parameters in place; no framework at all."""

import random

import torch

from benchmarks.speed.workload import (
    CLIPPING_NORM,
    NOISE_MULTIPLIER,
    Clock,
    examples,
    parse,
    train_in_place,
)


def main() -> None:
    """Run FedAvg without any framework."""
    workload = parse()
    model = workload.build().to(workload.device)
    shared = [p.detach().clone() for p in model.parameters()]
    rng, clock = random.Random(0), Clock()
    for _ in range(workload.rounds):
        total = [torch.zeros_like(p) for p in shared]
        for client in rng.sample(range(workload.clients), workload.cohort):
            for parameter, start in zip(model.parameters(), shared, strict=True):
                parameter.data.copy_(start)
            train_in_place(model, *examples(workload, client))
            moves = [p.data - start for p, start in zip(model.parameters(), shared, strict=True)]
            scale = 1.0
            if workload.private:
                norm = float(torch.stack([m.square().sum() for m in moves]).sum().sqrt())
                scale = min(1.0, CLIPPING_NORM / norm)
            for part, move in zip(total, moves, strict=True):
                part.add_(move, alpha=scale)
        for start, part in zip(shared, total, strict=True):
            if workload.private:
                part.add_(torch.randn_like(part), alpha=NOISE_MULTIPLIER * CLIPPING_NORM)
            start.add_(part, alpha=1 / workload.cohort)
        clock.tick()
    clock.report()


if __name__ == "__main__":
    main()
