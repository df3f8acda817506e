"""The vector of an update and its side, the noise on both, and the steps of the norm."""

import math

import numpy as np
import pytest
import torch

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdaptiveClipping,
    FixedSizeSampling,
    FullParticipation,
    NonFiniteUpdate,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureScores,
    SecureSum,
    SeededNoise,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.adaptive_clipping import (
    SIDE,
    with_room_for_side,
    with_side,
)
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from tests.support.plans import release_plan

NORM, SIGMA, COHORT = 0.3, 1.5, 40
LIKE = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
SUMMARY = RunSummary(method=MethodTraits(name="test"), participations=Participations())
PLACEMENTS = ("client", "server", SecureSum(colluding=0.0, dropouts=0.2))


def plan(clipping_norm=None, **changes):
    clipping_norm = clipping_norm or AdaptiveClipping(initial_norm=NORM)
    fields = {"clipping_norm": clipping_norm, "noise_multiplier": SIGMA, "delta": 1e-3, **changes}
    return release_plan(COHORT, **fields)


def update(norm, rng):
    drawn = {name: rng.standard_normal(array.shape) for name, array in LIKE.items()}
    return {name: a * (norm / l2_norm(drawn)) for name, a in drawn.items()}


def difference(one, other):
    return {name: one[name] - other[name] for name in one}


