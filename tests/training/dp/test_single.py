"""DP-SGD refuses a model that learns from no example by itself, before any record counts."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue, is_tellable
from flower_ext.privacy import SeededNoise
from flower_ext.training import DpSgdTraining, Task, train_dp_sgd
from flower_ext.training.dp.clipped_gradient import ClippedGradient


class Network(nn.Module):
    """Two dense layers with something between them."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(6, 8), nn.Linear(8, 3)

    def between(self, x):
        return x

    def forward(self, x):
        return self.above(torch.relu(self.between(self.below(x))))


class OverTheBatch(Network):
    """PyTorch's function of batch normalisation, which raises for a single example."""

    def between(self, x):
        return functional.batch_norm(x, None, None, training=True)


class Deviation(Network):
    """A norm by hand, which is not finite for a single example."""

    def between(self, x):
        return (x - x.mean(dim=0)) / (x.std(dim=0) + 1e-5)


class Variance(Network):
    """A norm by hand, which is zero for each single example."""

    def between(self, x):
        return (x - x.mean(dim=0)) / (x.var(dim=0, unbiased=False) + 1e-5).sqrt()


class Averaged(Network):
    """Groups of one channel, whose averages over time are their biases."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 4)

    def between(self, x):
        return self.norm(x.view(-1, 4, 2)).mean(dim=2).repeat(1, 2)


class Checkpointed(Network):
    """Activations that the backward pass computes again, from other weights."""

    def forward(self, x):
        return self.above(checkpoint(lambda x: self.below(x).relu(), x, use_reentrant=False))


class Logarithm(Network):
    """A model of numbers that are not negative."""

    def forward(self, x):
        return self.above(self.below(x.log()).relu())


def task_of(build):
    def data(client):
        raise NotImplementedError

    return Task(model=build, data=data, loss=functional.cross_entropy, device="cpu")


REFUSED = {
    OverTheBatch: "a random example raises ValueError: Expected more than 1 value",
    Deviation: "a gradient that is not finite",
    Variance: "by themselves have equal outputs",
    Averaged: "by themselves have equal outputs",
    Checkpointed: "a random example raises CheckpointError",
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("count", [9, 0], ids=["records", "an empty batch"])
@pytest.mark.parametrize("build", REFUSED)
def test_a_model_that_learns_from_no_single_example_is_refused_with_the_reason(build, count):
    task, draw = task_of(build), torch.Generator().manual_seed(0)
    with pytest.raises(InvalidValue, match=f"{REFUSED[build]}.*{build.__name__}") as refusal:
        train_dp_sgd(
            task,
            task.initial_params(0),
            Examples(torch.rand(count, 6, generator=draw), torch.zeros(count, dtype=torch.long)),
            DpSgdTraining(
                steps=1,
                sampling_rate=1.0,
                batch_size=9,
                learning_rate=0.1,
                clipping_norm=1.0,
                noise_multiplier=1.0,
            ),
            sampling=np.random.default_rng(0),
            noise=SeededNoise(0, "steps"),
        )
    assert is_tellable(refusal.value)


@pytest.mark.parametrize("build", [Network, Logarithm])
def test_a_model_that_learns_from_single_examples_draws_nothing_in_the_trial(build):
    task = task_of(build)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, [*params], clipping_norm=1.0)
    features = 1 + torch.rand(9, 6, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    gradient(params, features[:0], torch.arange(0))  # the trial alone
    assert torch.equal(before, torch.get_rng_state())
    summed = gradient(params, features, torch.arange(9) % 3)
    assert all(part.any() for part in summed.values())


LINEAR = partial(nn.Linear, 6, 3)


def over_pairs(outputs, targets):
    """Return the mean distance of two examples."""
    return torch.cdist(outputs, outputs).mean()


def contrastive(outputs, targets):
    same = targets.unsqueeze(1) == targets
    return -(torch.log_softmax(outputs @ outputs.T, 1) * same).sum(1).mean()


def of_labels(count, loss, first=0):
    """Train for nothing on labels from ``first``."""
    task = Task(model=LINEAR, data=task_of(LINEAR).data, loss=loss, device="cpu")
    params = task.initial_params(0)
    gradient = ClippedGradient(task, [*params], clipping_norm=1.0)
    features = torch.rand(count, 6, generator=torch.Generator().manual_seed(0))
    return gradient(params, features, first + torch.arange(count) % 3)


@pytest.mark.parametrize("loss", [over_pairs, contrastive])
def test_a_loss_over_pairs_is_refused(loss):
    with pytest.raises(InvalidValue, match="a gradient of zero.*loss.*pairs of examples") as error:
        of_labels(9, loss)
    assert is_tellable(error.value)


@pytest.mark.parametrize(
    "loss",
    [
        partial(functional.cross_entropy, ignore_index=0),
        partial(functional.cross_entropy, ignore_index=1),
        partial(functional.cross_entropy, weight=torch.tensor([0.0, 1.0, 1.0]), reduction="sum"),
    ],
    ids=["the first class ignored", "the second class ignored", "a class of no weight"],
)
def test_a_loss_that_ignores_a_class_is_allowed(loss):
    assert all(part.any() for part in of_labels(9, loss).values())
