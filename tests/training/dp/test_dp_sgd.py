"""DP-SGD: the influence of one record is bounded, and the result equals the plainest loop."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples
from flower_ext.privacy import SeededNoise
from flower_ext.training import (
    ClippedGradient,
    DpSgdTraining,
    Task,
    train_dp_sgd,
)
from flower_ext.training.dp import dp_sgd
from flower_ext.training.single_examples import layers
from tests.support.apps import ULDP_FL
from tests.support.grids import grid
from tests.support.jobs import problem
from tests.support.reference.clipped_gradient import by_loop

cox_loss = ULDP_FL.module("survival").cox_loss


def dense():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 2, dilation=2, bias=False),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )


class Sequences(nn.Module):
    """Linear layers over every step of a sequence; a norm over two dimensions."""

    def __init__(self):
        super().__init__()
        self.steps = nn.Linear(4, 5)
        self.norm = nn.LayerNorm((6, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.steps(x))).mean(dim=1))


class Short(nn.Module):
    """A wide layer over two steps."""

    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.Linear(40, 50), nn.Linear(50, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.steps(x)).mean(dim=1))


def wide():
    return nn.Sequential(nn.Conv2d(4, 33, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(825, 3))


def deep():
    return nn.Sequential(
        nn.Conv2d(16, 48, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3)
    )


def in_one_dimension():
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding="same", dilation=2, bias=False),
        nn.InstanceNorm1d(6, affine=True),
        nn.Tanh(),
        nn.Conv1d(6, 2, 2, stride=2, groups=2),
        nn.RMSNorm(4),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def in_three_dimensions():
    return nn.Sequential(
        nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=1, bias=False),
        nn.InstanceNorm3d(4, affine=True),
        nn.Tanh(),
        nn.Conv3d(4, 2, (2, 1, 2), dilation=2),
        nn.Flatten(),
        nn.Linear(54, 3),
    )


class Tied(nn.Module):
    """Parameters outside known layers, whose single gradients come from vmap."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x * self.scale)


MODELS = {
    "dense": (dense, (4,)),
    "convolutional": (convolutional, (4, 8, 8)),
    "wide convolutional": (wide, (4, 5, 5)),
    "deep convolutional": (deep, (16, 3, 3)),
    "sequences": (Sequences, (6, 4)),
    "short sequences": (Short, (2, 40)),
    "in one dimension": (in_one_dimension, (4, 8)),
    "in three dimensions": (in_three_dimensions, (2, 4, 4, 4)),
    "by vmap": (Tied, (4,)),
}


def records(shape, count, scale=1.0):
    generator = torch.Generator().manual_seed(count)
    features = scale * torch.randn(count, *shape, generator=generator)
    return Examples(features=features, targets=torch.randint(3, (count,), generator=generator))


@pytest.mark.parametrize(
    ("which", "count", "clipping_norm"),
    grid(
        product(MODELS, [1, 7, 100], [0.3, 1e6]),
        # 100 records need several passes.
        lambda case: (
            case[1:] == (100, 0.3)
            or case in {("dense", 1, 0.3), ("dense", 7, 1e6), ("by vmap", 7, 1e6)}
        ),
    ),
)
def test_the_sum_of_clipped_gradients_is_that_of_a_loop_over_records(which, count, clipping_norm):
    model, shape = MODELS[which]
    task, data = problem(model), records(shape, count)
    params = task.initial_params(1)
    gradient = ClippedGradient(task, list(params), clipping_norm=clipping_norm)
    ours = gradient(params, data.features, data.targets)
    assert (gradient.way == "in one pass") == (which != "by vmap")
    theirs = by_loop(task, params, data, clipping_norm, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=3e-5 * count)


FORMS = {
    "wide convolutional": (layers.GradientRows, 1),
    "deep convolutional": (layers.Products, 1),
    "sequences": (layers.GradientRows, 1),
    "short sequences": (layers.Products, 1),
    "dense": (layers.Products, 2),
}


@pytest.mark.parametrize("which", FORMS)
def test_gradients_are_written_down_only_where_that_takes_less(which):
    """The sizes make the tests above use each form."""
    model, shape = MODELS[which]
    task, data = problem(model), records(shape, 5)
    params = task.initial_params(1)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0)
    gradient(params, data.features, data.targets)
    parts = gradient.passes.in_one_pass(data.features, data.targets, task.loss)
    kind, least = FORMS[which]
    weights = [p for n, p in parts.items() if n.endswith("weight")]
    assert sum(type(p) is kind for p in weights) >= least
    assert all(type(p) is layers.GradientRows for n, p in parts.items() if n.endswith("bias"))


