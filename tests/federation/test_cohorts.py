"""The law of cohorts over a run's rounds, as the messages on the grid show it.

A Poisson cohort is drawn anew in every round, each unit by itself; an empty cohort is a release
like any other. Each test of a law refuses right draws with a probability of `LUCK`.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from scipy import stats
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.algorithms.uldp.weights import SAMPLED, USER_WEIGHTS
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FixedSizeSampling,
    Ledger,
    PoissonSampling,
    SecureSum,
)
from flower_ext.training import LocalTraining, Task
from tests.support import planted_faults as faults
from tests.support.grids import grid as grid_of
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder

UNITS, RATE, ROUNDS, SILOS = 12, 0.3, 120, 3
LUCK = 1e-9
SIZE = 500
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


def still(size=1, silos=False, trains=True):
    """Return a task of ``size`` parameters that moves none of them.

    Without ``trains``, nobody has a record to train on.
    """
    units = UNITS if trains else 0
    examples = Examples(torch.zeros(units, size), torch.zeros(units))
    silo = SiloData(train=examples, test=examples, owners=torch.arange(units))
    return Task(
        model=lambda: nn.Linear(size, 1, bias=False),
        data=lambda _: silo if silos else ClientData(train=examples, test=examples),
        loss=lambda outputs, targets: 0.0 * outputs.sum(),
        metrics={},
        device="cpu",
    )


plan = partial(release_plan, UNITS, noise_multiplier=4.0, rounds=ROUNDS, delta=1e-3)


def run(strategy, rounds, *, size=1, silos=0, trains=True):
    """Return the grid and the model before the first round and after each."""
    task = still(size, bool(silos), trains)
    app = strategy.method.client_app(task, allow_seeded_noise=True)
    grid = Recorder(app, num_clients=silos or strategy.run.plan.sampling.population)
    models = {}

    def note(number, arrays):
        models[number] = records.to_arrays(arrays)["weight"].astype(np.float64).ravel()

    initial = ArrayRecord({"weight": torch.zeros(1, size)})
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=note)
    return grid, [models[number] for number in range(rounds + 1)]


def trainings(grid):
    return [m for m in grid.sent if m.metadata.message_type.startswith("train")]


def clients_by_round(sampling, rounds=ROUNDS, **options):
    """Return which clients each round asks, as an array of shape (rounds, units)."""
    strategy = strategy_of(
        DPFedAvg, plan=plan(sampling), local=ONE_STEP, evaluate_every=0, **options
    )
    grid, _ = run(strategy, rounds, trains=False)  # which no draw depends on
    cohorts = np.zeros((rounds, UNITS))
    for message in trainings(grid):
        cohorts[int(message.metadata.group_id) - 1, message.metadata.dst_node_id - 1_000] += 1
    assert cohorts.sum() == sum(strategy.participations.uploads.values())
    return cohorts


def users_by_round(sampling, rounds=ROUNDS):
    """Return which users each round draws, by the messages to every silo."""
    of_users = plan(sampling)
    strategy = FederatedStrategy(
        UldpAvg(num_silos=SILOS, local=ONE_STEP), of_users, evaluate_every=0
    )
    grid, _ = run(strategy, rounds, silos=SILOS, trains=False)
    cohorts = np.zeros((SILOS, rounds, UNITS))
    for message in trainings(grid):
        bits = records.to_arrays(message.content[USER_WEIGHTS])[SAMPLED]
        silo, number = message.metadata.dst_node_id - 1_000, int(message.metadata.group_id) - 1
        cohorts[silo, number] = np.unpackbits(bits, count=UNITS)
    assert (cohorts == cohorts[0]).all()  # the same users in every silo
    return cohorts[0]


def check_law(cohorts, rate):
    """Refuse cohorts that are no independent draws of each unit in each round.

    Raises
    ------
    AssertionError
        Counts, or repetitions from round to round, are too many or too few.
    """
    rounds, units = cohorts.shape
    assert set(np.unique(cohorts)) <= {0, 1}
    counts = {
        "units in all rounds": (int(cohorts.sum()), rounds * units),
        **{f"rounds of unit {u}": (int(n), rounds) for u, n in enumerate(cohorts.sum(axis=0))},
    }
    for what, (count, number) in counts.items():
        low, high = stats.binom.ppf([LUCK / 2, 1 - LUCK / 2], number, rate)
        assert low <= count <= high, f"{what}: {count} of {number}"
    repeated = sum(int(one @ other) for one, other in pairwise(cohorts))
    number = (rounds - 1) * units
    # Two repetitions are dependent where they share a round.
    variance = rate**2 * (1 - rate**2) + 2 * rate**3 * (1 - rate)
    deviation = abs(repeated - rate**2 * number) / np.sqrt(variance * number)
    assert deviation < 7, f"units in two rounds in a row: {repeated} of {number}"
    spread = cohorts.sum(axis=1).var() / (units * rate * (1 - rate))
    assert 0.4 < spread < 2.2, "cohort sizes vary unlike those of independent units"


POISSON = PoissonSampling(UNITS, RATE)
DRAWN = {
    "clients": clients_by_round,
    "clients of a seeded run": lambda s: clients_by_round(s, seed=1, seeded_noise=True),
    "users": users_by_round,
}


@pytest.mark.parametrize("drawn", grid_of(DRAWN, {"clients", "users"}.__contains__))
def test_each_round_draws_each_unit_by_itself(drawn):
    check_law(DRAWN[drawn](POISSON), RATE)


def test_a_cohort_of_a_fixed_size_is_drawn_anew_in_every_round():
    cohorts = clients_by_round(FixedSizeSampling(UNITS, 4))
    assert set(cohorts.sum(axis=1)) == {4.0}
    for count in cohorts.sum(axis=0):
        low, high = stats.binom.ppf([LUCK / 2, 1 - LUCK / 2], ROUNDS, 4 / UNITS)
        assert low <= count <= high
    repeated = sum(int(one @ other) for one, other in pairwise(cohorts))
    assert repeated / (4 * (ROUNDS - 1)) == pytest.approx(4 / UNITS, abs=0.25)  # 11 σ


EMPTY = PoissonSampling(UNITS, 1e-9)
NOBODY = {
    "clients noise": ({}, 0),
    "the server noises": ({"noise_placement": "server"}, 0),
    "silos noise": ({}, SILOS),
    "silos noise a masked sum": (
        {
            "noise_placement": SecureSum(colluding=0.0, dropouts=0.0),
        },
        SILOS,
    ),
}
"""Plans, and the number of silos, for rounds that draw nobody."""


def check_nobody(changes, silos, path, rounds=4):
    """Refuse a run in which a round that draws nobody is not a release like any other.

    Raises
    ------
    AssertionError
        The model does not move by the noise of the plan, or the release is not on the ledger.
    """
    # The mean divides by the expected size, which a rate this small would make tiny.
    ledger = Ledger(path)
    the_plan = plan(EMPTY, clipping_norm=EMPTY.expected_cohort_size, **changes)
    options = {"plan": the_plan, "local": ONE_STEP, "evaluate_every": 0, "ledger": ledger}
    strategy = (
        strategy_of(UldpAvg, num_silos=silos, **options)
        if silos
        else strategy_of(DPFedAvg, **options)
    )
    _, models = run(strategy, rounds, size=SIZE, silos=silos)
    steps = [after - before for before, after in pairwise(models)]
    stddev = the_plan.noise_multiplier / (silos or 1)
    for step in steps:
        low, high = stats.chi2.ppf([LUCK / 2, 1 - LUCK / 2], SIZE)
        assert low < float(step @ step) / stddev**2 < high, step
    kinds = [entry["kind"] for entry in Ledger.read(path)]
    assert kinds == ["reserve", "commit"] * rounds
    assert strategy.participations.rounds == rounds
    assert not any(strategy.participations.uploads.values())


@pytest.mark.parametrize(("changes", "silos"), NOBODY.values(), ids=NOBODY)
def test_a_round_that_draws_nobody_releases_noise(changes, silos, tmp_path):
    check_nobody(changes, silos, tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(("changes", "silos"), [*NOBODY.values()][:2], ids=[*NOBODY][:2])
def test_a_round_that_draws_nobody_and_is_discarded_is_found(changes, silos, tmp_path, monkeypatch):
    faults.empty_round_discarded(monkeypatch, None)
    with pytest.raises(AssertionError):
        check_nobody(changes, silos, tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    ("plant", "rate", "message"),
    [
        pytest.param(faults.cohort_kept, 0.3, "in a row|rounds of unit", id="kept"),
        pytest.param(faults.empty_cohort_redrawn, 0.03, "in all rounds", id="redrawn"),
    ],
)
def test_cohorts_of_another_law_are_found(plant, rate, message, monkeypatch):
    plant(monkeypatch, None)
    with pytest.raises(AssertionError, match=message):
        check_law(clients_by_round(PoissonSampling(UNITS, rate)), rate)
