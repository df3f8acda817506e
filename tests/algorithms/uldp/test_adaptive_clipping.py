"""Clipping norms that adapt to the updates of users across silos."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from flower_ext.algorithms.uldp import UldpAvg, UldpNaive
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.server.run_guarantees import summary_of
from flower_ext.federation.sums.weighted import weighted_sum
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    FullParticipation,
    PoissonSampling,
    SecureSum,
)
from flower_ext.privacy.mechanisms.adaptive_clipping import SIDE, rows_with_sides, with_side
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.training import Task
from tests.support.grids import grid
from tests.support.plans import quiet_clipping, release_plan
from tests.support.pulls import ONE_STEP, initial, model, pull, silo_data

SILOS, USERS = 3, 40
PLACEMENTS = ("client", SecureSum(colluding=0.0, dropouts=0.0))
_draw = np.random.default_rng(4)
FORCES = {
    (silo, user): float(force)
    for user in range(USERS)
    for silo, force in enumerate(np.exp(0.5 * _draw.standard_normal(SILOS)))
    if silo == user % SILOS or user % 4 == 0
}
"""Pull of a user's only record in a silo; most users have records in one silo only."""
LENGTHS = math.sqrt(2) * np.array([*FORCES.values()])


def plan_of(clipping, rounds=1, **changes):
    fields = {"clipping_norm": clipping, "noise_multiplier": 1e-3, "delta": 1e-5, **changes}
    return release_plan(USERS, rounds=rounds, **fields)


def start(clipping, rounds, *, weighting="equal", sum=None, data=None, **changes):
    """Return the norms of the rounds and of the next one, and the strategy."""
    by_silo = data or [
        silo_data(
            [user for silo, user in FORCES if silo == number],
            [force for (silo, _), force in FORCES.items() if silo == number],
        )
        for number in range(SILOS)
    ]
    task = Task(
        model=model,
        data=lambda partition: by_silo[partition],
        loss=pull,
        metrics={},
        device="cpu",
    )
    method = UldpAvg(num_silos=SILOS, weighting=weighting, local=ONE_STEP)
    strategy = FederatedStrategy(
        method, plan_of(clipping, rounds, **changes), evaluate_every=0, sum=sum
    )
    norms = []
    strategy.start(
        InProcessGrid(method.client_app(task), SILOS),
        initial(),
        num_rounds=rounds,
        evaluate_fn=lambda number, _: (
            norms.append(strategy.run.progress.row["adaptive_norm"]) if number else None
        ),
    )
    assert strategy.refusals == []
    return [*norms, strategy.run.mechanism.adaptive_norm], strategy


def steps(weight, rounds):
    """Return the norms by plain arithmetic without noise."""
    norms = [1.0]
    for _ in range(rounds):
        sides = sum(
            weight(user) * math.copysign(0.5, norms[-1] - math.sqrt(2) * force)
            for (_, user), force in FORCES.items()
        )
        norms.append(norms[-1] * math.exp(-0.5 * sides / USERS))
    return norms


def shares(user):
    return 1 / sum(owner == user for _, owner in FORCES)


@pytest.mark.parametrize(
    ("weighting", "weight", "placement"),
    grid(
        [
            (*weights, placement)
            for weights in (("equal", lambda user: 1 / SILOS), ("by-records", shares))
            for placement in PLACEMENTS
        ],
        lambda case: (case[0] == "equal") == (case[2] is PLACEMENTS[0]),
    ),
)
def test_each_part_of_a_user_counts_by_its_weight(placement, weighting, weight):
    norms, _ = start(quiet_clipping(), 3, weighting=weighting, noise_placement=placement)
    assert norms == pytest.approx(steps(weight, 3), rel=0.02)


@pytest.mark.parametrize("begin", [0.2, pytest.param(5.0, marks=pytest.mark.full)])
def test_the_norm_finds_the_median_of_users_parts(begin):
    clipping = quiet_clipping(initial_norm=begin, learning_rate=1.0)
    norms, _ = start(clipping, 12, weighting="by-records")
    assert norms[-1] == pytest.approx(np.median(LENGTHS), rel=0.25)


