"""A record with an integer out of range is found before an accelerator computes anything of it."""

import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training.index_limits import require_usable, usable_rows
from tests.support.jobs import Dense, Words, problem


def labels(*numbers):
    return torch.randn(len(numbers), 4), torch.tensor(numbers)


def words(*rows):
    return torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64)


@pytest.mark.parametrize("usual", [[2, 0, 1], [0]])
def test_labels_that_the_loss_refuses_are_found(usual):
    task = problem(lambda: Dense())
    assert usable_rows(task, *labels(*usual)).all()
    usable = usable_rows(task, *labels(0, 3, 2, -1, 10_000, -100, 1))
    assert usable.tolist() == [True, False, True, False, False, True, True]
    assert usable_rows(task, *labels(*usual)).all()


def test_words_without_a_row_in_the_table_are_found():
    usable = usable_rows(
        problem(Words), *words([0, 1, 2, 3, 10], [0, 0, 11, 0, 0], [0, 0, 0, 0, -1])
    )
    assert usable.tolist() == [True, False, False]


def test_counts_that_are_no_indices_may_be_as_large_as_they_like():
    def squared(outputs, targets):
        return (outputs.sum(dim=1) - targets).square().mean()

    assert usable_rows(problem(Dense, squared), *labels(0, 10**9, -(10**9))).all()


def test_many_numbers_below_zero_are_tried_by_a_few_of_them():
    tried = []

    def counted(outputs, targets):
        tried.append(targets)
        return (outputs.sum(dim=1) - targets).square().mean()

    assert usable_rows(problem(Dense, counted), *labels(*range(-500, 500))).all()
    assert len(tried) < 10
    usable = usable_rows(problem(lambda: Dense()), *labels(*range(-200, 3)))
    assert usable.tolist() == [False] * 200 + [True] * 3


class Scaled(nn.Module):
    """Divides bytes by 255."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x / 255)


def test_images_of_bytes_may_have_all_grey_values():
    images = torch.arange(256, dtype=torch.uint8).view(64, 4)
    assert usable_rows(problem(Scaled), images, torch.zeros(64, dtype=torch.int64)).all()


class Picky(nn.Module):
    """Refuses examples of zeros."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if not x.any():
            raise ValueError("nothing to see")
        return self.layer(x)


def test_a_model_that_refuses_examples_of_zeros_is_not_checked(caplog):
    assert usable_rows(problem(Picky), *labels(0, 7)).all()
    assert "are not checked" in caplog.text


def test_the_error_says_how_many_examples_are_meant():
    with pytest.raises(IndexError, match="2 of 3 examples"):
        require_usable(problem(lambda: Dense()), Examples(*labels(0, 5, 7)))


def test_what_one_client_holds_changes_nothing_for_another():
    task, other = problem(lambda: Dense()), problem(lambda: Dense())
    usable_rows(task, *labels(9, -7, 2))
    for numbers in ([0, 1, 2], [3, 2], [-100, -1]):
        same = labels(*numbers)
        assert usable_rows(task, *same).tolist() == usable_rows(other, *same).tolist()


def test_no_trial_of_an_integer_moves_the_draws_of_a_training():
    task, examples = problem(lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 3))), labels(0, 2, 9)
    before = torch.get_rng_state()
    usable_rows(task, *examples)
    assert torch.equal(torch.get_rng_state(), before)
