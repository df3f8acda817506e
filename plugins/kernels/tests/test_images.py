"""Compiled training of convolutional networks equals that of `train`, number by number."""

from dataclasses import replace
from itertools import chain, cycle, product

import pytest
import torch
from torch import nn
from torch.nn import functional

from flower_ext.data import Examples
from flower_ext.training import Job, LocalTraining, train_groups
from flower_ext_kernels import network
from flower_ext_kernels.chain import recognise_chain
from flower_ext_kernels.layer_table import MAX_POOL, RELU
from tests.support.grids import grid
from tests.support.jobs import one_by_one, problem, same, train_many

SGD = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1)
WAYS = {
    "plain": SGD,
    "momentum": replace(SGD, momentum=0.8),
    "sam": replace(SGD, sam_radius=0.1),
    "all": replace(SGD, momentum=0.5, sam_radius=0.1, proximal_weight=0.4),
    "one by one": replace(SGD, batch_size=1),
    "one batch": replace(SGD, batch_size=50),
}


class Usual(nn.Module):
    """The network of many tutorials: a pooling layer used twice, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 17, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.dense, self.head = nn.Linear(17, 9), nn.Linear(9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(functional.relu(self.first(x)))
        x = self.pool(torch.relu(self.second(x)))
        return self.head(self.dense(x.view(-1, 17)).tanh())


class Functional(Usual):
    """The same network with functions in place of modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.first(x).relu(), 2)
        x = functional.relu(functional.max_pool2d(self.second(x), kernel_size=2, stride=2))
        return self.head(torch.tanh(self.dense(torch.flatten(x, 1))))


class Positional(Usual):
    """The same network with the positional argument of a pooling function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.first(x).relu(), 2, stride=2)
        x = functional.relu(functional.max_pool2d(self.second(x), 2))
        return self.head(torch.tanh(self.dense(x.flatten(1))))


def uneven() -> nn.Module:
    """Uneven windows, strides and padding, no bias, and pooling that overlaps or omits numbers."""
    return nn.Sequential(
        nn.Conv2d(3, 5, (3, 2), stride=(1, 2), padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.MaxPool2d((3, 2), stride=(2, 1)),
        nn.Conv2d(5, 33, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(33, 18, 1),
        nn.MaxPool2d(2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(18 * 3 * 2, 10),
    )


def wide() -> nn.Module:
    """More channels than fit one tile, and no dense layer."""
    return nn.Sequential(
        nn.MaxPool2d(2),
        nn.Conv2d(3, 70, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(70, 10, (6, 5)),
        nn.Flatten(),
    )


def with_dropout() -> nn.Module:
    """Dropout and norms after the images."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.LayerNorm(48),
        nn.Linear(48, 10),
    )


def with_norms() -> nn.Module:
    """Norms of images with groups of several sizes, and average pooling."""
    return nn.Sequential(
        nn.GroupNorm(3, 3),
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.GroupNorm(6, 24),
        nn.ReLU(),
        nn.AvgPool2d(2, stride=(2, 3)),
        nn.Conv2d(24, 20, 2),
        nn.GroupNorm(1, 20, affine=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(20, 10),
    )


def jobs(model, way, sizes=(9, 4, 12, 1), shape=(3, 12, 10)):
    start = problem(model).initial_params(3)
    random = torch.Generator().manual_seed(1)
    return [
        Job(
            params={name: value + 0.01 * client for name, value in start.items()},
            examples=Examples(
                torch.randn(size, *shape, generator=random),
                torch.randint(10, (size,), generator=random),
            ),
            training=way,
            generator=torch.Generator().manual_seed(100 + client),
        )
        for client, size in enumerate(sizes)
    ]


USUAL = [Usual, uneven, wide, with_dropout, with_norms]


@pytest.mark.parametrize(
    ("model", "way"),
    grid(product(USUAL, WAYS), [*zip(cycle(USUAL), WAYS, strict=False)].__contains__),
)
def test_the_same_model_comes_out(model, way, compiled):
    ours = train_many(problem(model), jobs(model, WAYS[way]))
    same(ours, one_by_one(problem(model), jobs(model, WAYS[way])))
    assert len(compiled) == 4


@pytest.mark.parametrize("model", [Functional, Positional])
def test_functions_are_known_as_well_as_modules(model, compiled):
    ours = train_many(problem(model), jobs(model, SGD))
    same(ours, one_by_one(problem(Usual), jobs(Usual, SGD)))
    assert len(compiled) == 4


@pytest.mark.parametrize("part", ["first", "second.weight", "second.bias", "head"])
def test_the_rest_is_frozen(part, compiled):
    def trained(name):
        return name.startswith(part)

    ours = train_many(problem(Usual), jobs(Usual, WAYS["all"]), trained=trained)
    same(ours, one_by_one(problem(Usual), jobs(Usual, WAYS["all"]), trained))
    assert len(compiled) == 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [Usual, uneven, with_norms])
