"""Frozen parts do not train, travel or count; tied and unused parameters train as before."""

import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.privacy import SeededNoise
from flower_ext.training import (
    DpSgdTraining,
    Job,
    LocalTraining,
    Task,
    check_shareable,
    evaluate,
    train_dp_sgd,
)
from flower_ext.training.dp.dp_sgd import ClippedGradient
from flower_ext.training.models.factory import ModelFactory, factory_of
from flower_ext.training.params import require_modules
from tests.support.jobs import batches, train_many, train_one
from tests.support.reference.clipped_gradient import by_loop

SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.2, momentum=0.5)


class Backbone(nn.Module):
    """Frozen layers with statistics and a buffer, below a head."""

    def __init__(self, *, freeze: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.body[1].running_mean.fill_(0.3)
        self.body.requires_grad_(not freeze)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) * self.scale)


class Tied(nn.Module):
    """One matrix in two layers, and a third layer that no example reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.into.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(x)))


def task(model, **options) -> Task:
    return Task(model=model, data=no_data, device="cpu", **options)


def no_data(client: int) -> None:
    """Return no data, for every client."""


def examples(seed: int, count: int = 20) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        features=torch.randn(count, 4, generator=generator),
        targets=torch.randint(3, (count,), generator=generator),
    )


def plain_loop(model: nn.Module, params, data: Examples, seed: int):
    """Train by PyTorch's own optimizer, on a model that has its frozen part in place."""
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in params.items():
            named[name].copy_(value)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=SGD.learning_rate, momentum=SGD.momentum)
    for x, y in batches(data, SGD, torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: named[name].detach() for name in params}


def job(params, seed: int) -> Job:
    return Job(
        params=params,
        examples=examples(seed),
        training=SGD,
        generator=torch.Generator().manual_seed(seed),
    )


def assert_same(ours, expected):
    assert set(ours) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)


def test_only_what_trains_travels():
    loop_task = task(Backbone)
    assert set(loop_task.initial_params(0)) == set(loop_task.shapes) == {"head.weight", "head.bias"}
    assert not torch.equal(
        loop_task.initial_params(0)["head.bias"], loop_task.initial_params(1)["head.bias"]
    )


def test_training_with_frozen_parts_matches_torch_alone_and_in_a_batch():
    loop_task = task(Backbone)
    params = loop_task.initial_params(3)
    expected = []
    for seed in range(6):
        model = loop_task.model().train()
        model.body.eval()
        expected.append(plain_loop(model, params, examples(seed), seed))
    alone = train_one(
        loop_task, params, examples(0), SGD, generator=torch.Generator().manual_seed(0)
    )
    assert_same(alone, expected[0])
    for trained, one in zip(
        train_many(loop_task, [job(params, s) for s in range(6)]), expected, strict=True
    ):
        assert_same(trained, one)


