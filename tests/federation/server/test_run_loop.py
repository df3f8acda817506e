"""A run ends with a reason at the round that would send a model on that is not finite."""

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam

from flower_ext.algorithms import DPFedAvg, Hosted, Upcycled
from flower_ext.federation import InProcessGrid, State
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, Ledger, NonPrivatePlan, ReleasePlan
from flower_ext.runs import RunWriter
from flower_ext.training import LocalTraining
from tests.support.strategies import strategy_of
from tests.support.worlds import initial, task

CLIENTS = 4
PLAIN = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
FAST = LocalTraining(steps=1, batch_size=10)
OPTIONS = {"local": FAST, "evaluate_every": 0, "seed": 1, "timeout": 5.0}


class Overshooting(DPFedAvg):
    """A server's step that overflows in the second round."""

    def step(self, model, released, state):
        moved, state = super().step(model, released, state)
        if released.round == 2:
            moved["head.bias"] = moved["head.bias"] + np.float32(np.inf)
        return moved, state


class Forgetful(DPFedAvg):
    """A server whose state is NaN from the second round on."""

    def step(self, model, released, state):
        moved, _ = super().step(model, released, state)
        momentum = np.array([0.0, np.nan if released.round >= 2 else 1.0])
        return moved, State(server={"momentum": {"head.bias": momentum}})


class Unused(Hosted):
    """A method whose clients never move one parameter."""

    def step(self, model, released, state):
        still = {
            partition: replace(
                update, arrays={**update.arrays, "head.bias": update.arrays["head.bias"] * 0}
            )
            for partition, update in released.updates.items()
        }
        return super().step(model, replace(released, kept=still), state)


def noised(rounds=5):
    """Return a plan with noise."""
    return ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=0.5,
        noise_multiplier=1.0,
        rounds=rounds,
        delta=1e-5,
    )


def started(strategy, arrays=None, rounds=5):
    base = getattr(strategy, "base", strategy)
    grid = InProcessGrid(base.method.client_app(task()), num_clients=CLIENTS)
    return strategy.start(grid, arrays or initial(), num_rounds=rounds)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Overshooting, "'head.bias' holds .* in the model after the server's step of Overshooting"),
        (Forgetful, "in the server's state 'momentum' after the server's step of Forgetful"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_without_more_spend(method, message, tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(method, plan=noised(), directory=run, ledger=ledger, **OPTIONS)
    with pytest.raises(ValueError, match=f"{message} in round 2: expected finite"):
        started(strategy)
    assert strategy.participations.rounds == 2
    kinds = [entry["kind"] for entry in Ledger.read(tmp_path / "ledger.jsonl")]
    assert kinds.count("reserve") == 2
    assert strategy.refusals == []  # no client is blamed
    assert strategy.run.checkpoints.newest().values["round"] == 1
    facts = json.loads((run.path / "guarantee.json").read_text(encoding="utf-8"))
    assert facts


def test_an_adaptive_server_without_tau_is_named_where_a_parameter_is_unused():
    strategy = strategy_of(Unused, FedAdam(tau=0.0), plan=PLAIN, **OPTIONS)
    model = records.to_arrays(initial())
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(
            ValueError, match="'head.bias' .* the server's step of Unused-FedAdam in round 1"
        ),
    ):
        started(strategy)
    assert sorted(model) == sorted(strategy.run.model)
    assert strategy.participations.rounds == 1


def test_an_extrapolation_that_overflows_is_named_with_its_coefficient():
    strategy = Upcycled(
        strategy_of(DPFedAvg, plan=PLAIN, **OPTIONS), coefficient=lambda number: 1e300
    )
    with (
        np.errstate(over="ignore"),
        pytest.raises(ValueError, match=r"extrapolation of Upcycled in round 2.* than 1e\+300"),
    ):
        started(strategy)
    assert strategy.base.participations.rounds == 1


def test_a_run_does_not_begin_with_a_model_that_is_not_finite():
    strategy = strategy_of(DPFedAvg, plan=noised(), **OPTIONS)
    arrays = records.to_arrays(initial())
    arrays["head.bias"] = arrays["head.bias"] * np.float32(np.nan)
    with pytest.raises(ValueError, match="'head.bias' holds NaN .* in the model before round 1"):
        started(strategy, records.to_record(arrays))
    assert strategy.participations.rounds == 0