def test_no_bit_depends_on_other_jobs_or_threads(model, threads, compiled):
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = train_many(problem(model), jobs(model, WAYS["all"]))
    finally:
        torch.set_num_threads(usual)
    for number, trained in enumerate(together):
        job = jobs(model, WAYS["all"])[number]
        ((_, rows),) = train_groups(problem(model), [job], batch_invariant=True)
        for name, value in trained.items():
            assert torch.equal(value, rows[name][0])
    assert len(compiled) == 8


def test_of_equal_values_the_first_receives_the_gradient(compiled):
    """An image of one colour has the same outputs everywhere."""

    def flat(model):
        trainings = jobs(model, SGD)
        for job in trainings:
            job.examples.features[:] = 1.5
        return trainings

    ours = train_many(problem(Usual), flat(Usual))
    same(ours, one_by_one(problem(Usual), flat(Usual)))
    assert len(compiled) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("model", [Usual, uneven, wide, with_dropout, with_norms])
def test_a_diverged_model_stays_diverged_and_moves_no_bit_of_others(model, value, compiled):
    trainings = jobs(model, SGD)
    trainings[0].examples.features[2, 0, 3, 3] = value
    broken, *others = train_many(problem(model), trainings)
    assert not all(bool(torch.isfinite(part).all()) for part in broken.values())
    for one, other in zip(others, train_many(problem(model), jobs(model, SGD))[1:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(compiled) == 8


def test_relu_follows_max_pooling():
    layers = recognise_chain(Usual(), torch.Size([3, 12, 10]))
    assert [layer.activation for layer in layers if layer.kind == MAX_POOL] == [RELU, RELU]


def whole(*layers: nn.Module) -> nn.Module:
    """Layers that lead from images of 3×8×8 to 10 numbers."""
    with torch.no_grad():
        size = nn.Sequential(*layers)(torch.zeros(2, 3, 8, 8)).shape[1]
    return nn.Sequential(*layers, nn.Linear(size, 10))


OTHERS = {
    "groups": lambda: whole(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()),
    "dilation": lambda: whole(nn.Conv2d(3, 6, 2, dilation=2), nn.Flatten()),
    "reflecting padding": lambda: whole(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()
    ),
    "named padding": lambda: whole(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten()),
    "pooling with padding": lambda: whole(nn.MaxPool2d(3, padding=1), nn.Flatten()),
    "pooling rounded up": lambda: whole(nn.MaxPool2d(3, ceil_mode=True), nn.Flatten()),
    "pooling with dilation": lambda: whole(nn.MaxPool2d(2, dilation=2), nn.Flatten()),
    "another pooling": lambda: whole(nn.LPPool2d(2, 2), nn.Flatten()),
    "average with padding": lambda: whole(nn.AvgPool2d(2, padding=1), nn.Flatten()),
    "average with another divisor": lambda: whole(
        nn.AvgPool2d(2, divisor_override=3), nn.Flatten()
    ),
    "averages of parts": lambda: whole(nn.AdaptiveAvgPool2d(3), nn.Flatten()),
    "norm of a whole image": lambda: whole(nn.LayerNorm((3, 8, 8)), nn.Flatten()),
    "dropout of images": lambda: whole(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten()),
    "another flattening": lambda: whole(nn.Conv2d(3, 4, 8), nn.Flatten(2), nn.Flatten()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_to_batches(name, compiled):
    def make_jobs():
        return jobs(OTHERS[name], SGD, sizes=(8, 8, 8), shape=(3, 8, 8))

    ours = train_many(problem(OTHERS[name]), make_jobs())
    same(ours, one_by_one(problem(OTHERS[name]), make_jobs()))
    assert compiled == []


def test_a_convolution_used_twice_is_left_to_batches():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Flatten(), nn.Linear(3 * 64, 10))
    trainings = jobs(lambda: model, SGD, shape=(3, 8, 8))
    assert network.form_for(problem(lambda: model), trainings[0]) is None


@pytest.mark.parametrize(("threads", "gains"), [(1, True), (2, True), (3, False), (16, False)])
def test_a_large_network_alone_is_left_to_many_threads(threads, gains, monkeypatch):
    (job,) = jobs(Usual, SGD, sizes=(2,))
    form = network.form_for(problem(Usual), job)
    outputs = sum(layer.outputs for layer in form.layers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(network, "_MOST_OUTPUTS", outputs)
    assert form.gains_alone(job)
    monkeypatch.setattr(network, "_MOST_OUTPUTS", outputs - 1)
    assert form.gains_alone(job) == gains


def test_working_memory_stays_within_its_limit():
    trainings = jobs(Usual, replace(SGD, batch_size=12))
    form = network.form_for(problem(Usual), trainings[0])
    needed = form._working_bytes(trainings[2])
    assert sorted(chain.from_iterable(form.groups(trainings, needed))) == [0, 1, 2, 3]
    assert sorted(chain.from_iterable(form.groups(trainings, needed - 1))) == [0, 1, 3]
