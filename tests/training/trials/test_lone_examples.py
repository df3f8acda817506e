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
from flower_ext.training.dp.dp_sgd import ClippedGradient
from flower_ext.training.trials.examples_in_turn import _usual_examples, why_nothing_learned
from tests.support.grids import grid


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
def test_a_model_that_learns_from_no_single_example_is_refused(build, count):
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


@pytest.mark.parametrize("labels", ["years", "none", "beyond the classes"])
def test_labels_that_do_not_begin_at_zero_are_refused_with_a_remedy(labels):
    """The trial reads no label, so the refusal is the same for all."""
    own = {"years": 1990 + torch.arange(9) % 3, "none": torch.arange(0), "beyond the classes": 7}
    targets = torch.as_tensor(own[labels]).expand(9 if labels != "none" else 0)
    task = Task(
        model=Network,
        data=lambda client: None,
        loss=lambda outputs, targets: functional.cross_entropy(outputs, targets - 1990),
    )
    gradient = ClippedGradient(task, [*task.initial_params(0)], clipping_norm=1.0)
    said = "begin at another number, as in .* subtract it in the data set, not in the loss"
    with pytest.raises(InvalidValue, match=said) as refusal:
        gradient(task.initial_params(0), torch.rand(len(targets), 6), targets)
    assert is_tellable(refusal.value)
    assert "BatchNorm" not in str(refusal.value)
    assert "replace_batch_norm" not in str(refusal.value)


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


ROWS, COUNTS = torch.zeros(2, 6), torch.zeros(2, 6).long()


def reason(outputs_of, slopes=None, features=ROWS):
    """Return why a model of these outputs, whose gradients are ``slopes``, learns nothing."""
    slopes = {"weight": torch.ones(2)} if slopes is None else slopes
    examples = _usual_examples(features, torch.zeros(2).long())
    return why_nothing_learned("M", outputs_of, examples, [slopes] * len(examples))


def count_of(x):
    return len(x[0] if isinstance(x, tuple) else x)


def same(*row):
    """Return outputs with this row for every example."""
    return lambda x: torch.tensor(row).expand(count_of(x), -1)


def sums(x):
    """Return a number of each example by itself."""
    return (x[0] if isinstance(x, tuple) else x).sum(1, keepdim=True)


def of_company(x):
    """Return a number that depends on nothing but how many examples there are."""
    return torch.full((count_of(x), 1), float(count_of(x)))


def together(**outputs):
    return lambda x: {name: output(x) for name, output in outputs.items()}


CONSTANT = {
    "one number": same(1.0),
    "a zero beside it": same(0.0, 1.0),
    "outputs of zeros beside it": together(zeros=same(0.0), ones=same(1.0)),
    "what is no output of an example": together(
        ones=same(1.0),
        places=lambda x: torch.arange(count_of(x)),
        mean=lambda x: sums(x).mean(),
        summary=lambda x: torch.ones(1, 2),
    ),
    "zeros that change with the batch": together(zeros=same(0.0), company=of_company),
}
ALLOWED = {
    "an output beside it that tells": together(ones=same(1.0), sums=sums),
    "zeros": same(0.0),
    "a model that refuses the trial": lambda x: 1 / 0,
}


@pytest.mark.parametrize("which", CONSTANT)
def test_outputs_without_information_are_refused_whatever_accompanies_them(which):
    assert "equal outputs" in reason(CONSTANT[which])


@pytest.mark.parametrize("which", ALLOWED)
def test_outputs_that_may_say_something_are_allowed(which):
    assert reason(ALLOWED[which]) is None


@pytest.mark.parametrize("features", [COUNTS, (ROWS, COUNTS)], ids=["integers", "both"])
def test_integers_may_be_equal_where_the_model_looks(features):
    assert reason(same(1.0), features=features) is None
    assert "equal outputs" in reason(
        together(ones=same(1.0), company=of_company), features=features
    )


@pytest.mark.parametrize("finite", ["a", "b"])
def test_one_gradient_that_is_not_finite_is_enough(finite):
    slopes = {name: torch.ones(2) * (1.0 if name == finite else torch.nan) for name in "ab"}
    assert "a gradient that is not finite" in reason(sums, slopes)


def test_one_number_of_a_gradient_is_enough():
    assert reason(sums, {"a": torch.zeros(2), "b": torch.tensor([0.0, 1.0])}) is None


def test_features_of_another_type_are_refused_by_name():
    task = task_of(Network)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, [*params], clipping_norm=1.0)
    with pytest.raises(InvalidValue, match="float64") as error:
        gradient(params, ROWS.double(), torch.zeros(2).long())
    assert is_tellable(error.value)


LINEAR = partial(nn.Linear, 6, 3)


def normalised():
    """Return a model in which an example of equal numbers has no gradient."""
    return nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3, bias=False))


def over_pairs(outputs, targets):
    """Return the mean distance of two examples."""
    return torch.cdist(outputs, outputs).mean()


def contrastive(outputs, targets):
    same = targets.unsqueeze(1) == targets
    return -(torch.log_softmax(outputs @ outputs.T, 1) * same).sum(1).mean()


def of_labels(count, loss, first=0, build=LINEAR):
    """Train for nothing on labels from ``first``."""
    task = Task(model=build, data=task_of(build).data, loss=loss, device="cpu")
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
@pytest.mark.parametrize("build", grid([LINEAR, normalised], lambda build: build is normalised))
def test_a_loss_that_ignores_a_class_is_allowed(loss, build):
    assert all(part.any() for part in of_labels(9, loss, build=build).values())
