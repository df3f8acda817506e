"""No training leaves anything in its process by which another training changes."""

import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import train
from flower_ext.training.trials.trainings import why_state_is_shared
from tests.support.jobs import problem
from tests.support.keeping import (
    HIDDEN,
    Broken,
    Global,
    Hooked,
    Keeping,
    OfAClass,
    OfTargets,
    OutOfSight,
    Tokens,
)

EXAMPLES = Examples(torch.zeros(5, 4), torch.zeros(5).long())
BOX = [0.0]


def enclosed():
    """Return a model whose hook writes into a variable that all models enclose."""
    model = nn.Sequential(nn.Linear(4, 3))

    def hook(module, inputs, output):
        BOX[0] = 0.5 * BOX[0] + float(output.detach().sum())
        return output * (1.0 + BOX[0])

    model.register_forward_hook(hook)
    return model


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


class OfNumpy(Layer):
    def forward(self, x):
        return np.random.normal() * super().forward(x)  # noqa: NPY002


class OfPython(Layer):
    def forward(self, x):
        return random.random() * super().forward(x)


class OfLargeNumbers(Layer):
    """Keeps large numbers in its class, and raises for those that are not finite."""

    kept = 0.0

    def forward(self, x):
        if not bool(x.isfinite().all()):
            raise ArithmeticError
        if bool((x > 100).any()):
            type(self).kept += 1.0
        return super().forward(x)


class Unsuited(Layer):
    """Raises for every example of a trial."""

    def forward(self, x):
        raise ArithmeticError


def reason(task, examples=EXAMPLES):
    """Return why trainings of a task would not be independent."""
    return why_state_is_shared(task, examples, train)


def positions():
    """Return the states of the global generators."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"], random.getstate()


@pytest.mark.parametrize(
    ("build", "place"),
    [(OfAClass, r"OfAClass\.kept"), (Global, "global KEPT"), (enclosed, "global BOX")],
)
def test_a_model_that_shares_what_it_keeps_is_refused_with_the_place(build, place):
    assert re.search(f"{place}.*other models see it", reason(problem(build)))


@pytest.mark.parametrize("build", [OfNumpy, OfPython])
def test_a_model_that_draws_from_a_global_generator_is_refused(build):
    before = positions()
    assert re.search("global generator", reason(problem(build)))
    assert positions() == before


def test_draws_are_noticed_under_any_of_numpys_generators():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        assert reason(problem(lambda: nn.Linear(4, 3))) is None
        assert re.search("global generator", reason(problem(partial(OfNumpy))))
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("build", [OutOfSight, Broken])
def test_a_model_that_keeps_something_out_of_sight_is_refused(build, monkeypatch):
    monkeypatch.setattr(HIDDEN, "kept", 0.0, raising=False)
    assert re.search("a variable elsewhere changes", reason(problem(build)))


def test_each_odd_value_is_tried_by_itself():
    """A model that raises for one must not hide what it keeps of another."""
    assert re.search(r"OfLargeNumbers\.kept", reason(problem(OfLargeNumbers)))


def test_a_model_unsuited_to_random_examples_is_left_to_its_training():
    assert reason(problem(Unsuited)) is None


class RareWord(Tokens):
    """Keeps in its class that a rare word occurred."""

    kept = 0.0

    def begin(self):
        self.words = nn.Embedding(1000, 4)

    def keep(self, x):
        if int(x.max()) > 900:
            RareWord.kept = 5.0


def test_a_model_that_shares_a_rare_word_is_refused():
    words = Examples(torch.zeros(5, 3).long(), EXAMPLES.targets)
    assert re.search(r"RareWord\.kept.*other models see it", reason(problem(RareWord), words))


@pytest.mark.parametrize("targets", [torch.zeros(5, 1), EXAMPLES.targets], ids=["number", "class"])
@pytest.mark.parametrize("keep", [max, lambda kept, new: 0.5 * (kept + new)], ids=["max", "mean"])
def test_a_loss_that_keeps_something_of_targets_is_refused(keep, targets):
    task = problem(lambda: nn.Linear(4, 1), OfTargets(keep))
    examples = Examples(EXAMPLES.features, targets)
    assert re.search(r"loss\.kept.*other models see it", reason(task, examples))


@pytest.mark.parametrize("build", [Keeping, Hooked, lambda: nn.Linear(4, 3)])
def test_state_that_a_model_keeps_for_itself_is_allowed(build):
    assert reason(problem(build)) is None