@pytest.mark.parametrize("count_noise_stddev", [None, 0.8, 1.5, 100.0])
def test_noise_of_update_and_count_is_one_gaussian_of_the_plans_multiplier(count_noise_stddev):
    mechanism = plan(
        AdaptiveClipping(initial_norm=NORM, count_noise_stddev=count_noise_stddev)
    ).mechanism()
    sigma_b = count_noise_stddev or max(COHORT / 20, SIGMA)
    on_update = mechanism.noise_stddev / NORM
    assert mechanism.noise_stddev / mechanism.side_weight == pytest.approx(sigma_b)
    assert on_update**-2 + (2 * sigma_b) ** -2 == pytest.approx(SIGMA**-2)
    assert mechanism.clipping_norm == pytest.approx(math.hypot(NORM, mechanism.side_weight / 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_no_vector_exceeds_the_bound_and_no_distance_twice_the_bound(dtype):
    rng = np.random.default_rng(1)
    mechanism = plan(AdaptiveClipping(initial_norm=NORM, count_noise_stddev=0.76)).mechanism()
    bound, vectors = mechanism.clipping_norm, []
    for factor in (1e-3, 0.5, 1 - 1e-12, 1.0, 1 + 1e-6, 3.0, 1e4):
        tensors = {n: torch.from_numpy(a).to(dtype) for n, a in update(NORM * factor, rng).items()}
        vectors.append(with_side(tensors, NORM, mechanism.side_weight))
        vectors.append({name: -array for name, array in vectors[-1].items()})
    longest = max(map(l2_norm, vectors))
    assert 0.999 * bound < longest <= bound * (1 + 1e-15)
    apart = max(l2_norm(difference(one, other)) for one in vectors for other in vectors)
    assert 1.99 * bound < apart <= 2 * bound * (1 + 1e-15)


def test_the_side_shows_if_an_update_is_within_the_norm_unless_zero():
    rng = np.random.default_rng(2)
    sides = [float(with_side(update(NORM * f, rng), NORM, 2.0)[SIDE][0]) for f in (0.99, 1.01)]
    assert sides == [1.0, -1.0]
    assert not any(array.any() for array in with_side(LIKE, NORM, 2.0).values())
    with pytest.raises(NonFiniteUpdate):
        with_side({**LIKE, "b": np.full(4, np.nan, np.float32)}, NORM, 2.0)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_removing_a_client_moves_the_sum_by_at_most_the_bound(placement):
    """With bits of zero updates, as in the paper, the largest move would be √(C² + κ²)."""
    rng = np.random.default_rng(3)
    clipping = AdaptiveClipping(initial_norm=NORM, count_noise_stddev=0.8)
    mechanism = plan(clipping, noise_placement=placement).mechanism()
    protection = mechanism.protection(SUMMARY, COHORT)

    class Silence(SeededNoise):
        def add_gaussian(self, update, stddev, *, grid=None):
            return update

        def add_discrete_gaussian(self, cells, stddev):
            return cells

    def contribution(update):
        if placement == "server":
            summed = mechanism.begin_sum(LIKE)
            summed.add(update)
            return summed.value
        sent = protection.released(update, Silence(1))
        cell = protection.cell or 1.0
        return {name: np.asarray(array, np.float64) * cell for name, array in sent.items()}

    moved = [
        l2_norm(difference(contribution(update(NORM * factor, rng)), contribution(LIKE)))
        for factor in (1e-6, 0.4, 1.0, 1.001, 50.0)
    ]
    assert 0.999 * mechanism.clipping_norm < max(moved) <= mechanism.clipping_norm
    naive = math.hypot(NORM, mechanism.side_weight)
    assert naive > 1.2 * mechanism.clipping_norm


def test_a_server_that_asks_for_a_heavier_side_gets_no_longer_vector():
    """The client clips the whole vector to the bound for which it adds noise."""
    protection = plan().mechanism().protection(SUMMARY, COHORT)
    heavy = type(protection)(
        **{**vars(protection), "side_weight": 1e6, "noise_stddev": 1e-9, "noise_grid": None}
    )
    sent = heavy.released({n: a + 1.0 for n, a in LIKE.items()}, SeededNoise(1))
    assert l2_norm(sent) <= heavy.clipping_norm * (1 + 1e-6)


@pytest.mark.parametrize("sampling", [FullParticipation(COHORT), PoissonSampling(400, 0.1)])
@pytest.mark.parametrize("count_noise_stddev", [None, 0.76, 1e4])
def test_epsilon_is_exactly_that_of_a_fixed_norm(sampling, count_noise_stddev):
    adaptive = plan(
        AdaptiveClipping(count_noise_stddev=count_noise_stddev), sampling=sampling
    ).mechanism()
    fixed = plan(1.0, sampling=sampling).mechanism()
    participations = Participations()
    for _ in range(3):
        participations.record(range(10), 10)
    run = RunSummary(method=SUMMARY.method, participations=participations)
    for _ in range(2):  # whatever the norm
        assert adaptive.release == fixed.release
        pairs = zip(adaptive.guarantees(run), fixed.guarantees(run), strict=True)
        for one, other in pairs:
            assert (one.view, one.epsilon, one.relation) == (
                other.view,
                other.epsilon,
                other.relation,
            )
            assert "a function of earlier releases" in one.statement()
        adaptive = adaptive.restored({"adaptive_norm": 77.0})


def test_noise_is_calibrated_as_for_a_fixed_norm():
    facts = {"epsilon": 2.0, "delta": 1e-5, "rounds": 10, "sampling": PoissonSampling(1000, 0.1)}
    adaptive = ReleasePlan.for_target(clipping_norm=AdaptiveClipping(), **facts)
    assert (
        adaptive.noise_multiplier
        == ReleasePlan.for_target(clipping_norm=1.0, **facts).noise_multiplier
    )
    assert "adaptive from 0.1 to the quantile 0.5" in adaptive.describe()


def test_the_norm_follows_the_released_fraction_down_if_most_are_within_it():
    clipping = AdaptiveClipping(initial_norm=1.0, quantile=0.3, learning_rate=0.5)
    mechanism = plan(clipping).mechanism()

    def next_norm(fraction):
        mean = {**LIKE, SIDE: np.array([(fraction - 0.5) * mechanism.side_weight])}
        released = Aggregate(value=mean, answered=COHORT, topped_up_stddev=0.0)
        shown, following = mechanism.after(released)
        assert shown.value.keys() == LIKE.keys()
        assert following.state == {"adaptive_norm": following.adaptive_norm}
        assert following.noise_stddev == pytest.approx(
            mechanism.noise_stddev * following.adaptive_norm
        )
        return following.adaptive_norm

    assert next_norm(0.3) == pytest.approx(1.0)
    assert next_norm(1.0) == pytest.approx(math.exp(-0.35))
    assert next_norm(0.0) == pytest.approx(math.exp(0.15))


def test_the_norm_stays_within_public_limits_whatever_the_noise():
    clipping = AdaptiveClipping(initial_norm=1.0, min_norm=0.5, max_norm=3.0)
    assert clipping.next_norm(1.0, 1e300) == 0.5
    assert clipping.next_norm(1.0, -1e300) == 3.0


@pytest.mark.parametrize(
    "changes",
    [
        {"initial_norm": 0.0},
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"learning_rate": -0.1},
        {"count_noise_stddev": 0.0},
        {"count_noise_stddev": math.nan},
        {"min_norm": 0.2},
        {"max_norm": 0.05},
        {"max_norm": math.inf},
    ],
)
def test_fields_out_of_range_are_refused_by_name(changes):
    with pytest.raises(InvalidValue, match=f"{next(iter(changes))}=|initial_norm="):
        AdaptiveClipping(**changes)


def test_counts_that_leave_no_noise_for_updates_are_refused():
    with pytest.raises(
        InvalidValue, match="count_noise_stddev=0.75 with noise_multiplier=1.5: expected more"
    ):
        plan(AdaptiveClipping(count_noise_stddev=0.75))
    # A twentieth of three clients is below half of any usual multiplier.
    assert plan(sampling=FullParticipation(3)).mechanism().clipping_norm == pytest.approx(
        NORM / math.sqrt(0.75)
    )


def test_methods_whose_silos_clip_no_single_user_are_refused():
    with pytest.raises(InvalidValue, match="clipping_norm=AdaptiveClipping.*expected a number"):
        plan().mechanism(MethodTraits(name="silos", num_silos=2))


def test_a_query_keeps_its_norm_and_reserves_its_name():
    query = SecureScores(noise_multiplier=3.0)
    secure = {"noise_placement": PLACEMENTS[2], "sampling": FixedSizeSampling(80, COHORT)}
    mechanism = plan(**secure, queries=(query,)).mechanism()
    (of_query,) = mechanism.query_sums
    assert of_query.clipping_norm == query.norm
    assert of_query.upload_like({"vector": np.zeros(2)}).keys() == {"vector"}
    assert mechanism.unit is PrivacyUnit.CLIENT
    with pytest.raises(InvalidValue, match="expected a different name"):
        with_room_for_side({SIDE: np.zeros(1)})
