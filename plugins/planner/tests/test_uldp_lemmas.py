"""Lemmas 8 and 9 of Uldp-FL hold at the orders that are used, and a tight bound is below both."""

import math

import numpy as np
import pytest

from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext_planner.uldp_lemmas import group_loss_by_conversion, group_loss_by_renyi
from tests.support.grids import grid
from tests.support.group_losses import DELTA, FIGURE_2, SMALL, tight


def renyi(silo, group_size):
    return group_loss_by_renyi(silo, group_size=group_size, delta=DELTA).epsilon


def conversion(silo, group_size):
    return group_loss_by_conversion(silo, group_size=group_size, delta=DELTA).epsilon


@pytest.mark.parametrize(
    ("group_size", "provable"), [(8, 98.79), (16, 545.6), (32, 3_267), (64, 20_107)]
)
def test_figure_2_at_the_orders_for_which_lemma_9_holds(group_size, provable):
    assert renyi(FIGURE_2, group_size) == pytest.approx(provable, rel=1e-3)


@pytest.mark.parametrize(
    "silo", grid([SMALL, FIGURE_2], lambda silo: silo is FIGURE_2), ids=["small", "figure 2"]
)
def test_larger_groups_lose_more_and_the_tight_bound_is_below_both_lemmas(silo):
    before = 0.0
    for group_size in (1, 2, 3, 5, 8, 20):
        epsilon = tight(silo, group_size)
        assert before < epsilon <= min(renyi(silo, group_size), conversion(silo, group_size))
        before = epsilon


def test_lemma_9_rounds_the_group_up_never_down():
    for group_size, covering in ((3, 4), (5, 8), (33, 64)):
        assert renyi(FIGURE_2, group_size) == renyi(FIGURE_2, covering)


def test_lemma_8_is_what_a_search_for_the_records_delta_finds():
    group_size, orders = 5, np.arange(2, 400)
    alphas = tuple(map(float, orders))
    curve = SMALL.steps * sampled_gaussian_renyi(
        SMALL.noise_multiplier, SMALL.sampling_rate, alphas
    )

    def of_one_record(log_delta):
        return (curve + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)).min()

    low, high = -1e5, math.log(DELTA)
    for _ in range(200):
        middle = (low + high) / 2
        group = math.log(group_size) + (group_size - 1) * of_one_record(middle) + middle
        low, high = (middle, high) if group < math.log(DELTA) else (low, middle)
    assert conversion(SMALL, group_size) == pytest.approx(group_size * of_one_record(low), rel=1e-6)


def test_both_lemmas_agree_for_one_record():
    assert renyi(SMALL, 1) == pytest.approx(conversion(SMALL, 1), rel=1e-9)


def test_for_hundreds_of_records_lemma_9_is_above_the_tight_bound():
    assert tight(FIGURE_2, 1_000) < renyi(FIGURE_2, 1_000)


@pytest.mark.parametrize("bound", [group_loss_by_renyi, group_loss_by_conversion])
def test_unfit_arguments_are_refused_by_name(bound):
    with pytest.raises(ValueError, match="group_size=0: expected an integer >= 1"):
        bound(SMALL, group_size=0, delta=DELTA)
    with pytest.raises(ValueError, match="delta=1"):
        bound(SMALL, group_size=2, delta=1.0)