def test_frozen_parameters_never_change_and_every_model_shares_them():
    loop_task = task(Backbone)
    before = {name: value.clone() for name, value in loop_task.factory.facts.frozen.items()}
    assert set(before) == {
        *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"),
        *("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
    }
    params = loop_task.initial_params(0)
    train_many(loop_task, [job(params, seed) for seed in range(6)])
    train_one(loop_task, params, examples(9), SGD, generator=torch.Generator())
    evaluate(loop_task, params, examples(8))
    for model in (loop_task.model(), loop_task.model()):
        state = model.state_dict()
        frozen = {name: state[name] for name in before}
        torch.testing.assert_close(frozen, before, rtol=0, atol=0)
    # Drawn once, although it does not travel.
    assert torch.equal(loop_task.model().scale, loop_task.model().scale)


def test_the_norm_of_an_examples_gradient_is_that_of_what_trains():
    loop_task = task(Backbone)
    params, data = loop_task.initial_params(0), examples(5)
    clipped = ClippedGradient(loop_task, [*params], clipping_norm=0.05)
    gradient_found = clipped(params, data.features, data.targets)
    model = loop_task.model().eval()
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for x, y in zip(data.features, data.targets, strict=True):
        model.load_state_dict(params, strict=False)
        loss = cross_entropy(model(x[None]), y[None])
        slopes = torch.autograd.grad(loss, [model.head.weight, model.head.bias])
        norm = sum(float(s.double().square().sum()) for s in slopes) ** 0.5
        for name, slope in zip(("head.weight", "head.bias"), slopes, strict=True):
            expected[name] += slope.double() * min(1.0, 0.05 / norm)
    for name, value in expected.items():
        torch.testing.assert_close(gradient_found[name], value, atol=1e-6, rtol=1e-3)


def test_dp_sgd_trains_above_frozen_statistics():
    loop_task = task(Backbone)
    training = DpSgdTraining(
        steps=3,
        sampling_rate=0.5,
        batch_size=10,
        learning_rate=0.5,
        clipping_norm=1.0,
        noise_multiplier=1e-6,
    )
    params = loop_task.initial_params(0)
    trained = train_dp_sgd(
        loop_task,
        params,
        examples(1),
        training,
        sampling=np.random.default_rng(0),
        noise=SeededNoise(0),
    )
    assert set(trained) == set(params)
    assert not torch.equal(trained["head.weight"], params["head.weight"])


def test_statistics_of_frozen_layers_may_be_shared_and_others_may_not():
    check_shareable(task(Backbone).model())
    with pytest.raises(InvalidValue, match="running statistics"):
        check_shareable(task(partial(Backbone, freeze=False)).model())


def test_names_that_train_come_before_requires_grad():
    loop_task = task(Backbone, trainable=["body.0"])
    assert set(loop_task.shapes) == {"body.0.weight", "body.0.bias"}
    again = task(partial(Backbone, freeze=False), trainable=["body.0"])
    assert set(again.shapes) == {"body.0.weight", "body.0.bias"}
    with pytest.raises(InvalidValue, match=r"trainable='tail' names no parameter"):
        _ = task(Backbone, trainable=["head", "tail"]).shapes
    with pytest.raises(InvalidValue, match="expected a tuple of names"):
        task(Backbone, trainable="head")


def test_a_model_of_which_nothing_trains_is_refused():
    with pytest.raises(InvalidValue, match="all parameters of the model are frozen"):
        _ = task(lambda: nn.Linear(2, 2).requires_grad_(False)).shapes


def other_base():
    model = Backbone()
    with torch.no_grad():
        model.body[0].weight[0, 0] += 1e-7
    return model


def test_a_fingerprint_depends_on_every_frozen_number_and_no_trained_one():
    one = task(Backbone).fingerprint
    assert one == task(lambda: Backbone()).fingerprint
    assert one != task(other_base).fingerprint
    assert one != task(Backbone, trainable=["head", "body.0"]).fingerprint
    assert task(partial(nn.Linear, 2, 2)).fingerprint == ""


def test_equal_partials_are_one_factory():
    assert factory_of(partial(nn.Linear, 2, out_features=3)) is factory_of(
        partial(nn.Linear, 2, out_features=3)
    )
    assert factory_of(partial(nn.Linear, 2, out_features=3)) is not factory_of(
        partial(nn.Linear, 2, out_features=4)
    )


@dataclass(frozen=True)
class Settings:
    """Settings with a method that builds models."""

    width: int = 3

    def build(self) -> nn.Module:
        """Return a model of this width."""
        return nn.Linear(2, self.width)


def test_a_method_of_equal_objects_is_one_factory():
    assert factory_of(Settings(3).build) is factory_of(Settings(3).build)
    assert factory_of(Settings(3).build) is not factory_of(Settings(4).build)


@pytest.mark.parametrize("factory", [Backbone, partial(Backbone, freeze=True), Settings(5).build])
def test_a_task_that_was_sent_builds_no_model_again(factory, monkeypatch):
    """On Ray each message carries the app, and with it a task."""
    loop_task = task(factory)
    shapes = loop_task.shapes
    monkeypatch.setattr(ModelFactory, "_built", None)  # building a model from here on fails
    sent = pickle.loads(pickle.dumps(loop_task))
    assert sent.factory is loop_task.factory
    assert sent.shapes == shapes


def test_a_received_model_is_rebuilt_where_it_is_unknown(monkeypatch):
    loop_task = task(Backbone)
    sent, frozen = pickle.dumps(loop_task), loop_task.fingerprint
    assert len(sent) < 1_000  # no parameters
    monkeypatch.setattr(
        f"{factory_of.__module__}._factory_by", lambda key: ModelFactory(key.function)
    )
    elsewhere = pickle.loads(sent)
    assert elsewhere.factory is not loop_task.factory
    assert elsewhere.fingerprint == frozen


def test_tied_parameters_train_as_one_which_travels_once_and_unused_ones_stay():
    loop_task = task(Tied)
    params = loop_task.initial_params(0)
    assert "out.weight" not in params
    expected = [plain_loop(loop_task.model().train(), params, examples(s), s) for s in range(6)]
    trained = train_one(
        loop_task, params, examples(0), SGD, generator=torch.Generator().manual_seed(0)
    )
    assert_same(trained, expected[0])
    assert torch.equal(trained["unused.weight"], params["unused.weight"])
    for one, other in zip(
        train_many(loop_task, [job(params, s) for s in range(6)]), expected, strict=True
    ):
        assert_same(one, other)


def test_dp_sgd_counts_both_uses_of_a_tied_parameter():
    loop_task = task(Tied)
    params, data = loop_task.initial_params(0), examples(2)
    clipped = ClippedGradient(loop_task, [*params], clipping_norm=0.3)
    trained = clipped(params, data.features, data.targets)
    expected = by_loop(loop_task, params, data, 0.3, [*params])
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=1e-3)


