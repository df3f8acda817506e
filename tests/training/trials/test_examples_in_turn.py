"""No record reaches another one through what a model keeps, nor by the company of its pass."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.training import ClippedGradient
from flower_ext.training.dp.passes import Passes, Way
from tests.support.grids import grid
from tests.support.jobs import problem
from tests.support.keeping import (
    HIDDEN,
    Attribute,
    Broken,
    ByAFunction,
    FirstInAClass,
    FirstOnly,
    FirstOutOfSight,
    Global,
    Hooked,
    InAnotherClass,
    Keeping,
    LargestToken,
    LateToken,
    Listed,
    Longest,
    OddOnly,
    OfAClass,
    OfTargets,
    OutOfSight,
    Written,
    at_a_kink,
    kinked,
)

NAMES = ["layer.weight", "layer.bias"]
BOUND = 0.05


REFUSED = {
    "a number": (Keeping, r"model\.kept"),
    "a tensor": (Attribute, r"model\.kept"),
    "a list": (Listed, r"model\.kept"),
    "a class": (OfAClass, r"OfAClass\.kept"),
    "a global": (Global, r"global KEPT"),
    "another class": (InAnotherClass, r"Shared\.largest"),
    "a function": (ByAFunction, r"global KEPT"),
    "a hook": (Hooked, r"box of model\.layer"),
    "something odd": (OddOnly, r"model\.kept"),
    "the first example": (FirstOnly, r"model\.kept"),
    "a weight": (Written, r"model\.layer\.weight"),
}


def records(count=130):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=draw)
    x[0] = torch.tensor([300.0, -200.0, 100.0, 400.0])
    return x, torch.randint(3, (count,), generator=draw)


@pytest.mark.parametrize("which", REFUSED)
def test_a_model_that_keeps_something_is_refused_with_the_place(which):
    build, place = REFUSED[which]
    task = problem(build)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    with pytest.raises(ValueError, match=f"{place}.*changes.*expected no change"):
        gradient(task.initial_params(0), *records())


@pytest.mark.parametrize("build", [OutOfSight, Broken])
def test_a_model_that_keeps_something_out_of_sight_is_refused(build, monkeypatch):
    monkeypatch.setattr(HIDDEN, "kept", 0.0, raising=False)
    task = problem(build)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    with pytest.raises(ValueError, match="a variable elsewhere"):
        gradient(task.initial_params(0), *records())


def test_a_loss_that_keeps_something_is_refused():
    seen = []

    def loss(outputs, targets):
        seen.append(outputs.detach())
        return cross_entropy(outputs, targets) * len(seen)

    task = problem(lambda: nn.Linear(4, 3), loss)
    gradient = ClippedGradient(task, ["weight"], clipping_norm=BOUND)
    with pytest.raises(ValueError, match=r"seen of loss"):
        gradient(task.initial_params(0), *records())


class FirstForHugeOnes(nn.Module):
    """Keeps a number of its first example, which only a huge one would show in a gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.first = nn.Linear(4, 3), None

    def forward(self, x):
        if self.first is None:
            self.first = float(x.detach().sum())
        return self.layer(x) * (100.0 if self.first > 1e9 else 1.0)


def test_state_that_a_first_example_leaves_is_refused():
    task = problem(FirstForHugeOnes)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    with pytest.raises(ValueError, match=r"model\.first changes"):
        gradient(task.initial_params(0), *records())


WORDS = torch.randint(2, 1000, (9, 5), generator=torch.Generator().manual_seed(4))
BITS = torch.zeros(9, 4)
BITS[0] = 1
REFUSED_TOO = {
    "the largest of some words": (LargestToken, WORDS, r"model\.kept"),
    "a rare word": (LateToken, WORDS, r"model\.kept"),
    "the longest mask": (Longest, BITS.bool(), r"model\.kept"),
    "the longest mask of integers": (Longest, BITS.long(), r"model\.kept"),
    "the first example in a class": (FirstInAClass, torch.randn(9, 4), r"FirstInAClass\.kept"),
    "the first example in a cache": (FirstOutOfSight, torch.randn(9, 4), "a variable elsewhere"),
}


@pytest.mark.parametrize("which", REFUSED_TOO)
def test_state_that_some_examples_leave_is_detected_in_any_order(which):
    build, features, place = REFUSED_TOO[which]
    task = problem(build)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    with pytest.raises(ValueError, match=f"{place}.*changes.*expected no change"):
        gradient(task.initial_params(0), features, torch.arange(9) % 3)


KEEPERS = {
    "a mean": lambda kept, new: 0.5 * kept + 0.5 * new,
    "the largest": max,
    "a rare one": lambda kept, new: kept + (new == 2),
}


@pytest.mark.parametrize(
    "targets", [torch.randn(9, 1), torch.arange(9) % 3], ids=["numbers", "classes"]
)
@pytest.mark.parametrize("which", KEEPERS)
def test_a_loss_that_keeps_something_of_targets_is_refused(which, targets):
    task = problem(lambda: nn.Linear(4, 1), OfTargets(KEEPERS[which]))
    gradient = ClippedGradient(task, ["weight"], clipping_norm=BOUND)
    if which == "a rare one" and targets.is_floating_point():
        targets = targets.long()
    with pytest.raises(ValueError, match=r"loss\.kept.*changes"):
        gradient(task.initial_params(0), torch.randn(9, 4), targets)


