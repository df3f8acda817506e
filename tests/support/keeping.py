"""Models that keep something between examples, and records where the last bit decides."""

from logging import getLogger

import torch
from torch import nn

from flower_ext.training import ClippedGradient
from tests.support.jobs import problem

KEPT = [0.0]
HIDDEN = getLogger("keeping")


class Keeping(nn.Module):
    """A layer scaled by what earlier examples left behind."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.begin()

    def begin(self):
        self.kept = 0.0

    def forward(self, x):
        self.keep(x.detach().abs().mean())
        return self.layer(x) * (1.0 + self.read())

    def keep(self, value):
        self.kept = 0.5 * self.kept + float(value)

    def read(self):
        return self.kept


class Attribute(Keeping):
    def keep(self, value):
        self.kept = 0.5 * self.kept + value


class Listed(Keeping):
    def begin(self):
        self.kept = []

    def keep(self, value):
        self.kept.append(value)

    def read(self):
        return sum(self.kept[-5:])


class OfAClass(Keeping):
    kept = 0.0

    def begin(self):
        pass

    def keep(self, value):
        type(self).kept = 0.5 * type(self).kept + float(value)


class Global(Keeping):
    def keep(self, value):
        KEPT[0] = 0.5 * KEPT[0] + float(value)

    def read(self):
        return KEPT[0]


class Shared:
    """A class that no model is an instance of."""

    largest = 0.0


class InAnotherClass(Keeping):
    def keep(self, value):
        Shared.largest = max(Shared.largest, float(value))

    def read(self):
        return Shared.largest


def remember(value):
    KEPT[0] = 0.5 * KEPT[0] + float(value)


class ByAFunction(Keeping):
    def keep(self, value):
        remember(value)


class Hooked(Keeping):
    def begin(self):
        box = [0.0]

        def hook(module, inputs, output):
            box[0] = 0.5 * box[0] + float(inputs[0].detach().abs().mean())
            return output * (1.0 + box[0])

        self.layer.register_forward_hook(hook)

    def keep(self, value):
        pass

    def read(self):
        return 0.0


class OddOnly(Keeping):
    def keep(self, value):
        if value > 100:
            self.kept = 1.0


class FirstOnly(Keeping):
    def keep(self, value):
        self.kept = self.kept or float(value)


class OutOfSight(Keeping):
    """Keeps numbers where no snapshot looks; only one of its layers shows them."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(1, 1)

    def begin(self):
        pass

    def keep(self, value):
        HIDDEN.kept = 0.5 * HIDDEN.kept + float(value)

    def read(self):
        return HIDDEN.kept


class Broken(OutOfSight):
    """Raises for all examples that follow a large one."""

    def keep(self, value):
        HIDDEN.kept = HIDDEN.kept or float(value > 100)

    def read(self):
        return 1 / (1.0 - HIDDEN.kept)


class Written(Keeping):
    def keep(self, value):
        self.layer.weight.data.add_(value)


def at_a_kink(params, count):
    """Return large records at the kink of the first neuron, where the last bit decides."""
    x = 30 * torch.randn(count, 8, generator=torch.Generator().manual_seed(2))
    direction, shift = params["0.weight"][0].double(), params["0.bias"][0].double()
    x = x.double()
    x -= ((x @ direction + shift) / (direction @ direction))[:, None] * direction
    return x.float()


def kinked(by_vmap):
    task = problem(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0, batch_size=16)
    if by_vmap:
        gradient.in_one_pass = False
    return gradient, params
