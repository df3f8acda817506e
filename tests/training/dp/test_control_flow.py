"""A model that branches on values trains example by example, unless all passes branch alike."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training import ClippedGradient
from tests.support.grids import grid
from tests.support.jobs import problem
from tests.support.reference.clipped_gradient import by_loop
from tests.support.trees import LENGTH, Sentences


class Reading(nn.Module):
    """One layer, and a way to read values by which all examples are scaled."""

    def __init__(self, read):
        super().__init__()
        self.read, self.layer = read, nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return self.layer(x) * (100.0 if self.read(self, x) else 1.0)


def keeps(model, x):
    """Leave a trace in the model that later passes read, too small for a trial to notice."""
    model.seen.mul_(0.5).add_(x.detach().mean(dim=0), alpha=1e-7)
    return False


def keeps_by_keyword(model, x):
    """Do the same by an operation that writes into its keyword argument ``out``."""
    torch.add(model.seen * 0.5, x.detach().mean(dim=0), alpha=1e-7, out=model.seen)
    return False


READERS = {
    "a truth": lambda model, x: bool((x > 9).any()),
    "a condition": lambda model, x: [False, True][x.max() > 9],
    "a number": lambda model, x: x.max().item() > 9,
    "an integer": lambda model, x: int(x.max()) > 9,
    "a list": lambda model, x: max(x.detach().flatten().tolist()) > 9,
    "an array": lambda model, x: x.detach().numpy().max() > 9,
    "an array by protocol": lambda model, x: np.asarray(x.detach()).max() > 9,
    "a text": lambda model, x: "300" in str(x),
    "places": lambda model, x: len((x > 9).nonzero()) > 0,
    "a selection": lambda model, x: len(x[x > 9]) > 0,
    "another selection": lambda model, x: x.masked_select(x > 9).numel() > 0,
    "different values": lambda model, x: len(torch.unique(x > 9)) > 1,
    "a comparison": lambda model, x: not torch.equal(x, x.clamp(max=9)),
    "memory": lambda model, x: x.detach().untyped_storage().tolist()[3] == 67,
    "what all say of each other": lambda model, x: bool((x < x.mean(dim=0) - 9).all()),
    "what others say": lambda model, x: bool((x.flip(0) < -9).all()),
    "the first rows": lambda model, x: bool((x[:2] < -9).all()),
    "a draw": lambda model, x: bool(torch.rand(()) > 2),
    "what is kept": keeps,
    "what a keyword keeps": keeps_by_keyword,
}
SAME_ANSWER = {"what all say of each other", "what others say", "the first rows"}
"""Tests of whether all numbers of a tensor have a property; in one pass the answer is no."""


MIXERS = {
    "a condition": lambda x: torch.where((x > 9).any(), 100.0, 1.0),
    "a maximum": lambda x: 1 + torch.relu(x.max() - 9),
    "a minimum": lambda x: 1 + torch.relu(-9 - x.min()),
    "a share": lambda x: 1 + (x > 9).float().mean(),
    "what is missing": lambda x: torch.where(x.isnan().any(), 100.0, 1.0),
    "what is empty": lambda x: torch.where((x == 0).all(dim=1).any(), 100.0, 1.0),
    "a sum that may be no number": lambda x: 1 + 0 * x.sum(),
}
# The value of a record by which the others are mixed, if it is not a large one.
MIXED_BY = {
    "a minimum": -300.0,
    "what is missing": math.nan,
    "what is empty": 0.0,
    "a sum that may be no number": math.nan,
}


class Mixing(nn.Module):
    """One layer that scales all examples by one possible example, without a branch."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.layer = scale, nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) * self.scale(x)


@pytest.mark.parametrize(
    ("odd", "which"),
    grid(
        product([300.0, -300.0, math.nan, 0.0], MIXERS),
        {(MIXED_BY.get(which, 300.0), which) for which in MIXERS}.__contains__,
    ),
)
def test_an_odd_record_moves_no_other_in_a_model_that_scales_all(which, odd):
    loop_task = problem(lambda: Mixing(MIXERS[which]))
    params = loop_task.initial_params(0)
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
    beside = x.clone()
    beside[0] = odd
    gradient = ClippedGradient(loop_task, [*params], clipping_norm=0.1)
    usual, changed = (gradient(params, features, y) for features in (x, beside))
    moved = sum(float((changed[name] - usual[name]).square().sum()) for name in params) ** 0.5
    assert gradient.way != "in one pass"
    assert moved <= 0.2  # one gradient was removed, and another one added