def test_a_frozen_base_is_loaded_once_and_once_for_initial_weights():
    """Loading a pretrained model takes seconds, and every message has a task of its own."""
    loaded = []

    def load() -> nn.Module:
        loaded.append(True)
        return Backbone()

    for _ in range(3):
        frozen_task = Task(model=load, data=lambda client: None)
        first, again = frozen_task.initial_params(1), frozen_task.initial_params(1)
        again["head.weight"].zero_()
        assert frozen_task.shapes["head.weight"] == (3, 6)
        assert frozen_task.initial_params(1)["head.weight"].equal(first["head.weight"])
        frozen_task.model()
    assert len(loaded) == 2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_parameters_that_cannot_be_sent_are_refused_unless_frozen(kind):
    def build(trains):
        base = nn.Linear(3, 4).to(kind).requires_grad_(trains)
        return nn.Sequential(base, nn.Linear(4, 2))

    with pytest.raises(ValueError, match=r"'0.weight' has type .*: expected float32 or float64"):
        factory_of(lambda: build(True)).initial(0)
    assert list(factory_of(lambda: build(False)).initial(0)) == ["1.weight", "1.bias"]


@pytest.mark.parametrize("names", [("b",), ("b.weight",)])
def test_an_option_with_one_name_of_a_tied_parameter_says_so(names):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    message = "names 'b.weight', which is tied to 'a.weight'"
    with pytest.raises(InvalidValue, match=f"trainable=.* {message}"):
        factory_of(Twice, names).initial(0)
    tied, travelling = factory_of(Twice).facts.tied, factory_of(Twice).facts.travelling
    assert tied == {"b.weight": "a.weight"}
    for option in ("personal", "adaptive"):
        with pytest.raises(InvalidValue, match=f"{option}=.* {message}"):
            require_modules(option, names, travelling, tied)
    assert {*factory_of(Twice, ("a.weight", "b")).initial(0)} == {"a.weight", "b.bias"}


class TiedAbove(nn.Module):
    """A frozen layer, and two trained layers of one weight."""

    def __init__(self, hooked=False):
        super().__init__()
        self.below = nn.Linear(4, 4).requires_grad_(False)
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(1))
        if hooked:
            self.register_forward_hook(lambda module, inputs, output: output + 1)

    def forward(self, x):
        return self.other(self.one(self.below(x)))


@pytest.mark.parametrize("hooked", [False, True], ids=["pickled", "with a local hook"])
def test_copies_share_frozen_weights_alone_and_keep_ties(hooked):
    factory = ModelFactory(lambda: TiedAbove(hooked))
    one, other = factory(), factory()
    assert one.below.weight is other.below.weight
    assert one.one.weight is one.other.weight
    assert one.one.weight is not other.one.weight
    x = torch.randn(2, 4)
    torch.testing.assert_close(one(x), other(x))
    with torch.no_grad():
        one.one.weight.zero_()
        one.seen.fill_(7.0)
    assert other.one.weight.any()
    assert not other.seen.any()
    assert torch.equal(one(x), torch.full((2, 4), float(hooked)))
