"""Random targets (ε, δ) of runs, with the sampling and the number of rounds."""

import numpy as np

from flower_ext.privacy import FixedSizeSampling, FullParticipation, PoissonSampling


def random_targets(number: int, seed: int):
    """Return settings of every sampling; slow pairs (PLD, or without replacement) are rarer."""
    rng = np.random.default_rng(seed)
    for index in range(number):
        population = int(rng.integers(20, 2000))
        rate = float(10 ** rng.uniform(-2, -0.3))
        sampling, accountant = PoissonSampling(population, rate), "rdp"
        if index % 3 == 1:
            sampling = FullParticipation(population)
            accountant = ["pld", "rdp"][index % 2]
        elif index % 48 == 2:
            sampling = FixedSizeSampling(population, max(1, round(population * rate)))
        elif index % 48 == 3:
            accountant = "pld"
        yield {
            "epsilon": float(10 ** rng.uniform(-0.5, 1.2)),
            "delta": float(10 ** rng.uniform(-5, -1)),
            "sampling": sampling,
            "rounds": int(10 ** rng.uniform(0, 2)),
            "accountant": accountant,
        }


def without_accountant(setting):
    return {name: value for name, value in setting.items() if name != "accountant"}