@pytest.mark.parametrize("which", READERS)
def test_a_record_that_scales_others_moves_the_sum_within_its_bound(which):
    task = problem(lambda: Reading(READERS[which]))
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 4, generator=draw), torch.randint(3, (9,), generator=draw)
    x[0] = torch.tensor([300.0, -200.0, 100.0, 400.0])
    params = task.initial_params(0)
    gradient = ClippedGradient(task, ["layer.weight", "layer.bias"], clipping_norm=0.05)
    every = gradient(params, x, y)
    assert (gradient.way == "in one pass") == (which in SAME_ANSWER)
    less = gradient(params, x[1:], y[1:])
    moved = sum(float((every[name] - less[name]).square().sum()) for name in every)
    assert math.sqrt(moved) <= 0.05 * (1 + 1e-5)


class Masked(Sentences):
    """A model of words that branches if any word is hidden, which no trial shows."""

    def __init__(self, question):
        super().__init__()
        self.question = question
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, tokens, mask):
        if self.question(mask):
            return super().forward(tokens, torch.ones_like(mask)) * self.scale
        return super().forward(tokens, mask) * 1.0002


QUESTIONS = {
    "all": lambda mask: mask.all(),
    "all that are": lambda mask: (mask == 1).all(),
    "none that is not": lambda mask: not (mask < 1).any(),
    "a sum": lambda mask: mask.bool().sum() == mask.numel(),
    "a part": lambda mask: mask.view(len(mask), -1).bool()[:, :LENGTH].all(),
    "a part by numbers": lambda mask: mask.bool()[:, torch.arange(LENGTH)].all(),
}


def shared(outputs, targets):
    """A loss in which a record without a share has no gradient, but passes with the others."""
    return (cross_entropy(outputs, targets["label"], reduction="none") * targets["share"]).mean()


def sentences(padded, share=1.0):
    """Return masks that hide nothing except perhaps in one record, whose share is given."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (20, LENGTH), generator=draw)
    mask, labels = torch.ones_like(tokens), torch.randint(3, (20,), generator=draw)
    if padded:
        mask[3, -2:] = 0
    shares = torch.ones(20)
    shares[3] = share
    return Examples({"tokens": tokens, "mask": mask}, {"label": labels, "share": shares})


@pytest.mark.parametrize("question", grid(QUESTIONS, {"all", "a part by numbers"}.__contains__))
def test_a_record_that_hides_something_moves_no_other_by_a_bit(question):
    """The record counts as zero, because its gradient is not finite; the other records remain."""
    task = problem(lambda: Masked(QUESTIONS[question]), shared)
    params = task.initial_params(0)

    def found(data):
        gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
        summed = gradient(params, data.features, data.targets)
        assert gradient.way == "in one pass"
        return summed

    ours, theirs = found(sentences(True, math.nan)), found(sentences(False, math.nan))
    for name in params:
        assert ours[name].any()
        assert torch.equal(ours[name], theirs[name])


def test_with_decided_tests_each_example_is_separate_and_counted_once():
    task = problem(lambda: Masked(QUESTIONS["all"]), shared)
    params, data = task.initial_params(0), sentences(True)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
    ours = gradient(params, data.features, data.targets)
    packed = Examples(torch.stack([*data.features.values()], dim=1), data.targets["label"])

    class Packed(Masked):
        def forward(self, x):
            return super().forward(x[:, 0], x[:, 1])

    loop_task = problem(lambda: Packed(QUESTIONS["all"]))
    theirs = by_loop(loop_task, params, packed, 0.3, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)


def test_a_model_may_branch_on_its_buffers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            places = torch.arange(len(x))
            return self.layer(x)[places] * (self.scale.item() if self.scale + 1 > 2 else 1.0)

    task = problem(Scaled)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
    gradient(params, torch.ones(5, 4), torch.zeros(5).long())
    assert gradient.way == "in one pass"


class Sharing(nn.Module):
    """Words, positions that are looked up once for all, and a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 4), nn.Embedding(LENGTH, 4)
        self.spare, self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(LENGTH).unsqueeze(0))
        self.spare(x)
        return self.head(torch.tanh(x).mean(dim=1))


@pytest.mark.parametrize("count", [1, 9])
def test_shared_positions_and_unused_layers_are_handled_in_one_pass(count):
    task = problem(Sharing)
    params = task.initial_params(0)
    draw = torch.Generator().manual_seed(2)
    data = Examples(
        torch.randint(11, (count, LENGTH), generator=draw),
        torch.randint(3, (count,), generator=draw),
    )
    gradient = ClippedGradient(task, list(params), clipping_norm=0.3)
    ours = gradient(params, data.features, data.targets)
    assert gradient.way == "in one pass"
    theirs = by_loop(task, params, data, 0.3, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert not ours["idle.weight"].any()
