"""The check changes functions that runs call, in apps of this package and of Flower."""

from collections import Counter
from functools import partial

import pytest
from flwr.clientapp import ClientApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.privacy import (
    CorrelatedNoise,
    FullParticipation,
    ReleasePlan,
    SecureSum,
    SpacedSampling,
)
from flower_ext.training import LocalTraining
from flower_ext_check.held_run import HeldRun
from flower_ext_check.instruments import Instruments
from flower_ext_check.observe import Watch
from flower_ext_check.wrapping import wrap
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import initial, task

CLIENTS = 8
NOISES = [
    {"sampling": FullParticipation(CLIENTS)},
    {
        "sampling": FullParticipation(CLIENTS),
        "noise_placement": SecureSum(colluding=0.0, dropouts=0.3),
    },
    {
        "sampling": SpacedSampling(CLIENTS, 1, CLIENTS, 1),
        "noise_placement": "server",
        "correlation": CorrelatedNoise(),
    },
]


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each function that the check changes; the test's end restores them."""
    counts = Counter()

    def counted(key, original, *arguments, **options):
        counts[key] += 1
        return original(*arguments, **options)

    watch = Watch(app=None, seed=0, rounds=1, held=HeldRun(template={}, quiet=True))
    for owner, name, _ in [*Instruments().patches(), *watch.patches()]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
        key = f"{owner.__name__}.{name}"
        counts[key] = 0
        wrap(owner, name, partial(counted, key))
    return counts


def test_runs_call_every_function_that_the_check_changes(calls):
    app = ClientApp()
    for category in ("train", "evaluate", "query"):
        getattr(app, category)()(lambda message, context: message)
    for noise in NOISES:
        plan = ReleasePlan(
            clipping_norm=0.5,
            noise_multiplier=1.0,
            rounds=1,
            delta=1e-5,
            **noise,
        )
        local = LocalTraining(epochs=1, batch_size=10, learning_rate=0.1)
        strategy = strategy_of(DPFedAvg, plan=plan, local=local, evaluate_every=0, seed=1)
        grid = Recorder(strategy.method.client_app(task()), num_clients=CLIENTS)
        strategy.start(grid, initial(), num_rounds=1)
    assert [name for name, count in calls.items() if count == 0] == []
    assert len(calls) == 11