def test_users_in_few_silos_count_as_half_within_the_norm_elsewhere():
    """With equal weights the norm moves more slowly, to the same median."""
    norms, _ = start(quiet_clipping(initial_norm=8.0), 3)
    fast, _ = start(quiet_clipping(initial_norm=8.0), 3, weighting="by-records")
    assert np.median(LENGTHS) < fast[-1] < norms[-1] < 8.0


@pytest.mark.parametrize(
    ("sampling", "placement"),
    grid(
        product([FullParticipation(USERS), PoissonSampling(USERS, 0.5)], PLACEMENTS),
        lambda case: isinstance(case[0], FullParticipation) == (case[1] is PLACEMENTS[0]),
    ),
)
def test_every_epsilon_is_that_of_a_fixed_norm(placement, sampling):
    options = {"sampling": sampling, "noise_multiplier": 2.0, "noise_placement": placement}

    def losses(clipping):
        _, strategy = start(clipping, 2, **options)
        return [(g.view, g.basis, g.epsilon, g.conditions) for g in strategy.guarantees()], strategy

    fixed = plan_of(1.0, 2, **options)
    method = UldpAvg(num_silos=SILOS, local=ONE_STEP)
    shown, strategy = losses(AdaptiveClipping(initial_norm=1.0))
    summary = summary_of(strategy.run)
    claims = method.claims(summary, method.mechanism(fixed))
    assert shown == [(g.view, g.basis, g.epsilon, g.conditions) for g in claims]
    provable = [g for g in strategy.guarantees() if g.basis == "provable"]
    assert {g.view for g in provable} == set(AdversaryView) - {
        AdversaryView.MODELS_AND_COHORTS  # of spaced cohorts only
    }
    assert all(any("clipping norm of a round" in a for a in g.assumptions) for g in provable)


def test_rows_have_the_sides_that_single_updates_have():
    rng = np.random.default_rng(0)
    rows = {"a": rng.normal(size=(50, 3, 2)), "b": rng.normal(size=(50, 1))}
    rows = {
        name: array * np.geomspace(1e-200, 1e200, 50).reshape(-1, *[1] * (array.ndim - 1))
        for name, array in rows.items()
    }
    rows["a"][7], rows["b"][7] = 0.0, 0.0
    ours = rows_with_sides(rows, 0.5, 3.0)
    for number in range(50):
        theirs = with_side({name: array[number] for name, array in rows.items()}, 0.5, 3.0)
        np.testing.assert_allclose(ours[SIDE][number], theirs[SIDE])
        np.testing.assert_allclose(ours["a"][number], theirs["a"], rtol=1e-9)


@pytest.mark.parametrize("norms", [(0.0, 0.4, 3.0), (3.0, 3.0, 0.4)])
def test_users_in_all_silos_move_the_sum_by_at_most_one_bound(norms):
    """Weights of 1/3 in three silos, with parts of any lengths and directions."""
    protection = ClipAndNoise(
        of_units=True, clipping_norm=1.0, noise_stddev=1.0, adaptive_norm=0.6, side_weight=1.6
    )
    rng, moved = torch.Generator().manual_seed(0), None
    for norm in norms:
        row = torch.randn(1, 9, generator=rng, dtype=torch.float64)
        part = protection.sum_units({"a": row / row.norm() * norm}, [1 / 3]).value
        moved = part if moved is None else {n: part[n] + moved[n] for n in part}
    assert l2_norm(moved) <= 1.0


def test_a_silo_without_users_sends_a_sum_with_room_for_sides():
    data = [silo_data([0, 1], [1.0, 2.0]), silo_data([2], [1.0])]
    empty = silo_data([0], [1.0])
    empty = type(empty)(train=empty.train.subset([]), test=empty.test, owners=empty.owners[:0])
    norms, _ = start(quiet_clipping(), 2, data=[*data, empty])
    assert len(norms) == 3


def test_methods_and_sums_that_cannot_follow_a_norm_are_refused_by_name():
    pytest.importorskip("gmpy2")
    with pytest.raises(ValueError, match=r"sum=weighted_sum\(…\): expected a number"):
        start(quiet_clipping(), 1, weighting="by-records", sum=weighted_sum())
    with pytest.raises(ValueError, match="expected a number.*clip each user's update"):
        FederatedStrategy(UldpNaive(num_silos=SILOS, local=ONE_STEP), plan_of(quiet_clipping()))
