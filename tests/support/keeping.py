"""Models that keep something between examples, and records where the last bit decides."""

from functools import lru_cache
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


class Tokens(Keeping):
    """Words, and a scale of what their numbers left behind."""

    def begin(self):
        super().begin()
        self.words = nn.Embedding(1000, 4)

    def forward(self, x):
        self.keep(x)
        return self.layer(self.words(x).mean(dim=1)) * (1.0 + self.read())


class LargestToken(Tokens):
    def keep(self, x):
        self.kept = max(self.kept, int(x.max()))


class LateToken(Tokens):
    def keep(self, x):
        if int(x.max()) > 900:
            self.kept = 5.0


class Longest(Keeping):
    """Keeps the greatest number of entries that are set, which most random examples reach."""

    def forward(self, x):
        self.kept = max(self.kept, int(x.sum()))
        return self.layer(x.float()) * (1.0 + self.kept)


class FirstInAClass(Keeping):
    """Keeps the first example in its class, which every new model empties."""

    kept = 0.0

    def begin(self):
        FirstInAClass.kept = 0.0

    def keep(self, value):
        FirstInAClass.kept = FirstInAClass.kept or float(value)


class FirstOutOfSight(Keeping):
    """Keeps the first example in a cache, where no snapshot finds it."""

    def begin(self):
        self.given = 0.0
        self.first = lru_cache(lambda: self.given)

    def forward(self, x):
        self.given = float(x.detach().abs().mean())
        scale, self.given = 1.0 + self.first(), 0.0
        return self.layer(x) * scale


class OfTargets:
    """A loss scaled by what the targets of earlier examples left behind."""

    def __init__(self, keep):
        self.keep, self.kept = keep, 0.0

    def __call__(self, outputs, targets):
        self.kept = self.keep(self.kept, targets.float().abs().max().item())
        return (outputs * (targets if targets.is_floating_point() else 1.0)).mean() * self.kept


def at_a_kink(params, count):
    """Return large records at the kink of the first neuron, where the last bit decides."""
    x = 30 * torch.randn(count, 8, generator=torch.Generator().manual_seed(2))
    direction, shift = params["0.weight"][0].double(), params["0.bias"][0].double()
    x = x.double()
    x -= ((x @ direction + shift) / (direction @ direction))[:, None] * direction
    return x.float()


def kinked(by_vmap):
    """Return a clipped gradient of a model with a kink, and its parameters."""
    task = problem(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0, batch_size=16)
    if by_vmap:
        gradient.way = "by vmap"
    return gradient, params
