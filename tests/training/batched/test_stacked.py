"""Many models in one pass equal the same models one by one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flower_ext.training import models
from flower_ext.training.batched.form import Target
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.batched.stacked import NotStackable, StackedModel


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
    "mnist-cnn": (models.mnist_cnn, (1, 28, 28)),
    "residual": (Residual, (2, 8, 8)),
    "pooled": (Pooled, (1, 8, 8)),
}


def setting(which, form=StackedModel, count=3, batch=4):
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
    stacked = {name: form.stack([one[name] for one in every]) for name in every[0]}
    x = torch.randn(count, batch, *shape, generator=generator)
    y = torch.randint(3, (count, batch), generator=generator)
    return model, every, stacked, x, y


def summed(y):
    return lambda out: cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum")


def alone(model, params, x, y):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = cross_entropy(functional_call(model, leaves, (x,)), y, reduction="sum")
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("form", [StackedModel, MappedModel])
@pytest.mark.parametrize("which", MODELS)
def test_gradients_are_each_models_own(which, form):
    model, every, stacked, x, y = setting(which, form)
    targets = {n: Target(torch.full_like(p, float("nan"))) for n, p in stacked.items()}
    built = StackedModel(model, x[0, 0]) if form is StackedModel else MappedModel(model)
    built.gradient(stacked, x, summed(y), targets)
    for row, params in enumerate(every):
        for name, expected in alone(model, params, x[row], y[row]).items():
            torch.testing.assert_close(targets[name].tensor[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", MODELS)
def test_a_target_keeps_some_of_what_it_held(which):
    model, every, stacked, x, y = setting(which)
    targets = {n: Target(torch.ones_like(p), keep=0.5, factor=-2.0) for n, p in stacked.items()}
    StackedModel(model, x[0, 0]).gradient(stacked, x, summed(y), targets)
    for name, expected in alone(model, every[1], x[1], y[1]).items():
        torch.testing.assert_close(
            targets[name].tensor[1], 0.5 - 2 * expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("which", MODELS)
def test_the_weights_themselves_may_be_the_targets(which):
    model, every, stacked, x, y = setting(which)
    targets = {name: Target(p, keep=1.0, factor=-0.1) for name, p in stacked.items()}
    StackedModel(model, x[0, 0]).gradient(stacked, x, summed(y), targets)
    for row, params in enumerate(every):
        for name, slope in alone(model, params, x[row], y[row]).items():
            moved = params[name] - 0.1 * slope
            torch.testing.assert_close(stacked[name][row], moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", [["3.weight"], ["1.bias"], ["1.weight", "3.bias"]])
def test_only_parameters_with_a_target_have_a_gradient(chosen):
    model, every, stacked, x, y = setting("perceptron")
    before = {name: p.clone() for name, p in stacked.items()}
    targets = {name: Target(torch.zeros_like(stacked[name])) for name in chosen}
    StackedModel(model, x[0, 0]).gradient(stacked, x, summed(y), targets)
    expected = alone(model, every[2], x[2], y[2])
    for name in chosen:
        torch.testing.assert_close(targets[name].tensor[2], expected[name], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(stacked[name], p) for name, p in before.items())


@pytest.mark.parametrize("chosen", [["norm.weight"], ["norm.bias", "head.bias"]])
def test_a_norm_may_be_trained_behind_frozen_layers(chosen):
    model, every, stacked, x, y = setting("residual")
    targets = {name: Target(torch.zeros_like(stacked[name])) for name in chosen}
    StackedModel(model, x[0, 0]).gradient(stacked, x, summed(y), targets)
    expected = alone(model, every[1], x[1], y[1])
    for name in chosen:
        torch.testing.assert_close(targets[name].tensor[1], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("filters", [1, 2])
def test_a_single_example_of_a_single_model_is_enough(kernel, filters):
    model = nn.Sequential(nn.Conv2d(3, filters, kernel), nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.randn(1, 1, 3, 5, 5), torch.tensor([[2]])
    model(x[0])
    params = {name: p.detach() for name, p in model.named_parameters()}
    stacked = {name: StackedModel.stack([p]) for name, p in params.items()}
    targets = {name: Target(torch.zeros_like(p)) for name, p in stacked.items()}
    StackedModel(model, x[0, 0]).gradient(stacked, x, summed(y), targets)
    for name, expected in alone(model, params, x[0], y[0]).items():
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


def hooked():
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("build", "shape", "said"),
    [
        (hooked, (4,), "hooks"),
        (Branching, (4,), "traced"),
        (Looking, (4,), "mean"),
        (Twice, (4,), "used twice"),
        (Unused, (4,), "not used"),
        (Tied, (4,), "share"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.5)), (4,), "AlphaDropout"),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (5, 4), "Flatten"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Linear(4, 3)), (1, 4, 4), "form"),
    ],
)
def test_a_model_without_a_stacked_form_says_why(build, shape, said):
    with pytest.raises(NotStackable, match=said):
        StackedModel(build(), torch.zeros(shape))


STEADY = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Tanh)
UNSTEADY = (nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus)


@pytest.mark.parametrize("activation", STEADY)
def test_what_counts_as_steady_rounds_a_number_alike_wherever_it_is(activation):
    """Functions that fill vector registers treat the last numbers of an array differently."""

    def both(values):
        values = values.clone().requires_grad_()
        outputs = activation()(values)
        return outputs, torch.autograd.grad(outputs.sum(), values)[0]

    numbers = 4 * torch.randn(700, generator=torch.Generator().manual_seed(0))
    whole = both(numbers)
    for end in range(1, 350):
        for one, every in zip(both(numbers[:end]), whole, strict=True):
            assert torch.equal(one, every[:end])
        for one, every in zip(both(numbers[end : 2 * end]), whole, strict=True):
            assert torch.equal(one, every[end : 2 * end])


@pytest.mark.parametrize("activation", [*STEADY, *UNSTEADY])
def test_a_model_is_steady_if_all_its_layers_are(activation):
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3))
    assert StackedModel(model, torch.zeros(4)).batch_invariant == (activation in STEADY)
    assert not MappedModel(model).batch_invariant


class Called(nn.Module):
    """A function in place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "steady"),
    [(torch.sigmoid, False), (lambda x: x.sigmoid(), False), (torch.tanh, True)],
)
def test_functions_count_like_layers(function, steady):
    assert StackedModel(Called(function), torch.zeros(4)).batch_invariant == steady