def test_patches_of_some_images_at_a_time_change_nothing(monkeypatch):
    model, shape = MODELS["wide convolutional"]
    task, data = problem(model), records(shape, 7)
    params = task.initial_params(1)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0)
    at_once = gradient(params, data.features, data.targets)
    monkeypatch.setattr(layers, "_PATCHES", 2 * 25 * 36)
    in_parts = gradient(params, data.features, data.targets)
    for name, expected in at_once.items():
        torch.testing.assert_close(in_parts[name], expected)


def test_a_frozen_part_counts_in_no_norm():
    task, data = problem(dense), records((4,), 9)
    params = task.initial_params(1)
    ours = ClippedGradient(task, ["2.weight"], clipping_norm=0.1)(
        params, data.features, data.targets
    )
    theirs = by_loop(task, params, data, 0.1, ["2.weight"])
    torch.testing.assert_close(ours["2.weight"], theirs["2.weight"], rtol=1e-4, atol=1e-5)
    assert list(ours) == ["2.weight"]


@pytest.mark.parametrize(
    ("which", "scale"),
    grid(product(MODELS, [1e-6, 1.0, 1e4]), lambda case: case[0] == "dense" or case[1] == 1),
)
def test_one_record_moves_the_sum_by_at_most_the_clipping_norm(which, scale):
    model, shape = MODELS[which]
    task, data = problem(model), records(shape, 20, scale)
    params = task.initial_params(2)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
    for row in range(20):
        one = gradient(params, data.features[row : row + 1], data.targets[row : row + 1])
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
        assert norm <= 0.5


def settings(**changes):
    usual = {
        "steps": 3,
        "sampling_rate": 0.5,
        "batch_size": 10,
        "learning_rate": 0.2,
        "clipping_norm": 0.7,
        "noise_multiplier": 1e-6,
    }
    return DpSgdTraining(**(usual | changes))


def test_with_hardly_any_noise_or_clipping_it_is_gradient_descent():
    task, data = problem(dense), records((4,), 12)
    start = task.initial_params(3)
    training = settings(sampling_rate=1.0, batch_size=12, clipping_norm=10.0, steps=4)
    ours = train_dp_sgd(
        task, start, data, training, sampling=np.random.default_rng(0), noise=SeededNoise(1, "n")
    )
    model = dense()
    model.load_state_dict(start)
    for _ in range(4):
        model.zero_grad()
        cross_entropy(model(data.features), data.targets).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_steps_noise_is_multiplier_times_norm_even_without_records(
    steps,
):
    wide = Task(
        model=lambda: nn.Linear(200, 100), data=lambda i: ClientData(None, None), device="cpu"
    )
    start = wide.initial_params(0)
    nobody = Examples(features=torch.zeros(0, 200), targets=torch.zeros(0, dtype=torch.long))
    training = settings(steps=steps, noise_multiplier=3.0, learning_rate=1.0, batch_size=10)
    moved = train_dp_sgd(
        wide,
        start,
        nobody,
        training,
        sampling=np.random.default_rng(0),
        noise=SeededNoise(2, "n"),
    )
    noise = (moved["weight"] - start["weight"]) * 10 / math.sqrt(steps)
    assert float(noise.std()) == pytest.approx(3.0 * 0.7, rel=0.03)
    assert abs(float(noise.mean())) < 0.06


def test_records_are_drawn_independently_at_the_sampling_rate(monkeypatch):
    drawn = []

    def counted(self, params, features, targets):
        drawn.append(len(features))
        return {name: torch.zeros_like(params[name]) for name in self.names}

    monkeypatch.setattr(dp_sgd.ClippedGradient, "__call__", counted)
    task, data = problem(dense), records((4,), 400)
    train_dp_sgd(
        task,
        task.initial_params(0),
        data,
        settings(steps=500, sampling_rate=0.05),
        sampling=np.random.default_rng(0),
        noise=SeededNoise(1, "n"),
    )
    assert np.mean(drawn) == pytest.approx(20, abs=0.8)
    assert np.var(drawn) == pytest.approx(19, rel=0.25)


