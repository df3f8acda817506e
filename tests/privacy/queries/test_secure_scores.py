"""Scores as one noised sum: bounded whatever they are, and paid for together with the rounds."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureScores,
    SecureSum,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.participations import Participations
from tests.support.guarantees import by_view
from tests.support.plans import mechanism_of, release_plan

BOUNDS = (("accuracy", 0.0, 1.0), ("loss", 0.5, 4.5))
SCORES = SecureScores(noise_multiplier=3.0, times=4, bounds=BOUNDS)
plan = partial(
    release_plan,
    100,
    delta=0.001,
    noise_placement=SecureSum(colluding=0.1, dropouts=0.1),
    queries=(SCORES,),
)


class Scored:
    """A client whose model has these scores; the training loss only if it is asked for."""

    def __init__(self, **scores):
        self.data, self._scores, self.training = None, scores, []

    def scores(self, *, training):
        self.training.append(training)
        return self._scores


def vector(**scores):
    return SCORES.vector(Scored(**scores))


ODD = [0.0, 0.3, 1.0, 100.0, -5.0, 1e308, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("accuracy", ODD)
@pytest.mark.parametrize("loss", ODD)
def test_no_score_whatever_it_is_makes_a_vector_longer_than_its_bound(accuracy, loss):
    scored = vector(accuracy=accuracy, loss=loss, other=1e9)
    assert scored.shape == (SCORES.size,) == (3,)
    assert scored[0] == 1
    assert np.linalg.norm(scored) <= SCORES.norm
    assert np.abs(scored[1:]).max() <= 0.5


def test_a_client_without_scores_adds_nothing_and_a_missing_score_counts_half():
    np.testing.assert_array_equal(vector(), np.zeros(3))
    np.testing.assert_array_equal(vector(accuracy=0.75), [1.0, 0.25, 0.0])


def test_a_client_computes_its_training_loss_only_for_such_a_score():
    for name, expected in (("loss", False), ("training_loss", True)):
        client = Scored(**{name: 1.0})
        bounds = ((name, 0.0, 4.0),)
        SecureScores(noise_multiplier=3.0, bounds=bounds).vector(client)
        assert client.training == [expected]


def test_means_are_those_of_the_clipped_scores_of_clients_that_have_some():
    scores = [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 1.0, "loss": 9.0}, {}]
    total = np.sum([vector(**one) for one in scores], axis=0)
    means = SCORES.answer(total, 0.0)
    assert means["scored_clients"] == 2
    assert means["accuracy_mean"] == pytest.approx(0.75)
    assert means["loss_mean"] == pytest.approx((1.0 + 4.5) / 2)  # 9 is clipped to 4.5
    assert SCORES.answer(np.array([0.9, 0.0, 0.0]), 1.0) == {}


@pytest.mark.parametrize("mean", [0.0, 0.6, 1.0])
def test_the_error_of_a_mean_is_the_spread_that_noise_gives_it(mean):
    rng = np.random.default_rng(3)
    exact = 500 * np.array([1.0, mean - 0.5, 0.0])
    draws = [SCORES.answer(exact + rng.normal(0, 10, 3), 10.0) for _ in range(4000)]
    means = np.array([one["accuracy_mean"] for one in draws])
    error = np.mean([one["accuracy_mean_error"] for one in draws])
    assert means.mean() == pytest.approx(mean, abs=6 * error / np.sqrt(4000))
    assert means.std() == pytest.approx(error, rel=0.08)  # 7 stddevs of it, of 4,000 draws


def test_what_no_sum_of_scores_can_be_is_refused_by_name():
    for wrong, message in (
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"times": 0}, "times=0"),
        ({"bounds": ()}, "expected one or more scores"),
        ({"bounds": (*BOUNDS, BOUNDS[0])}, "each name once"),
        ({"bounds": (("loss", 0.0, math.inf),)}, "bounds of 'loss'"),
        ({"bounds": (("loss", 1.0, 1.0),)}, "bounds of 'loss'"),
    ):
        with pytest.raises(ValueError, match=message):
            SecureScores(**{"noise_multiplier": 1.0, "times": 1, **wrong})
    for placement in ("client", "server"):
        with pytest.raises(ValueError, match=r"noise_placement=.*expected noise_placement=Secure"):
            plan(noise_placement=placement)
    with pytest.raises(ValueError, match="expected each kind of query at most once"):
        plan(queries=(SCORES, SecureScores(noise_multiplier=1.0)))
    with pytest.raises(ValueError, match="nothing bounds what one user contributes"):
        mechanism_of(plan(), silos=5)
    with pytest.raises(ValueError, match="in secure sums: expected one from"):
        plan(queries=(SecureScores(noise_multiplier=1e6, times=1),)).mechanism()


@pytest.mark.parametrize(
    "sampling", [FullParticipation(300), FixedSizeSampling(population=300, size=30)]
)
def test_rounds_and_evaluations_together_keep_to_the_target(sampling):
    facts = {"epsilon": 2.0, "delta": 1e-3, "sampling": sampling, "rounds": 20}
    options = {"clipping_norm": 1.0, "noise_placement": SecureSum()}
    scores = SecureScores(noise_multiplier=30.0, times=4)
    planned = ReleasePlan.for_target(**facts, **options, queries=(scores,))
    alone = ReleasePlan.for_target(**facts, **options)
    assert planned.noise_multiplier > alone.noise_multiplier
    mechanism, done = planned.mechanism(), Participations()
    for _ in range(20):
        done.record(range(10), 9, needed=10)
    for _ in range(4):
        mechanism.query_sums[0].count_answer(done)
    epsilon = privacy_loss_of(mechanism.releases(done), delta=1e-3).epsilon
    assert 1.9 < epsilon <= 2.0
    less = replace(planned, noise_multiplier=0.9 * planned.noise_multiplier).mechanism()
    assert privacy_loss_of(less.releases(done), delta=1e-3).epsilon > 2.0


def test_queries_with_equal_noise_all_count_against_the_target():
    class OtherScores(SecureScores):
        name = "other scores"
        schedule = "first"

    noise = {"noise_multiplier": 30.0, "times": 4}
    mechanism = ReleasePlan.for_target(
        epsilon=2.0,
        delta=1e-3,
        sampling=FullParticipation(300),
        rounds=20,
        clipping_norm=1.0,
        noise_placement=SecureSum(),
        queries=(SecureScores(**noise), OtherScores(**noise)),
    ).mechanism()
    scores, others = (sums.release for sums in mechanism.query_sums)
    assert scores == others
    epsilon = privacy_loss_of({mechanism.release: 20, scores: 4 + 4}, delta=1e-3).epsilon
    assert 1.9 < epsilon <= 2.0


def test_evaluations_that_leave_no_room_for_a_round_are_refused():
    scores = SecureScores(noise_multiplier=0.5, times=4)
    with pytest.raises(ValueError, match="such as its evaluations, alone spend"):
        ReleasePlan.for_target(
            epsilon=1.0,
            delta=1e-3,
            sampling=FullParticipation(300),
            rounds=5,
            clipping_norm=1.0,
            noise_placement=SecureSum(),
            queries=(scores,),
        )


def test_each_adversary_pays_for_evaluations_by_the_noise_that_it_sees():
    """90 of 100 answers make up the noise of a sum, 80 of them honest."""
    mechanism, done = plan().mechanism(), Participations()
    for _ in range(3):
        done.record(range(100), 80, needed=90)
    for _ in range(4):
        mechanism.query_sums[0].count_answer(done)
    guarantees = by_view(mechanism, done)
    precision = 3 / 1.0**2 + 4 / 3.0**2
    for view, factor in (
        (AdversaryView.RELEASED_MODELS, 1.0),
        (AdversaryView.SUM_ONLY, 90 / 80),
        (AdversaryView.EACH_UPLOAD, 90.0),
    ):
        expected = gaussian_loss(1.0, releases=precision * factor, delta=0.001).epsilon
        assert guarantees[view].epsilon == pytest.approx(expected), view
        assert "4 sums of scores" in guarantees[view].source


def test_a_sum_of_scores_is_one_of_all_clients_whoever_trains():
    drawn = plan(sampling=FixedSizeSampling(population=100, size=40)).mechanism()
    (score_sum,) = drawn.query_sums
    assert score_sum.num_members == 100
    assert score_sum.masked.parameters.members == 100
    assert score_sum.release.relation == drawn.release.relation
    assert score_sum.clipping_norm == pytest.approx(math.sqrt(1.5))
    with pytest.raises(ValueError, match="with Poisson sampling"):
        plan(sampling=PoissonSampling(100, 0.1)).mechanism()


def test_participations_remember_answers():
    done = Participations()
    done.record([1], 1)
    plan().mechanism().query_sums[0].count_answer(done)
    again = Participations.from_dict(done.to_dict())
    assert again.answers == {"scores": 1}
    assert (again.in_sums, again.in_uploads) == (done.in_sums, done.in_uploads)
