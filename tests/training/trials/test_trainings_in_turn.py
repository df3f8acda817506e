"""No training leaves anything in its process by which another training changes."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training.trials.trainings_in_turn import refuse_state_between_trainings
from flower_ext.training.models.fewest_rows import refusing_layer
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


def positions():
    """Return the states of the global generators."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"], random.getstate()


@pytest.mark.parametrize(
    ("build", "place"),
    [(OfAClass, r"OfAClass\.kept"), (Global, "global KEPT"), (enclosed, "global BOX")],
)
def test_a_model_that_shares_what_it_keeps_is_refused_by_the_name_of_the_place(build, place):
    with pytest.raises(ValueError, match=f"{place}.*other models see it"):
        refuse_state_between_trainings(problem(build), EXAMPLES)


@pytest.mark.parametrize("build", [OfNumpy, OfPython])
def test_a_model_that_draws_from_a_global_generator_is_refused_and_the_draws_are_put_back(build):
    before = positions()
    with pytest.raises(ValueError, match="global generator"):
        refuse_state_between_trainings(problem(build), EXAMPLES)
    assert positions() == before


def test_draws_are_noticed_under_any_of_numpys_generators():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        refuse_state_between_trainings(problem(lambda: nn.Linear(4, 3)), EXAMPLES)
        with pytest.raises(ValueError, match="global generator"):
            refuse_state_between_trainings(problem(partial(OfNumpy)), EXAMPLES)
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("build", [OutOfSight, Broken])
def test_a_model_that_keeps_something_out_of_sight_is_refused(build, monkeypatch):
    monkeypatch.setattr(HIDDEN, "kept", 0.0, raising=False)
    with pytest.raises(ValueError, match="a variable elsewhere changes"):
        refuse_state_between_trainings(problem(build), EXAMPLES)


def test_each_odd_value_is_tried_by_itself():
    """A model that raises for one must not hide what it keeps of another."""
    with pytest.raises(ValueError, match=r"OfLargeNumbers\.kept"):
        refuse_state_between_trainings(problem(OfLargeNumbers), EXAMPLES)


def test_a_model_that_random_examples_do_not_suit_is_left_to_its_training():
    refuse_state_between_trainings(problem(Unsuited), EXAMPLES)


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
    with pytest.raises(ValueError, match=r"RareWord\.kept.*other models see it"):
        refuse_state_between_trainings(problem(RareWord), words)


@pytest.mark.parametrize("targets", [torch.zeros(5, 1), EXAMPLES.targets], ids=["number", "class"])
@pytest.mark.parametrize("keep", [max, lambda kept, new: 0.5 * (kept + new)], ids=["max", "mean"])
def test_a_loss_that_keeps_something_of_targets_is_refused(keep, targets):
    task = problem(lambda: nn.Linear(4, 1), OfTargets(keep))
    with pytest.raises(ValueError, match=r"loss\.kept.*other models see it"):
        refuse_state_between_trainings(task, Examples(EXAMPLES.features, targets))


@pytest.mark.parametrize("build", [Keeping, Hooked, lambda: nn.Linear(4, 3)])
def test_what_a_model_keeps_for_itself_is_allowed(build):
    refuse_state_between_trainings(problem(build), EXAMPLES)


class Unsettling(nn.Linear):
    """Changes a setting of the process for a batch of one row, which it then refuses."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        if len(x) == 1:
            torch.set_default_dtype(torch.float64)
            raise ValueError("one row")
        return super().forward(x)


def test_a_probe_of_a_model_leaves_no_setting_to_the_training_after_it():
    try:
        assert refusing_layer(Unsettling, torch.zeros(2, 4)) is not None
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
