"""Scores as one noised sum: bounded whatever they are, and paid for together with the rounds."""

import math

import numpy as np
import pytest

from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureScores,
    SecureSum,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.secure_scores import scores_vector
from flower_ext.privacy.theorems.client_level import client_level_guarantees

BOUNDS = (("accuracy", 0.0, 1.0), ("loss", 0.5, 4.5))
SCORES = SecureScores(noise_multiplier=3.0, times=4, bounds=BOUNDS)


def plan(**changes):
    facts = {
        "sampling": FullParticipation(100),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.001,
        "noise_placement": SecureSum(colluding=0.1, dropouts=0.1),
        "scores": SCORES,
    }
    return ReleasePlan(**{**facts, **changes})


ODD = [0.0, 0.3, 1.0, 100.0, -5.0, 1e308, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("accuracy", ODD)
@pytest.mark.parametrize("loss", ODD)
def test_no_score_whatever_it_is_makes_a_vector_longer_than_its_bound(accuracy, loss):
    vector = scores_vector({"accuracy": accuracy, "loss": loss, "other": 1e9}, BOUNDS)
    assert vector.shape == (3,)
    assert vector[0] == 1
    assert np.linalg.norm(vector) <= SCORES.norm
    assert np.abs(vector[1:]).max() <= 0.5


def test_a_client_that_has_no_scores_adds_nothing_and_a_missing_score_is_the_middle():
    np.testing.assert_array_equal(scores_vector({}, BOUNDS), np.zeros(3))
    np.testing.assert_array_equal(scores_vector({"accuracy": 0.75}, BOUNDS), [1.0, 0.25, 0.0])


def test_means_are_those_of_the_clipped_scores_of_clients_that_have_some():
    told = [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 1.0, "loss": 9.0}, {}]
    total = np.sum([scores_vector(one, BOUNDS) for one in told], axis=0)
    found = SCORES.means(total, 0.0)
    assert found["scored_clients"] == 2
    assert found["accuracy_mean"] == pytest.approx(0.75)
    assert found["loss_mean"] == pytest.approx((1.0 + 4.5) / 2)  # 9 is clipped to 4.5
    assert SCORES.means(np.array([0.9, 0.0, 0.0]), 1.0) == {}


@pytest.mark.parametrize("mean", [0.0, 0.6, 1.0])
def test_the_error_of_a_mean_is_the_spread_that_noise_gives_it(mean):
    rng = np.random.default_rng(3)
    exact = 500 * np.array([1.0, mean - 0.5, 0.0])
    draws = [SCORES.means(exact + rng.normal(0, 10, 3), 10.0) for _ in range(4000)]
    means = np.array([one["accuracy_mean"] for one in draws])
    error = np.mean([one["accuracy_mean_error"] for one in draws])
    assert means.mean() == pytest.approx(mean, abs=6 * error / np.sqrt(4000))
    assert means.std() == pytest.approx(error, rel=0.08)  # 7 stddevs of it, of 4,000 draws


def test_what_no_sum_of_scores_can_be_is_refused_by_name():
    for wrong, said in (
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"bounds": ()}, "expected one or more scores"),
        ({"bounds": (*BOUNDS, BOUNDS[0])}, "each once"),
        ({"bounds": (("loss", 0.0, math.inf),)}, "bounds of 'loss'"),
        ({"bounds": (("loss", 1.0, 1.0),)}, "bounds of 'loss'"),
    ):
        with pytest.raises(ValueError, match=said):
            SecureScores(**{"noise_multiplier": 1.0, "evaluations": 1, **wrong})
    with pytest.raises(ValueError, match="scores: expected None without secure_aggregation"):
        plan(noise_placement="client")
    with pytest.raises(ValueError, match="test examples have no owners"):
        plan(unit=PrivacyUnit.USER)
    with pytest.raises(ValueError, match="a noise multiplier of"):
        plan(scores=SecureScores(noise_multiplier=1e6, times=1))


@pytest.mark.parametrize(
    "sampling", [FullParticipation(300), FixedSizeSampling(population=300, size=30)]
)
def test_rounds_and_evaluations_together_keep_to_the_target(sampling):
    facts = {"epsilon": 2.0, "delta": 1e-3, "sampling": sampling, "rounds": 20}
    options = {"clipping_norm": 1.0, "noise_placement": SecureSum()}
    scores = SecureScores(noise_multiplier=30.0, times=4)
    found = ReleasePlan.for_target(**facts, **options, queries=(scores,))
    alone = ReleasePlan.for_target(**facts, **options)
    assert found.noise_multiplier > alone.noise_multiplier
    done = Participations()
    for _ in range(20):
        done.record(range(10), 9, asked=10)
    for _ in range(4):
        found.count_scores(done)
    epsilon = privacy_loss_of(found.releases(done), delta=1e-3).epsilon
    assert 1.9 < epsilon <= 2.0
    less = replace_noise(found, 0.9)
    assert privacy_loss_of(less.releases(done), delta=1e-3).epsilon > 2.0


def replace_noise(own, factor):
    return ReleasePlan(**{**vars(own), "noise_multiplier": own.noise_multiplier * factor})


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
    own, done = plan(), Participations()
    for _ in range(3):
        done.record(range(100), 80, asked=90)
    for _ in range(4):
        own.count_scores(done)
    found = {
        one.view: one for one in client_level_guarantees(own, done, releases=own.releases(done))
    }
    precision = 3 / 1.0**2 + 4 / 3.0**2
    for view, factor in (
        (AdversaryView.RELEASED_MODELS, 1.0),
        (AdversaryView.SUM_ONLY, 90 / 80),
        (AdversaryView.EACH_UPLOAD, 90.0),
    ):
        expected = gaussian_loss(1.0, releases=precision * factor, delta=0.001).epsilon
        assert found[view].epsilon == pytest.approx(expected), view
        assert "4 evaluations" in found[view].source


def test_a_sum_of_scores_is_one_of_all_clients_whoever_trains():
    own = plan(sampling=FixedSizeSampling(population=100, size=40)).of_scores
    assert own.cohort_size == 100
    assert own.sum_parameters.members == 100
    assert own.release.relation == plan(sampling=FixedSizeSampling(100, 40)).release.relation
    assert own.clipping_norm == pytest.approx(math.sqrt(1.5))
    with pytest.raises(ValueError, match="with Poisson sampling"):
        plan(sampling=PoissonSampling(100, 0.1))


def test_participations_remember_evaluations():
    done = Participations()
    done.record([1], 1)
    plan().count_scores(done)
    again = Participations.from_dict(done.to_dict())
    assert again.evaluations == 1
    assert (again.in_sums, again.in_uploads) == (done.in_sums, done.in_uploads)
    assert Participations.from_dict({"rounds": 0, "units": []}).evaluations == 0
