"""Models that mix examples of integers never have their gradients found in one pass."""

import math

import pytest
import torch
from torch import nn

from flower_ext.training import ClippedGradient
from flower_ext.training.isolation import seeded
from flower_ext.training.kind import kind_of
from flower_ext.training.trials.examples_together import BatchInvarianceTrial
from flower_ext.training.trials.made_up_examples import UNUSUAL_VALUES
from tests.support.jobs import problem


class Pixels(nn.Module):
    """Images in units of the brightest pixel of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x):
        return self.layer((x.float() / x.max()).flatten(1))


class Text(nn.Module):
    """Sums of words, in units of the longest text of the batch."""

    def __init__(self, padding, vocabulary=50, *, empty=None):
        super().__init__()
        self.padding = padding
        self.table, self.layer = nn.Embedding(vocabulary, 16, empty), nn.Linear(16, 3)

    def forward(self, x):
        mask = x != self.padding
        return self.layer((self.table(x) * mask.unsqueeze(2)).sum(1) / mask.sum(1).max())


class Counts(nn.Module):
    """Numbers in units of the largest one of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x):
        return self.layer(x / x.amax(0).clamp(min=1))


class Zeros(nn.Module):
    """Numbers, which count twice if a zero is beside one above 1."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x):
        twice = (x == 0).any() & (x > 1).any()
        return self.layer(x * (1.0 + twice))


class Faint(nn.Module):
    """Images that all count a little more beside a white pixel: less than passes may round."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x / 255) * (1.0 + 1e-4 * (x == 255).any())


class Apart(nn.Module):
    """Means of words, each text by itself."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.layer(self.table(x).mean(1))


def texts(padding):
    draw = torch.Generator().manual_seed(0)
    x = torch.full((20, 40), padding)
    x[:, :2] = torch.randint(3, 40, (20, 2), generator=draw)
    x[0] = torch.randint(3, 40, (40,), generator=draw)
    return x


def words(padding):
    """Return texts of one word, but the first."""
    x = torch.full((20, 2), padding)
    x[:, 0] = x[0] = 3
    return x


def zeros():
    x = torch.full((20, 1), 5)
    x[0] = 0
    return x


def images():
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (20, 1, 8, 8), generator=draw).to(torch.uint8)
    x[0] = 255
    return x


def counts():
    x = torch.randint(0, 2, (20, 10), generator=torch.Generator().manual_seed(0))
    x[0] = 10_000
    return x


def white():
    """Return dark images, but for the first."""
    x = torch.full((20, 4), 3)
    x[0] = 255
    return x


def summed(build, x, bound):
    """Return the gradient, and how far the first record moves its sum, in clipping norms."""
    task, y = problem(build), torch.arange(len(x)) % 3
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=bound)
    every, less = gradient(params, x, y), gradient(params, x[1:], y[1:])
    moved = math.sqrt(sum(float((every[n] - less[n]).square().sum()) for n in every))
    return gradient, moved / bound


@pytest.mark.parametrize(
    ("build", "x", "bound"),
    [
        (Pixels, images(), 0.5),
        (lambda: Text(2), texts(2), 0.5),
        (lambda: Text(49), texts(49), 0.5),
        (lambda: Text(25, empty=25), words(25), 0.5),
        (lambda: Text(49, empty=49), words(49), 0.5),
        (Counts, counts(), 1.0),
        (Zeros, zeros(), 0.5),
        (Faint, white(), 0.5),
    ],
    ids=[
        "pixels",
        "text",
        "text with the last word as padding",
        "words",
        "words before the last",
        "counts",
        "zeros",
        "a little",
    ],
)
def test_examples_that_integers_mix_are_kept_apart(build, x, bound):
    gradient, moved = summed(build, x, bound)
    assert gradient.way != "in one pass"
    assert moved <= 1 + 1e-6


def test_texts_that_are_apart_pass_together():
    """Although the model has no row for most integers that a trial draws."""
    gradient, moved = summed(Apart, texts(2), 0.01)
    assert gradient.way == "in one pass"
    assert moved <= 1 + 1e-6


@pytest.mark.parametrize("odd", [None, *UNUSUAL_VALUES])
def test_a_pass_in_which_an_odd_example_moves_others_fails(odd):
    task = problem(lambda: nn.Linear(4, 3))
    gradient = ClippedGradient(task, ["weight", "bias"], clipping_norm=1.0)
    passes = gradient.passes

    def follow(x, y, by):
        if odd is not None:
            is_odd = x.isnan() if math.isnan(odd) else x == odd
            x = x * (1.0 + 1e-3 * is_odd.any())
        return passes.in_one_pass(x, y, by)

    examples = torch.zeros(1, 4), torch.zeros(1).long()
    kind = kind_of(task, *examples, {})
    trial = BatchInvarianceTrial(kind, passes.model, passes.params, passes.names)
    assert bool(trial.why_bits_differ(follow, 16)) == (odd is not None)


def test_trials_move_no_draw_of_the_first_training_in_a_process():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x + 0.1 * torch.randn_like(x))

    task = problem(Noisy)
    params = task.initial_params(0)
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3

    def summed():
        with seeded(1, torch.device("cpu")):
            return ClippedGradient(task, list(params), clipping_norm=1.0)(params, x, y)

    first, second = summed(), summed()
    assert all(torch.equal(first[name], second[name]) for name in params)
