"""Many models in one pass equal the same models one by one."""

from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flower_ext.training import models
from flower_ext.training.batched import stack
from flower_ext.training.batched.mapped import MappedModel, Target, stacked
from tests.support.grids import grid
from tests.support.jobs import ALIKE, WAYS, jobs_of, one_by_one, problem, same, train_many

CPU = torch.device("cpu")


class Residual(nn.Module):
    """A sum of two branches, pooling, normalisation, functions instead of layers."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.branch = nn.Conv2d(4, 4, 3, padding="same", groups=2, dilation=2, bias=False)
        self.pool = nn.AvgPool2d(2)
        self.flat = nn.Flatten()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.begin(x)))
        x = self.pool(self.branch(x) + 0.5 * x)
        return self.head(self.flat(x.tanh()))


class Pooled(nn.Module):
    """Max pooling right after ReLU as a function, and of an output that is used elsewhere, too."""

    def __init__(self):
        super().__init__()
        self.begin, self.go_on = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 2)
        self.shrink, self.overlap = nn.MaxPool2d(2), nn.MaxPool2d(2, stride=1, padding=1)
        self.mean, self.mean2 = nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(1)
        self.flat, self.head = nn.Flatten(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.shrink(torch.relu(self.begin(x)))
        x = self.go_on(x).relu()
        return self.head(self.flat(self.mean(self.overlap(x)) + self.mean2(x)))


MODELS = {
    "logistic regression": (lambda: nn.Linear(4, 3), (4,)),
    "perceptron": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)),
        (1, 3, 4),
    ),
    "mnist-cnn": (partial(models.build, "mnist-cnn"), (1, 28, 28)),
    "residual": (Residual, (2, 8, 8)),
    "pooled": (Pooled, (1, 8, 8)),
}


def setting(which, count=3, batch=4):
    """Return a model, parameters of several, the same as a stack, and a batch for each."""
    build, shape = MODELS[which]
    model = build()
    generator = torch.Generator().manual_seed(0)
    every = [
        {
            n: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
            for n, p in model.named_parameters()
        }
        for _ in range(count)
    ]
    params = {name: stacked([one[name] for one in every], CPU) for name in every[0]}
    x = torch.randn(count, batch, *shape, generator=generator)
    y = torch.randint(3, (count, batch), generator=generator)
    return model, every, params, x, y


def summed(y):
    return lambda out: cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")


def alone(model, params, x, y):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = cross_entropy(functional_call(model, leaves, (x,)), y, reduction="sum")
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_gradients_belong_to_each_model_alone(which, by_products):
    model, every, many, x, y = setting(which)
    targets = {n: Target(torch.zeros_like(p)) for n, p in many.items()}
    slopes = [alone(model, params, x[row], y[row]) for row, params in enumerate(every)]
    MappedModel(model, by_products=by_products).gradient(many, x, summed(y), targets)
    for row, expected_slopes in enumerate(slopes):
        for name, expected in expected_slopes.items():
            torch.testing.assert_close(targets[name].tensor[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", MODELS)
def test_a_gradient_is_added_to_what_a_target_held(which):
    model, every, many, x, y = setting(which)
    targets = {n: Target(torch.ones_like(p), factor=-2.0) for n, p in many.items()}
    slopes = alone(model, every[1], x[1], y[1])
    MappedModel(model).gradient(many, x, summed(y), targets)
    for name, expected in slopes.items():
        torch.testing.assert_close(targets[name].tensor[1], 1 - 2 * expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_the_weights_themselves_may_be_the_targets(which, by_products):
    model, every, many, x, y = setting(which)
    targets = {name: Target(p, factor=-0.1) for name, p in many.items()}
    slopes = [alone(model, params, x[row], y[row]) for row, params in enumerate(every)]
    MappedModel(model, by_products=by_products).gradient(many, x, summed(y), targets)
    for row, params in enumerate(every):
        for name, slope in slopes[row].items():
            moved = params[name] - 0.1 * slope
            torch.testing.assert_close(many[name][row], moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", [["3.weight"], ["1.bias"], ["1.weight", "3.bias"]])
def test_only_parameters_with_a_target_have_a_gradient(chosen):
    model, every, many, x, y = setting("perceptron")
    before = {name: p.clone() for name, p in many.items()}
    targets = {name: Target(torch.zeros_like(many[name])) for name in chosen}
    expected = alone(model, every[2], x[2], y[2])
    MappedModel(model).gradient(many, x, summed(y), targets)
    for name in chosen:
        torch.testing.assert_close(targets[name].tensor[2], expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(many, before, rtol=0, atol=0)


@pytest.mark.parametrize("chosen", [["norm.weight"], ["norm.bias", "head.bias"]])
def test_a_norm_may_be_trained_behind_frozen_layers(chosen):
    model, every, many, x, y = setting("residual")
    targets = {name: Target(torch.zeros_like(many[name])) for name in chosen}
    expected = alone(model, every[1], x[1], y[1])
    MappedModel(model).gradient(many, x, summed(y), targets)
    for name in chosen:
        torch.testing.assert_close(targets[name].tensor[1], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("filters", [1, 2])
def test_a_single_example_of_a_single_model_is_enough(kernel, filters):
    model = nn.Sequential(nn.Conv2d(3, filters, kernel), nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.randn(1, 1, 3, 5, 5), torch.tensor([[2]])
    model(x[0])
    params = {name: p.detach() for name, p in model.named_parameters()}
    many = {name: stacked([p], CPU) for name, p in params.items()}
    targets = {name: Target(torch.zeros_like(p)) for name, p in many.items()}
    slopes = alone(model, params, x[0], y[0])
    MappedModel(model).gradient(many, x, summed(y), targets)
    for name, expected in slopes.items():
        torch.testing.assert_close(targets[name].tensor[0], expected, rtol=1e-4, atol=1e-5)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) if x.sum() > 0 else self.head(-x)


class Looking(nn.Module):
    """A module that takes its first dimension for examples, which it is not in a stack."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x - x.mean(dim=1, keepdim=True))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x))