@pytest.mark.parametrize(
    ("build", "loss", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), cross_entropy, "GroupNorm"),
        (lambda: nn.Linear(4, 1), cox_loss, "compares examples"),
    ],
)
def test_what_has_no_gradient_of_single_examples_is_refused(build, loss, message):
    task = problem(build, loss)
    with pytest.raises(ValueError, match=message):
        ClippedGradient(task, list(dict(build().named_parameters())), clipping_norm=1.0)


class Twice(nn.Module):
    """A layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Faint(Twice):
    """The same with gradients as small as the rounding of others."""

    def forward(self, x):
        return 1e-5 * super().forward(x)


class Both(nn.Module):
    """A layer whose weight is also used outside it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x @ self.layer.weight.T


class Patches(nn.Module):
    """A layer that receives parts of examples as rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x.reshape(-1, 2)).view(len(x), 2, 3).mean(dim=1)


class TimeFirst(nn.Module):
    """A layer whose first dimension is time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).mean(dim=0)


class Centred(nn.Module):
    """A model that mixes examples before its first layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x - 0.5 * x.mean(dim=0))


class Pooled(nn.Module):
    """A layer whose only row is made of all examples."""

    def __init__(self):
        super().__init__()
        self.layer, self.beside = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + self.beside(x.mean(dim=0, keepdim=True))


def noisy():
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def in_place():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


@pytest.mark.parametrize("shape", [(5, 4), (3, 4)], ids=["other times", "as many times"])
@pytest.mark.parametrize(
    "build", [Twice, Faint, Both, Patches, TimeFirst, Centred, Pooled, in_place]
)
def test_an_example_is_clipped_as_a_whole_whatever_its_rows_do(build, shape):
    shape = (3, shape[0], 4) if build is TimeFirst else shape
    data = Examples(
        features=torch.randn(shape, generator=torch.Generator().manual_seed(1)),
        targets=torch.arange(shape[0]) % 3,
    )
    if build is TimeFirst:
        data = Examples(features=data.features, targets=torch.arange(3))
    task = problem(build)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.1)
    ours = gradient(params, data.features, data.targets)
    assert (gradient.way == "in one pass") == (build is in_place)
    theirs = by_loop(task, params, data, 0.1, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def under_zeros(body):
    """Return ``body`` under a head of zeros, as is common, so that no gradient reaches it yet."""

    class UnderZeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body(), nn.Linear(4, 3)
            nn.init.zeros_(self.head.weight)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    return UnderZeros


class ThreeTimes(nn.Module):
    """A layer that is used three times, with time as its first dimension."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).mean(dim=0)


@pytest.mark.parametrize(
    ("body", "shape", "in_one_pass"),
    [
        (lambda: nn.Linear(4, 4), (3, 4), True),
        (Twice, (3, 4), False),
        (ThreeTimes, (3, 3, 4), False),
    ],
    ids=["once", "twice", "time first"],
)
def test_a_layer_without_a_slope_at_first_is_classified_correctly(body, shape, in_one_pass):
    task = problem(under_zeros(body))
    start, draw = task.initial_params(0), torch.Generator().manual_seed(1)
    features, targets = torch.randn(shape, generator=draw), torch.arange(3)
    gradient = ClippedGradient(task, list(start), clipping_norm=0.1)
    gradient(start, features, targets)
    assert (gradient.way == "in one pass") == in_one_pass
    later = {name: p + 0.5 * torch.randn(p.shape, generator=draw) for name, p in start.items()}
    ours = gradient(later, features, targets)
    theirs = by_loop(task, later, Examples(features, targets), 0.1, list(later))
    for name in later:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


class Rescaled(nn.Module):
    """A model that treats large values as bytes, so that one record decides for a whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x / 255 if x.max() > 10 else x)


class TwiceForSome(Twice):
    """A layer that is used twice if a value asks for it."""

    def forward(self, x):
        y = self.layer(x)
        return self.layer(torch.tanh(y)) if x.max() > 10 else y


class Crowded(nn.Module):
    """A model that mixes examples only if there are many."""

    def __init__(self, most):
        super().__init__()
        self.most, self.layer = most, nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x - x.mean(dim=0) if len(x) > self.most else x)


def impatient(outputs, targets):
    """A loss that weights examples differently if one has a large output."""
    scale = 100.0 if outputs.abs().max() > 10 else 1.0
    return scale * cross_entropy(outputs, targets)


class Running(nn.Module):
    """A buffer that stores a trace of its inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.copy_(0.5 * (self.seen + x.detach().mean(dim=0)))
        return self.layer(x - self.seen)


