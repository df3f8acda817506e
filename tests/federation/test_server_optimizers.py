"""Server optimizers: equality with Flower's strategies and with plain loops over coordinates."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from flower_ext.errors import InvalidValue
from flower_ext.federation._flower_private import become_server_of
from flower_ext.federation.messages.records import to_record
from flower_ext.federation.server_optimizers import (
    Adagrad,
    Adam,
    ExponentialAverage,
    Sgd,
    TailAverage,
    Yogi,
)

OPTIMIZERS = (
    Sgd(learning_rate=0.7),
    Sgd(learning_rate=0.7, momentum=0.8),
    Sgd(momentum=0.8, nesterov=True),
    Adagrad(),
    Adam(),
    Yogi(),
)


def model_and_updates(rounds=12, seed=0, dtype=np.float32):
    """Return a random model, and an update of it for each round."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 4), "b": (5,)}
    arrays = [
        {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
        for _ in range(rounds + 1)
    ]
    return arrays[0], [{name: 0.1 * x for name, x in each.items()} for each in arrays[1:]]


def path(optimizer, model, updates):
    """Return the model after each step."""
    moments, models = optimizer.init(model), []
    for update in updates:
        model, moments = optimizer.step(model, update, moments)
        models.append(model)
    return models


def flower_s_path(strategy, model, updates, *, correction=None):
    """Return the model after each round of Flower's strategy, whose clients' mean is the update.

    ``correction`` returns the factor by which a round's step of the strategy is longer.
    """
    become_server_of(1)
    models = []
    for number, update in enumerate(updates, start=1):
        strategy.configure_train(number, to_record(model), ConfigRecord(), Nodes())
        arrays = to_record({name: model[name] + update[name] for name in model})
        content = RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})})
        replies = [Message(content, dst_node_id=node, message_type="train") for node in (1, 2)]
        record, _ = strategy.aggregate_train(number, replies)
        moved = {name: array.numpy() for name, array in record.items()}
        if correction is not None:
            factor = correction(number)
            moved = {name: model[name] + (moved[name] - model[name]) / factor for name in model}
            strategy.current_arrays = moved
        model = moved
        models.append(model)
    return models


class Nodes:
    """The part of a Grid that a Flower strategy uses to draw clients."""

    def get_node_ids(self):
        return [1, 2]


def assert_equal(models, others):
    for model, other in zip(models, others, strict=True):
        for name in model:
            np.testing.assert_allclose(model[name], other[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [
        (Sgd(learning_rate=0.7), FedAvgM(server_learning_rate=0.7)),
        (
            Sgd(learning_rate=0.7, momentum=0.8),
            FedAvgM(server_learning_rate=0.7, server_momentum=0.8),
        ),
        (Adagrad(), FedAdagrad()),
        (Adagrad(learning_rate=0.3, tau=0.01), FedAdagrad(eta=0.3, tau=0.01)),
        (Yogi(), FedYogi()),
        (
            Yogi(learning_rate=0.2, beta1=0.5, beta2=0.9, tau=0.1),
            FedYogi(eta=0.2, beta_1=0.5, beta_2=0.9, tau=0.1),
        ),
    ],
)
def test_the_same_mean_gives_the_model_of_flower_s_strategy(optimizer, strategy):
    model, updates = model_and_updates(dtype=np.float64)
    assert_equal(path(optimizer, model, updates), flower_s_path(strategy, model, updates))


def test_adam_is_flower_s_without_its_correction_of_the_bias():
    model, updates = model_and_updates(dtype=np.float64)

    def correction(number):  # of Kingma and Ba, with round numbers that begin at 2
        return math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))

    theirs = flower_s_path(FedAdam(), model, updates, correction=correction)
    assert_equal(path(Adam(), model, updates), theirs)


def plain(optimizer, x, updates):
    """Return one coordinate after all steps, by the papers' formulas in scalars."""
    b = m = v = 0.0
    for d in updates:
        if isinstance(optimizer, Sgd):
            b = optimizer.momentum * b + d
            x += optimizer.learning_rate * (d + optimizer.momentum * b if optimizer.nesterov else b)
            continue
        m = optimizer.beta1 * m + (1 - optimizer.beta1) * d
        if isinstance(optimizer, Yogi):
            v -= (1 - optimizer.beta2) * d * d * math.copysign(v != d * d, v - d * d)
        elif isinstance(optimizer, Adam):
            v = optimizer.beta2 * v + (1 - optimizer.beta2) * d * d
        else:
            v += d * d
        x += optimizer.learning_rate * m / (math.sqrt(v) + optimizer.tau)
    return x


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_every_coordinate_follows_the_paper_s_formula(optimizer):
    model, updates = model_and_updates()
    last = path(optimizer, model, updates)[-1]
    for row, column in ((0, 0), (2, 3)):
        expected = plain(optimizer, model["w"][row, column], [u["w"][row, column] for u in updates])
        assert last["w"][row, column] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_types_of_arrays_stay_and_arguments_are_not_changed(optimizer):
    model, updates = model_and_updates(rounds=2)
    before = {name: x.copy() for name, x in model.items()}
    last = path(optimizer, model, updates)[-1]
    assert {x.dtype for x in last.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(model[name], x) for name, x in before.items())


def kept_after(average, models):
    kept = {}
    for model in models:
        kept = average.add(model, kept)
    return average.average(kept)


def test_an_exponential_average_weights_models_by_their_age():
    models = path(Sgd(), *model_and_updates())
    weights = 0.8 ** np.arange(len(models))[::-1]
    expected = sum(w * model["w"].astype(float) for w, model in zip(weights, models, strict=True))
    mean = kept_after(ExponentialAverage(decay=0.8), models)["w"]
    np.testing.assert_allclose(mean, expected / weights.sum(), atol=1e-6)
    assert mean.dtype == np.float32


@pytest.mark.parametrize("last", [1, 3, 100])
def test_a_tail_average_is_the_mean_of_the_last_models(last):
    models = path(Sgd(), *model_and_updates())
    expected = np.mean([model["b"] for model in models[-last:]], axis=0)
    np.testing.assert_allclose(kept_after(TailAverage(last=last), models)["b"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: Adam(learning_rate=math.inf), "learning_rate=inf"),
        (lambda: Sgd(momentum=1.0), r"momentum=1.0: expected a number in \[0, 1\)"),
        (lambda: Sgd(nesterov=True), "expected a momentum > 0 as well"),
        (lambda: Adam(beta1=1.0), "beta1=1.0"),
        (lambda: Yogi(beta2=-0.1), "beta2=-0.1"),
        (lambda: Adagrad(tau=0.0), "tau=0.0"),
        (lambda: ExponentialAverage(decay=0.0), "decay=0.0"),
        (lambda: ExponentialAverage(decay=1.0), "decay=1.0"),
        (lambda: TailAverage(last=0), "last=0"),
    ],
)
def test_a_value_out_of_range_is_refused(make, message):
    with pytest.raises(InvalidValue, match=message):
        make()