class Outside(nn.Module):
    """A model that reads the weight of a layer, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) + x @ self.head.weight.mT.exp()


class Constant(nn.Module):
    """A layer whose features are the same for every model and example."""

    def __init__(self):
        super().__init__()
        self.head, self.shift = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(x) + self.shift(torch.ones(2))


def hooked():
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def checkpointed():
    """Return a model that computes its activations again in the backward pass."""

    def forward(x):
        return torch.utils.checkpoint.checkpoint(head, x, use_reentrant=False)

    model = nn.Sequential(head := nn.Linear(4, 3))
    model.forward = forward
    return model


def normed():
    return nn.utils.weight_norm(nn.Linear(4, 3))


ODD = [hooked, Branching, Looking, Twice, Unused, Tied, Outside, Constant, checkpointed, normed]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    ("model", "way"),
    grid(product(ODD, WAYS), [*zip(ODD, cycle(WAYS), strict=False)].__contains__),
)
def test_a_model_that_uses_a_layer_oddly_trains_as_if_alone(model, way):
    ours = train_many(problem(model), jobs_of(model, WAYS[way], ALIKE))
    same(ours, one_by_one(problem(model), jobs_of(model, WAYS[way], ALIKE)))


@pytest.mark.parametrize(("model", "message"), [(Twice, "used twice"), (Outside, "outside")])
def test_no_gradient_is_sent_in_parts(model, message):
    built = model()
    many = {name: stacked([p.detach()] * 2, CPU) for name, p in built.named_parameters()}
    targets = {name: Target(torch.zeros_like(p)) for name, p in many.items()}
    with pytest.raises(RuntimeError, match=message):
        MappedModel(built).gradient(many, torch.randn(2, 5, 4), torch.sum, targets)


def test_convolutions_as_products_take_the_memory_of_their_patches():
    build, shape = partial(nn.Conv2d, 2, 4, 3), torch.Size([2, 8, 8])
    usual, by_products = (
        stack._activations(build, shape, torch.float32, by_products=way) for way in (False, True)
    )
    assert by_products == usual + 6 * 6 * (2 * 3 * 3)
