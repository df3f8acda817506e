"""Client apps that do not use this package, with models of unusual parameters."""

import logging
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from flower_ext.algorithms import (
    DPFedAvg,
)
from flower_ext.federation import FederatedStrategy, client_level_dp_mod
from flower_ext.training import Task, UnshareableModel
from tests.faults.worlds import (
    CLASSES,
    CLIENTS,
    DATA,
    FEATURES,
    nobody_private,
    private_plan,
)
from tests.support.odd_parameters import EVERYONE, METHODS, OPTIONS, PLANS, Counting, run
from tests.support.strategies import strategy_of

START = {
    "w": np.array([0.5, 0.25], np.float32),
    "scalar": np.array(-1.0, np.float32),
    "none": np.ones((0, 5), np.float32),
}
STEP = 0.125


def foreign(placement: str, reply_order: str = "=", **unsent: np.ndarray) -> ClientApp:
    """Return an app that moves every number by `STEP`, and returns ``unsent`` arrays as well."""
    app = ClientApp(mods=[client_level_dp_mod()] if placement == "client" else [])

    @app.train()
    def _(message: Message, context: object) -> Message:
        received = message.content["arrays"]
        moved = {name: array.numpy() + np.float32(STEP) for name, array in received.items()}
        sent = {
            n: np.asarray(a, np.dtype("f4").newbyteorder(reply_order)) for n, a in moved.items()
        }
        arrays = ArrayRecord({name: Array(array) for name, array in {**sent, **unsent}.items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def run_foreign(app, placement, arrays=START, **options):
    """Run DP-FedAvg with clients that do not use this package."""
    plan = private_plan(
        sampling=EVERYONE, clipping_norm=1.0, noise_multiplier=1e-6, noise_placement=placement
    )
    strategy = strategy_of(DPFedAvg, plan=plan, evaluate_every=0, **options)
    grid = Counting(app, CLIENTS)
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return strategy, grid, lambda: strategy.start(grid, initial, num_rounds=1)


def assert_moved_by_a_step(strategy, result):
    assert strategy.refusals == []
    for name, array in START.items():
        np.testing.assert_allclose(result.arrays[name].numpy(), array + STEP, atol=1e-4)


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize(("sent", "returned"), [*product("<>", repeat=2)])
def test_odd_shapes_and_byte_orders_train_in_a_custom_app(sent, returned, placement):
    arrays = {n: a.astype(a.dtype.newbyteorder(sent)) for n, a in START.items()}
    strategy, _, start = run_foreign(foreign(placement, returned), placement, arrays)
    assert_moved_by_a_step(strategy, start())


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_a_custom_app_with_whole_numbers_is_refused_and_remedies_work(dtype, placement):
    counter = {"counter": np.ones(2, dtype)}
    app = foreign(placement, **counter)
    _, grid, start = run_foreign(app, placement, {**START, **counter})
    with pytest.raises(UnshareableModel, match="leave it out of the initial arrays"):
        start()
    assert grid.trainings == 0
    for arrays, options in ((START, {}), ({**START, **counter}, {"personal": ("counter",)})):
        strategy, _, start = run_foreign(app, placement, arrays, **options)
        assert_moved_by_a_step(strategy, start())


@pytest.mark.parametrize("placement", ["client", "server"])
def test_a_custom_app_with_tied_names_is_refused_unless_one_is_sent(placement):
    rng = np.random.default_rng(0)
    tied = {"embedding.weight": rng.normal(size=(4, 3)).astype(np.float32)}
    both = {**START, **tied, "head.weight": tied["embedding.weight"]}
    app = foreign(placement, **{"head.weight": both["head.weight"] + np.float32(STEP)})
    _, grid, start = run_foreign(app, placement, both)
    message = r"'head.weight' has the same initial numbers as 'embedding.weight', as if tied to it"
    with pytest.raises(UnshareableModel, match=message):
        start()
    assert grid.trainings == 0
    strategy, _, start = run_foreign(app, placement, {**START, **tied})
    assert_moved_by_a_step(strategy, start())


EQUAL = np.random.default_rng(1).normal(size=9).astype(np.float32)


@pytest.mark.parametrize(
    ("names", "values", "warned"),
    [
        (("norm.weight", "other.weight"), np.ones(64, np.float32), False),
        (("a.bias", "b.bias"), np.zeros(64, np.float32), False),
        (("a.eye", "b.eye"), np.eye(5, dtype=np.float32), False),
        (("a.scale", "b.scale"), np.array(2.5, np.float32), False),
        (("layers.0.weight", "layers.1.weight"), EQUAL, True),  # copies, as in TransformerEncoder
    ],
)
def test_parameters_that_begin_equal_but_are_no_proof_of_a_tie_train(names, values, warned, caplog):
    app, arrays = foreign("server"), dict.fromkeys(names, values)
    strategy, _, start = run_foreign(app, "server", arrays)
    with caplog.at_level(logging.WARNING, "flwr"):
        start()
    assert strategy.refusals == []
    assert ("If they are tied" in caplog.text) == warned


def test_without_noise_tied_names_stay_equal_and_are_not_refused():
    arrays = {"a": EQUAL, "b": EQUAL}
    strategy = FederatedStrategy(DPFedAvg(), nobody_private(), evaluate_every=0)
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    result = strategy.start(Counting(foreign("server"), CLIENTS), initial, num_rounds=1)
    np.testing.assert_array_equal(result.arrays["a"].numpy(), result.arrays["b"].numpy())


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return logits


def test_a_run_from_a_state_dict_says_which_names_are_tied():
    problem = Task(model=Tied, data=lambda client: DATA[client], device="cpu")
    strategy = METHODS["DP-FedAvg"](PLANS["no privacy"](), **OPTIONS)
    with pytest.raises(Exception, match="'second.weight' is tied to 'first.weight'"):
        run(strategy, problem, CLIENTS, Tied().state_dict())
