"""DP-SGD on trees equals a loop over packed records, and an odd leaf moves no other record."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.privacy import SeededNoise
from flower_ext.training import (
    ClippedGradient,
    DpSgdTraining,
    Job,
    StepNoise,
    train,
    train_dp_sgd,
)
from tests.support.grids import grid
from tests.support.jobs import SGD, problem
from tests.support.reference.clipped_gradient import by_loop
from tests.support.trees import (
    FORMS,
    PACKED,
    PARTED,
    Sentences,
    as_mapping,
    as_tuple,
    packed,
)


class Branching(Sentences):
    """A model that vmap cannot follow."""

    def forward(self, tokens, mask):
        return super().forward(tokens, mask if mask.sum() > -1 else -mask)


WAYS = {
    **FORMS,
    "in a loop, tuple": (problem(Branching), as_tuple),
    "in a loop, mapping": (problem(Branching), as_mapping),
}


def gradient(task, params, data, clipping_norm=0.4):
    clipped = ClippedGradient(task, list(params), clipping_norm=clipping_norm)
    return clipped(params, data.features, data.targets), clipped


@pytest.mark.parametrize(
    ("which", "count", "clipping_norm"),
    grid(
        product(WAYS, [0, 1, 7, 70], [0.3, 1e6]),
        lambda case: (
            case[1:] == (70, 0.3)
            or (case[0] in ("tuple", "in a loop, mapping") and case[1:] in ((0, 0.3), (7, 1e6)))
        ),
    ),
)
def test_clipped_gradients_of_trees_match_a_loop_over_packed_records(which, count, clipping_norm):
    task, form = WAYS[which]
    params, data = PACKED.initial_params(1), packed(count)
    ours, how = gradient(task, params, form(data), clipping_norm)
    theirs = by_loop(PACKED, params, data, clipping_norm, list(params))
    for name in params:
        assert ours[name].any() == (count > 0)
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5 * (1 + count))
    if count:
        assert (how.way == "in one pass") == (which in ("tuple", "mapping"))
        if how.way != "in one pass":
            assert (how.way == "by vmap") == (not which.startswith("in a loop"))


class Weighed(nn.Module):
    """A model of two number tensors, either of which may be odd."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x, weight):
        return self.head(torch.tanh(self.layer(x)) * weight)


class WeighedInALoop(Weighed):
    def forward(self, x, weight):
        return super().forward(x, weight if weight.max() != 7 else -weight)


def weighed(outputs, targets):
    """A loss of targets with two leaves."""
    losses = cross_entropy(outputs, targets["label"], reduction="none")
    return (losses * targets["share"]).mean()


@pytest.mark.parametrize(
    ("build", "leaf"),
    grid(
        product([Weighed, WeighedInALoop], ["x", "weight", "share"]),
        lambda case: (case[0] is Weighed) == (case[1] == "x"),
    ),
)
def test_a_record_with_an_odd_leaf_counts_as_zero(build, leaf, caplog):
    """A leaf that is not a number is compared with a loss that raises, which keeps the shapes."""
    draw = torch.Generator().manual_seed(2)
    features = {"x": torch.randn(70, 4, generator=draw), "weight": torch.ones(70, 1)}
    targets = {"label": torch.randint(3, (70,), generator=draw), "share": torch.rand(70)}
    task = problem(build, weighed)
    params = task.initial_params(0)

    def found(value=None, label=None):
        changed = {name: part.clone() for name, part in features.items()}
        aims = {name: part.clone() for name, part in targets.items()}
        if value is not None:
            ({**changed, **aims}[leaf])[3] = value
        if label is not None:
            aims["label"][3] = label
        return gradient(task, params, Examples(changed, aims))

    raises, how = found(label=7)
    assert (how.way == "in one pass") == (build is Weighed)
    assert how.way != "by vmap"
    ours, _ = found(math.nan)
    infinite, _ = found(math.inf)
    for name in params:
        assert ours[name].any()
        assert torch.equal(ours[name], raises[name])
        assert torch.isfinite(infinite[name]).all()
    without = [row for row in range(70) if row != 3]
    rest = Examples(features, targets).subset(without)
    expected, _ = gradient(task, params, rest)
    for name in params:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-4)
    (messages,) = [r for r in caplog.records if "counts as zero" in r.message]
    assert messages.levelname == "WARNING"


class LookedUp(Weighed):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, x, weight):
        return super().forward(self.embedding(x), weight)


