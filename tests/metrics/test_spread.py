"""Measures of fairness over clients: Jain's index, the worst decile and the variance."""

import math

import pytest

from flower_ext.metrics import summarize


def test_equal_clients_are_perfectly_fair():
    spread = summarize([0.7] * 13)
    assert spread.jain == pytest.approx(1.0)
    assert spread.std == pytest.approx(0.0)
    assert spread.mean == spread.worst_decile == pytest.approx(0.7)


def test_one_client_with_everything_is_as_unfair_as_can_be():
    assert summarize([0.0, 0.0, 0.0, 1.0]).jain == pytest.approx(1 / 4)


def test_the_worst_decile_is_the_mean_of_the_lowest_tenth_rounded_up():
    values = [client / 100 for client in range(100)]
    assert summarize(values).worst_decile == pytest.approx(sum(range(10)) / 1000)
    assert summarize([0.5, 0.1, 0.9]).worst_decile == 0.1
    assert summarize(list(range(11))).worst_decile == 0.5


def test_the_worst_decile_of_losses_is_the_mean_of_the_highest_tenth():
    assert summarize([0.5, 0.1, 0.9], lower_is_better=True).worst_decile == 0.9
    assert summarize(list(range(11)), lower_is_better=True).worst_decile == 9.5


def test_the_variance_is_the_square_of_the_standard_deviation():
    spread = summarize([1.0, 2.0, 6.0])
    assert spread.variance == pytest.approx(spread.std**2) == pytest.approx(14 / 3)


def test_the_order_of_clients_does_not_matter():
    assert summarize([0.2, 0.9, 0.4]) == summarize([0.9, 0.4, 0.2])


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_nothing_or_nonsense_is_refused(values):
    with pytest.raises(ValueError, match="values: expected at least one"):
        summarize(values)
