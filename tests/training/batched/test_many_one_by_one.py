"""Models whose results would differ in a batch are trained one by one."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from flower_ext.data import Examples
from flower_ext.training import Job, Proximal
from flower_ext.training.batched import many
from tests.support.jobs import (
    ALIKE,
    SGD,
    UNEVEN,
    Dense,
    jobs_of,
    one_by_one,
    perceptron,
    problem,
    same,
    train_many,
    why_apart,
)


class Counting(nn.Module):
    """A model that stores a mean of its inputs, in place or in a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(4, 3), in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.mean.mul_(0.9).add_(0.1 * x.mean(dim=0))
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return self.head(x - self.mean)


class Compared(nn.Module):
    """A model that compares the examples of a mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x - x.mean(dim=0))


def instance_normed():
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), norm, nn.Flatten(), nn.Linear(4, 3))


def hooked():
    model = perceptron(nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def spectral_normed():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 3))


@dataclass
class Width:
    """A factory without a hash."""

    width: int

    def __call__(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.LayerNorm(self.width), nn.Tanh())


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize(
    "model",
    [
        partial(Counting, True),
        partial(Counting, False),
        *(Compared, instance_normed, hooked, spectral_normed, Width(3)),
    ],
)
def test_models_of_any_kind_are_those_of_the_loop(batched, model, sizes):
    small = [replace(SGD, learning_rate=0.05)]
    same(
        train_many(problem(model), jobs_of(model, small, sizes)),
        one_by_one(problem(model), jobs_of(model, small, sizes)),
    )


class Dropping(nn.Module):
    """Dropout that no module reveals."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(dropout(x, 0.5, self.training))


def randomly_leaky():
    return perceptron(nn.RReLU())


@pytest.mark.parametrize("model", [Dropping, randomly_leaky])
def test_models_that_draw_numbers_are_trained_one_by_one(batched, model):
    assert len(train_many(problem(model), jobs_of(model, [SGD], ALIKE))) == len(ALIKE)
    assert why_apart(problem(model), jobs_of(model, [SGD], ALIKE))
    assert batched == []


class Factory:
    """A factory whose models follow its settings."""

    width = 5

    def build(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.LayerNorm(self.width))


def test_a_factory_with_new_settings_makes_new_models(batched):
    factory = Factory()
    for factory.width in (5, 7, 5):
        build = factory.build
        ours = train_many(problem(build), jobs_of(build, [SGD], ALIKE))
        same(ours, one_by_one(problem(build), jobs_of(build, [SGD], ALIKE)))
    assert len(batched) == 3


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), "batch normalisation"),
        (nn.AlphaDropout(0.5), "AlphaDropout(p=0.5, inplace=False) would draw different random"),
        (nn.LSTM(4, 33), "training two jobs together raises"),
        (nn.Embedding(4, 2, padding_idx=1, max_norm=1.0), "cannot be stacked"),
        (nn.Embedding(4, 2, padding_idx=1, scale_grad_by_freq=True), "cannot be stacked"),
    ],
)
def test_models_that_gain_nothing_in_a_batch_are_trained_one_by_one(layer, message):
    task = problem(lambda: nn.Sequential(layer))
    assert message in why_apart(task, jobs_of(Dense, [SGD], ALIKE))


def test_one_training_alone_is_never_tried_in_a_batch(monkeypatch):
    """On a node of its own, each message would pay for the trial."""

    def tried(*_):
        raise AssertionError("tried")

    monkeypatch.setattr(many, "why_not_stacked", tried)
    (job,) = jobs_of(Dense, [SGD], [16])
    same(train_many(problem(), [job]), one_by_one(problem(), jobs_of(Dense, [SGD], [16])))


class Headed(nn.Module):
    """One layer after the function ``before`` of a batch."""

    def __init__(self, before):
        super().__init__()
        self.before, self.head = before, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.before(x))


class Padded(nn.Module):
    """Sequences of words, in which the last word number is padding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, padding_idx=9)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(dim=1))


class InTraining(nn.Linear):
    """A layer whose output changes once it is trained."""

    def forward(self, x):
        out = super().forward(x)
        return out if self.training else torch.sigmoid(out)


def patched():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    forward = model.forward
    model.forward = lambda x: 2 * forward(x) + 1
    return model


def normal(count, generator):
    return torch.randn(count, 4, generator=generator)


ODD = {
    "the largest of a batch": (lambda: Headed(lambda x: x / x.abs().amax()), normal),
    "a word for none": (Padded, lambda n, g: torch.randint(10, (n, 6), generator=g)),
    "undefined for some numbers": (
        lambda: Headed(lambda x: torch.log(x) - torch.log(x).mean(dim=0)),
        lambda n, g: torch.rand(n, 4, generator=g) + 0.1,
    ),
    "bytes": (
        lambda: Headed(lambda x: x.float() / 255 - (x.float() / 255).mean(dim=0)),
        lambda n, g: torch.randint(256, (n, 4), generator=g).to(torch.uint8),
    ),
    "a patched forward pass": (patched, normal),
    "not built for training": (lambda: nn.Sequential(InTraining(4, 3)).eval(), normal),
    "features with a gradient": (
        lambda: nn.Linear(4, 3),
        lambda n, g: normal(n, g).requires_grad_(),
    ),
}


@pytest.mark.parametrize("which", ODD)
@pytest.mark.parametrize("sizes", [UNEVEN, ALIKE], ids=["uneven", "alike"])
def test_whatever_a_model_does_it_trains_as_by_itself(which, sizes):
    model, features_of = ODD[which]

    def jobs():
        for client, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(client)
            targets = torch.randint(3, (size,), generator=generator)
            yield Job(
                params=problem(model).initial_params(0),
                examples=Examples(features_of(size, generator), targets),
                training=SGD,
                generator=generator,
            )

    same(train_many(problem(model), [*jobs()]), one_by_one(problem(model), [*jobs()]))


def test_a_model_of_two_examples_at_least_is_never_given_one(batched):
    def model():
        return Headed(lambda x: x + 0 * x[1].mean())

    task, made = problem(model), [jobs_of(model, [SGD], ALIKE) for _ in range(2)]
    same(train_many(task, made[0]), one_by_one(task, made[1]))


class Lasso(Proximal):
    """A term that inherits from a term that batches support."""

    def __call__(self, params):
        return self.weight * sum(p.abs().sum() for p in params.values())


def test_a_term_that_inherits_from_another_is_not_taken_for_it():
    def made():
        return jobs_of(Dense, [SGD], ALIKE, lambda start, client: [Lasso(weight=0.1, anchor=start)])

    same(train_many(problem(), made()), one_by_one(problem(), made()))