def ending(outputs, targets):
    if bool((targets == 7).any()):
        raise SystemExit
    return cross_entropy(outputs, targets)


def without_gradients(outputs, targets):
    if bool((targets == 7).any()):
        torch.set_grad_enabled(False)
        raise ValueError
    return cross_entropy(outputs, targets)


@pytest.mark.parametrize("loss", [ending, without_gradients])
def test_a_record_that_exits_or_disables_gradients_counts_as_zero(loss):
    task = problem(lambda: nn.Linear(4, 3), loss)
    params, (x, y) = task.initial_params(0), records(9)
    y[0] = 7
    gradient = ClippedGradient(task, ["weight"], clipping_norm=BOUND)
    every, less = gradient(params, x, y), gradient(params, x[1:], y[1:])
    assert torch.is_grad_enabled()
    assert every["weight"].any()
    assert torch.equal(every["weight"], less["weight"])


class Prepared(nn.Module):
    """A table that the first pass makes, the same for every example."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 3), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        return self.layer(x + self.table)


class Buffered(Keeping):
    """A buffer that is in no state of the model, assigned or written in place."""

    in_place = False

    def begin(self):
        self.register_buffer("kept", torch.zeros(()), persistent=False)

    def keep(self, value):
        if self.in_place:
            self.kept.mul_(0.5).add_(value)
        else:
            self.kept = 0.5 * self.kept + value


class InPlace(Buffered):
    in_place = True


class Counted(Buffered):
    def keep(self, value):
        self.kept.add_(1.0)


def moved(gradient, params, x, y):
    """Return by how many clipping norms the first record moves the sum."""
    every, less = gradient(params, x, y), gradient(params, x[1:], y[1:])
    return math.sqrt(sum(float((every[n] - less[n]).square().sum()) for n in every)) / BOUND


@pytest.mark.parametrize("build", [Prepared, Buffered, InPlace, Counted])
def test_each_record_finds_buffers_as_they_were_sent(build):
    task = problem(build)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    assert moved(gradient, task.initial_params(0), *records()) <= 1 + 1e-6


def largest_change(gradient, params, beside, *, planted=False):
    """Return by how much the first of up to three records at a kink moves the sum.

    Records without a gradient lie beside them. With a planted fault a pass is as wide as its batch.
    """
    x = at_a_kink(params, 90)
    silent, ignored = torch.zeros(beside, 8), torch.full((beside,), -100)

    def summed(records):
        if planted:
            gradient.passes.planted = beside + len(records)
        targets = torch.zeros(len(records)).long()
        return gradient(params, torch.cat([records, silent]), torch.cat([targets, ignored]))

    changes = []
    for some in x.split(3):
        with_it, without = summed(some), summed(some[1:])
        changes.append(
            math.sqrt(sum(float((with_it[n] - without[n]).square().sum()) for n in params))
        )
    return max(changes)


@pytest.mark.parametrize("by_vmap", [False, True])
@pytest.mark.parametrize("beside", grid([0, 2, 7, 20], (0, 7).__contains__))
def test_a_joining_record_moves_the_sum_by_its_gradient(by_vmap, beside):
    gradient, params = kinked(by_vmap)
    assert largest_change(gradient, params, beside) <= 1 + 1e-6
    assert (gradient.way == "in one pass") is not by_vmap


def test_passes_as_wide_as_their_batch_would_be_found(monkeypatch):
    """At least where libraries round otherwise for seven rows than for eight."""
    gradient, params = kinked(False)
    gradient(params, torch.zeros(1, 8), torch.zeros(1).long())  # trials have the usual width
    layer, draw = nn.Linear(8, 8), torch.Generator().manual_seed(0)
    x = torch.randn(8, 8, generator=draw)
    if torch.equal(layer(x)[:7], layer(x[:7])):
        pytest.skip("rows round alike in every number here")
    monkeypatch.setattr(Passes, "width", lambda self, way: self.planted)
    assert max(largest_change(gradient, params, n, planted=True) for n in (0, 1, 5)) > 1.01


def test_examples_whose_bits_depend_on_other_examples_pass_one_by_one():
    class Rounding(nn.Module):
        """Adds the rounding of a sum that depends on the number and the place of rows."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            places = torch.arange(len(x)).unsqueeze(1)
            return self.layer(x) * (1 + 2e-7 * places)

    task = problem(Rounding)
    gradient = ClippedGradient(task, NAMES, clipping_norm=BOUND)
    gradient(task.initial_params(0), *records())
    assert gradient.way != "in one pass"
    assert gradient.way == "by vmap"  # there each example is the first of its own


@pytest.mark.parametrize(
    ("batch_size", "written", "width"),
    [(1, True, 4), (16, True, 8), (1e9, True, 64), (64, False, 88), (1024, False, 560)],
)
def test_the_width_of_a_pass_depends_on_public_numbers_alone(batch_size, written, width):
    batches = Passes(problem(lambda: nn.Linear(4, 3)), ["weight"], batch_size)
    way = Way.BY_VMAP if written else Way.IN_ONE_PASS
    assert batches.width(way) == width
