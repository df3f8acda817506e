"""A method's optimizer and average in whole runs: under each sum, resumed, and upcycled."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms import DPFedAvg, FedAMP, FedDyn, Upcycled
from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Adam,
    ExponentialAverage,
    FederatedStrategy,
    InProcessGrid,
    Sgd,
    State,
    TailAverage,
    Yogi,
)
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining
from tests.support import secure_runs, silos, worlds
from tests.support.plans import release_plan
from tests.support.private_silos import SMALL
from tests.support.strategies import private_strategy_of, strategy_of

CLIENTS = 4
FAST = LocalTraining(steps=1, batch_size=10)
OPTIONS = {"local": FAST, "seed": 1, "seeded_noise": True, "evaluate_every": 0, "timeout": 5.0}
ADAM = Adam(learning_rate=0.05, tau=0.1)


class _Recorded:
    """A method whose steps keep the model and the mean that they received."""

    steps: ClassVar[list] = []

    def step(self, model, released, state):
        self.steps.append((model, released.mean))
        return super().step(model, released, state)


@dataclass(frozen=True, kw_only=True)
class RecordedAvg(_Recorded, DPFedAvg):
    """Federated averaging whose steps are kept."""


@dataclass(frozen=True, kw_only=True)
class RecordedUldp(_Recorded, UldpAvg):
    """ULDP-AVG whose steps are kept."""


released_plan = partial(release_plan, CLIENTS, rounds=5, delta=1e-5)
PLAIN = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
STRATEGIES = {
    "no privacy": (lambda: strategy_of(RecordedAvg, plan=PLAIN, server=ADAM, **OPTIONS), 1),
    "clients noise": (
        lambda: strategy_of(RecordedAvg, plan=released_plan(), server=ADAM, **OPTIONS),
        1,
    ),
    "server noises": (
        lambda: strategy_of(
            RecordedAvg, plan=released_plan(noise_placement="server"), server=ADAM, **OPTIONS
        ),
        1,
    ),
    "secure sums": (lambda: secure_runs.strategy_of(RecordedAvg, server=ADAM), 1),
    "users in silos": (
        lambda: strategy_of(
            RecordedUldp, plan=silos.plan(), **{**silos.COMMON, "server": ADAM, "local": FAST}
        ),
        silos.SILOS,
    ),
    "encrypted weights": (
        lambda: private_strategy_of(
            RecordedUldp,
            protocol=SMALL,
            plan=silos.plan(),
            **{**silos.COMMON, "server": ADAM, "local": FAST},
        ),
        silos.SILOS,
    ),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_optimizer_moves_along_the_released_mean_under_every_sum(kind, monkeypatch):
    build, divisor = STRATEGIES[kind]
    steps = []
    monkeypatch.setattr(_Recorded, "steps", steps)
    strategy = build()
    is_silos = divisor > 1
    task = silos.task() if is_silos else worlds.task()
    nodes = strategy.run.population.num_nodes
    grid = InProcessGrid(strategy.method.client_app(task, allow_seeded_noise=True), nodes)
    result = strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=3)
    models = [*[model for model, _ in steps][1:], records.to_arrays(result.arrays)]
    model, moments = steps[0][0], ADAM.init(steps[0][0])
    for (_, mean), after in zip(steps, models, strict=True):
        moved = {name: array / divisor for name, array in mean.items()}
        model, moments = ADAM.step(model, moved, moments)
        for name in model:
            np.testing.assert_allclose(model[name], after[name], atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class FreshState(DPFedAvg):
    """Federated averaging whose step returns a new state, not one made from the previous state."""

    def step(self, model, released, state):
        return {name: model[name] + released.mean[name] for name in model}, State()


def models_of(rounds, method=DPFedAvg, **options):
    """Return the models that ``evaluate_fn`` saw after each round, and the one that came back."""
    strategy = strategy_of(method, plan=PLAIN, **{**OPTIONS, **options})
    grid = InProcessGrid(DPFedAvg.client_app(worlds.task()), CLIENTS)
    seen = {}

    def keep(number, arrays):
        seen[number] = records.to_arrays(arrays)

    result = strategy.start(grid, worlds.initial(), num_rounds=rounds, evaluate_fn=keep)
    return [seen[number] for number in range(rounds + 1)], records.to_arrays(result.arrays)


@pytest.mark.parametrize(
    ("average", "weights"),
    [
        (TailAverage(last=2), [0, 0, 0.5, 0.5]),
        (ExponentialAverage(decay=0.5), [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
    ],
)
@pytest.mark.parametrize("method", [DPFedAvg, FreshState])
def test_the_average_is_evaluated_and_returned_but_not_trained(method, average, weights):
    newest, _ = models_of(4, method)
    averaged, returned = models_of(4, method, average=average)
    for name in returned:
        expected = sum(w * model[name] for w, model in zip(weights, newest[1:], strict=True))
        np.testing.assert_allclose(returned[name], expected, atol=1e-6)
        np.testing.assert_array_equal(averaged[-1][name], returned[name])
        np.testing.assert_array_equal(averaged[0][name], newest[0][name])  # nothing to average yet


def test_clients_evaluate_the_average():
    def score(**options):
        strategy = strategy_of(DPFedAvg, plan=PLAIN, **{**OPTIONS, "evaluate_every": 3}, **options)
        grid = InProcessGrid(DPFedAvg.client_app(worlds.task()), CLIENTS)
        result = strategy.start(grid, worlds.initial(), num_rounds=3)
        return result.evaluate_metrics_clientapp[3]["loss_mean"], result.arrays

    averaged, arrays = score(average=TailAverage(last=3))
    newest, _ = score()
    assert averaged != newest
    task = worlds.task()
    model = task.model()
    model.load_state_dict(arrays.to_torch_state_dict())
    losses = []
    for client in range(CLIENTS):
        test = task.data(client).test
        losses.append(float(task.loss(model(test.features), test.targets)))
    assert averaged == pytest.approx(np.mean(losses), rel=1e-5)


def test_even_rounds_of_upcycled_leave_the_moments_as_they_are():
    base = strategy_of(DPFedAvg, plan=PLAIN, server=Yogi(tau=0.1), **OPTIONS)
    grid = InProcessGrid(DPFedAvg.client_app(worlds.task()), CLIENTS)
    kept = []
    Upcycled(base, 0.5).start(
        grid,
        worlds.initial(),
        num_rounds=4,
        evaluate_fn=lambda number, arrays: kept.append(base.run.state),
    )
    for odd, even in ((1, 2), (3, 4)):
        assert kept[odd].server.keys() == {"optimizer.mean", "optimizer.square"}
        for group, moments in kept[odd].server.items():
            for name in moments:
                np.testing.assert_array_equal(moments[name], kept[even].server[group][name])
    means = [kept[odd].server["optimizer.mean"]["head.bias"] for odd in (1, 3)]
    assert np.any(means[0] != means[1])


@pytest.mark.parametrize(("tau", "warns"), [(0.1, True), (0.125, False), (0.2, False)])
def test_a_tau_below_the_noise_of_a_coordinate_is_warned_of(tau, warns, caplog):
    plan = released_plan()  # σC/m = 1 · 0.5 / 4 = 0.125
    strategy = FederatedStrategy(DPFedAvg(server=Adam(tau=tau)), plan)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.summary()
    assert ("tau is below 0.125, the noise of a coordinate" in caplog.text) is warns


def test_an_average_of_models_that_differ_by_client_is_refused():
    with pytest.raises(InvalidValue, match="sends each client a model of its own"):
        FedAMP(average=TailAverage())


def test_feddyn_takes_no_momentum():
    FedDyn(server=Sgd(learning_rate=0.5))
    with pytest.raises(InvalidValue, match="expected Sgd without momentum"):
        FedDyn(server=Sgd(momentum=0.5))