ODD = {
    "a branch on values": (Rescaled, cross_entropy),
    "a second use under a condition": (TwiceForSome, cross_entropy),
    "mixing above 3": (partial(Crowded, 3), cross_entropy),
    "mixing above 17": (partial(Crowded, 17), cross_entropy),
    "mixing above 87": (partial(Crowded, 87), cross_entropy),
    "a loss that branches": (dense, impatient),
    "a buffer that remembers": (Running, cross_entropy),
}


@pytest.mark.parametrize("which", ODD)
def test_no_model_lets_a_record_move_the_sum_beyond_the_norm(which):
    build, loss = ODD[which]
    task, data = problem(build, loss), records((4,), 79)
    data.features[0] = torch.tensor([300.0, -200.0, 100.0, 400.0])
    params = task.initial_params(0)
    names = [name for name, _ in task.model().named_parameters()]
    gradient = ClippedGradient(task, names, clipping_norm=0.05)
    every = gradient(params, data.features, data.targets)
    assert gradient.way != "in one pass"
    less = gradient(params, data.features[1:], data.targets[1:])
    moved = sum(float((every[n] - less[n]).square().sum()) for n in gradient.names)
    assert math.sqrt(moved) <= 0.05 * (1 + 1e-5)
    theirs = by_loop(task, params, data, 0.05, gradient.names)
    for name in gradient.names:
        torch.testing.assert_close(every[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_no_batch_size_makes_a_record_count_beyond_the_clipping_norm():
    """A long sum in single precision rounds its last terms to multiples of 1/128 or 1/64."""
    task, count = problem(lambda: nn.Linear(1, 3)), 250_000
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0, batch_size=count)
    features, targets = torch.full((count, 1), 30.0), torch.full((count,), 2)
    every = gradient(params, features, targets)
    rest = gradient(params, features[1:], targets[1:])
    moved = sum(float((every[n] - rest[n]).square().sum()) for n in params)
    assert math.sqrt(moved) == pytest.approx(1.0, rel=2e-5)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_models_of_half_precision_are_refused_with_what_to_change(kind):
    """Their gradients would be rounded by far more than a margin covers."""
    task = problem(lambda: dense().to(kind))
    with pytest.raises(ValueError, match=r"0.weight.*expected float32.*model.float\(\)"):
        ClippedGradient(task, list(task.initial_params(0)), clipping_norm=1.0)
    base = dense().to(kind).requires_grad_(False)
    frozen = problem(lambda: nn.Sequential(base, nn.Identity(), nn.Linear(3, 3)))
    ClippedGradient(frozen, ["2.weight", "2.bias"], clipping_norm=1.0)


@pytest.mark.parametrize("which", [*MODELS, "in a loop"])
def test_a_record_whose_loss_raises_counts_as_zero_and_moves_no_other(which, caplog):
    """The comparison has a record without a finite gradient, which keeps the shapes."""
    model, shape = (Rescaled, (4,)) if which == "in a loop" else MODELS[which]
    task, data = problem(model), records(shape, 70)
    params = task.initial_params(0)

    def found(label, value):
        gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
        targets, features = data.targets.clone(), data.features.clone()
        targets[3], features[3] = label, value
        return gradient(params, features, targets)

    ours, theirs = found(7, data.features[3]), found(0, math.nan)
    for name in params:
        assert ours[name].any()
        assert torch.equal(ours[name], theirs[name])
    (messages,) = [r for r in caplog.records if "counts as zero" in r.message]
    assert messages.levelname == "WARNING"


def test_if_every_record_raises_the_sum_is_zero_and_logged(caplog):
    task, data = problem(dense), records((4,), 9)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
    summed = gradient(params, data.features, data.targets + 10)
    assert not any(part.any() for part in summed.values())
    assert [r.levelname for r in caplog.records if "every example" in r.message] == ["ERROR"]


class PerStep(nn.Module):
    """An output for every step of a sequence, with a mean loss over the steps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).transpose(1, 2)


@pytest.mark.parametrize("clipping_norm", [0.05, 1e6], ids=["clipped", "not clipped"])
def test_the_loss_of_an_example_with_several_targets_is_its_mean(clipping_norm):
    draw = torch.Generator().manual_seed(2)
    data = Examples(
        features=torch.randn(7, 6, 4, generator=draw),
        targets=torch.randint(3, (7, 6), generator=draw),
    )
    task = problem(PerStep)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=clipping_norm)
    ours = gradient(params, data.features, data.targets)
    theirs = by_loop(task, params, data, clipping_norm, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [dense, convolutional, Centred])
def test_a_model_is_left_without_hooks(build):
    task, data = problem(build), records((4, 8, 8) if build is convolutional else (4,), 5)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.1)
    gradient(params, data.features, data.targets)
    assert not any(module._forward_hooks for module in gradient.passes.model.modules())


class Overwriting(nn.Module):
    """A model that overwrites its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.mul_(2.0))