def test_a_word_out_of_range_counts_as_zero():
    draw = torch.Generator().manual_seed(2)
    words, weight = torch.randint(9, (70,), generator=draw), torch.rand(70, 5, generator=draw)
    labels = torch.randint(3, (70,), generator=draw)
    task = problem(LookedUp)
    params = task.initial_params(0)

    def found(word=None, label=None):
        changed, aims = words.clone(), labels.clone()
        changed[3] = changed[3] if word is None else word
        aims[3] = aims[3] if label is None else label
        summed, how = gradient(task, params, Examples((changed, weight), aims))
        assert how.way == "in one pass"
        return summed

    ours, theirs, every = found(word=99), found(label=7), found()
    for name in params:
        assert torch.equal(ours[name], theirs[name])
        assert not torch.equal(ours[name], every[name])


@pytest.mark.parametrize("which", WAYS)
def test_one_tree_moves_the_sum_by_at_most_the_clipping_norm(which):
    task, form = WAYS[which]
    params, data = PACKED.initial_params(1), packed(20)
    every, _ = gradient(task, params, form(data), 0.05)
    for row in (0, 11):
        others = data.subset([other for other in range(20) if other != row])
        less, _ = gradient(task, params, form(others), 0.05)
        moved = sum(float((every[name] - less[name]).square().sum()) for name in params)
        assert math.sqrt(moved) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize(
    "which", grid(WAYS, lambda which: which not in ("mapping", "in a loop, tuple"))
)
def test_dp_sgd_and_clipped_steps_on_trees_are_those_on_packed_records(which):
    task, form = WAYS[which]
    start, data = PACKED.initial_params(1), packed(30)
    training = DpSgdTraining(
        steps=4,
        sampling_rate=0.5,
        batch_size=15,
        learning_rate=0.5,
        clipping_norm=0.4,
        noise_multiplier=0.1,
    )

    def private(task, examples):
        draws, noise = np.random.default_rng(3), SeededNoise(4)
        return train_dp_sgd(task, start, examples, training, sampling=draws, noise=noise)

    def stepped(task, examples):
        job = Job(
            params=start,
            examples=examples,
            training=SGD,
            generator=torch.Generator().manual_seed(5),
            noise=StepNoise(clipping_norm=0.4, stddev=0.01, source=SeededNoise(6)),
        )
        return train(task, job)

    for trained in (private, stepped):
        ours, theirs = trained(task, form(data)), trained(PACKED, data)
        for name in start:
            assert not torch.equal(ours[name], start[name])
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_targets_of_several_tensors_go_with_features_of_one():
    data = packed(40)
    aims = {"label": data.targets, "share": torch.rand(40)}
    task = problem(PACKED.model, weighed)
    params = PACKED.initial_params(1)
    ours, _ = gradient(task, params, replace(data, targets=aims), 0.3)
    summed = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for row in range(40):
        share = float(aims["share"][row])

        def scaled(outputs, targets, share=share):
            return cross_entropy(outputs, targets) * share

        expected_gradient = by_loop(
            problem(PACKED.model, scaled), params, data.subset([row]), 0.3, list(params)
        )
        for name, part in expected_gradient.items():
            summed[name] += part
    for name in params:
        torch.testing.assert_close(ours[name], summed[name], rtol=1e-4, atol=1e-4)


def test_a_model_that_writes_into_a_tree_leaves_it_unchanged():
    class Overwriting(Sentences):
        def forward(self, tokens, mask):
            return super().forward(tokens.remainder_(7), mask.mul_(0))

    data = as_mapping(packed(9))
    before = {name: leaf.clone() for name, leaf in data.features.items()}
    gradient(problem(Overwriting), PARTED.initial_params(1), data)
    torch.testing.assert_close(data.features, before, rtol=0, atol=0)


@pytest.mark.parametrize("build", [Weighed, WeighedInALoop])
def test_features_of_another_type_than_the_model_are_refused_with_a_remedy(build):
    """This holds for every record; without the error, all would silently count as zero."""
    features = {"x": torch.zeros(4, 4).double(), "weight": torch.ones(4, 1)}
    task = problem(build)
    words = r"features\['x'\] of type torch.float64: expected torch.float32.*features.to\("
    with pytest.raises(ValueError, match=words):
        gradient(task, task.initial_params(0), Examples(features, torch.zeros(4).long()))