def test_a_model_that_overwrites_its_inputs_leaves_the_records_as_they_are():
    task, data = problem(Overwriting), records((4,), 9)
    params, before = task.initial_params(0), data.features.clone()
    gradient = ClippedGradient(task, list(params), clipping_norm=0.1)
    ours = gradient(params, data.features, data.targets)
    assert torch.equal(data.features, before)
    theirs = by_loop(task, params, data, 0.1, list(params))
    for name in params:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_dropout_does_not_hide_that_layers_tell_examples_apart():
    task, data = problem(noisy), records((4,), 9)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.1)
    gradient(params, data.features, data.targets)
    assert gradient.way == "in one pass"
    assert gradient.passes.model[1].training


@pytest.mark.parametrize(
    "loss",
    [
        partial(cross_entropy, weight=torch.tensor([1.0, 100.0, 0.01])),
        partial(cross_entropy, label_smoothing=0.1),
        partial(cross_entropy, reduction="sum"),
        cross_entropy,
    ],
    ids=["weighted classes", "smoothed", "a sum", "plain"],
)
@pytest.mark.parametrize("ignored", [(), (0, 1, 2)], ids=["all", "some without a label"])
def test_the_weight_of_a_record_does_not_depend_on_others(loss, ignored):
    task, data = problem(dense, loss), records((4,), 12)
    data.targets[list(ignored)] = -100
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
    every = gradient(params, data.features, data.targets)
    for row in range(12):
        rest = [other for other in range(12) if other != row]
        less = gradient(params, data.features[rest], data.targets[rest])
        moved = sum(float((every[n] - less[n]).double().square().sum()) for n in params)
        assert math.sqrt(moved) <= 0.5 * (1 + 1e-5)


OVERFLOWING = ["dense", "by vmap", "convolutional", "deep convolutional"]
NO_NUMBERS = ["in one dimension", "in three dimensions"]


@pytest.mark.parametrize(
    ("which", "value"),
    [*product(OVERFLOWING + NO_NUMBERS, [math.inf, math.nan])],
)
def test_a_record_without_a_finite_gradient_is_left_out_in_silence(which, value):
    model, shape = MODELS[which]
    task, data = problem(model), records(shape, 6)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
    without = gradient(params, data.features[1:], data.targets[1:])
    data.features[0] = value
    ours = gradient(params, data.features, data.targets)
    for name in params:
        assert torch.isfinite(ours[name]).all()
        torch.testing.assert_close(ours[name], without[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("which", "value"), [*product(OVERFLOWING, [1e25, 3e38])])
def test_a_record_whose_squares_overflow_moves_the_sum_by_the_clipping_norm(which, value):
    """Or by nothing, where its gradient overflows too."""
    model, shape = MODELS[which]
    task, data = problem(model), records(shape, 6)
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=0.5)
    without = gradient(params, data.features[1:], data.targets[1:])
    data.features[0] = value
    ours = gradient(params, data.features, data.targets)
    moved = math.sqrt(sum(float((ours[n] - without[n]).square().sum()) for n in params))
    assert moved <= 0.5 * (1 + 1e-6)
    if value == 1e25 and which in ("dense", "deep convolutional"):  # without a norm layer
        assert moved >= 0.5 * (1 - 1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.5),
        ("batch_size", 0),
        ("learning_rate", math.nan),
        ("clipping_norm", 0.0),
        ("noise_multiplier", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        settings(**{name: value})


def test_dp_sgd_ends_whatever_a_record_does_to_its_loss():
    task, data = problem(dense), records((4,), 12)
    data.targets[5] = -7
    train_dp_sgd(
        task,
        task.initial_params(0),
        data,
        settings(sampling_rate=1.0),
        sampling=np.random.default_rng(0),
        noise=SeededNoise(1, "n"),
    )
