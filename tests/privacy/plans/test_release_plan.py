import math

import numpy as np
import pytest
import torch

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    NonFiniteUpdate,
    PoissonSampling,
    ReleasePlan,
    SecureNoise,
    SeededNoise,
    privacy_loss_of,
)
from flower_ext.privacy.mechanisms.plan import RoundDiscarded

DIMENSION = 200_000
LIKE = {"a": np.zeros(DIMENSION - 1, np.float32), "b": np.zeros((), np.float32)}


def plan(sampling=None, **changes) -> ReleasePlan:
    facts = {
        "sampling": sampling or PoissonSampling(50, 0.2),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.5,
        "rounds": 10,
        "delta": 1e-2,
    }
    return ReleasePlan(**{**facts, **changes})


def upload(the_plan: ReleasePlan, cohort_size: int, seed: int):
    """Return the upload of a client without an update: only its share of the noise."""
    stddev = the_plan.client_noise_stddev(cohort_size)
    return SeededNoise(seed, "client").add_gaussian(LIKE, stddev)


def released_stddev(aggregate, the_plan) -> float:
    values = np.append(aggregate.value["a"], aggregate.value["b"]).astype(np.float64)
    return float(values.std() * the_plan.sampling.expected_cohort_size)


@pytest.mark.parametrize("cohort_size", [1, 4, 10, 20])
@pytest.mark.parametrize("lost", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_any_dropout_leaves_the_accounted_noise(cohort_size, lost):
    """The sum has noise σC for every cohort and number of answers; detects ±2 %."""
    the_plan = plan()
    answered = round((1 - lost) * cohort_size)
    uploads = [upload(the_plan, cohort_size, seed) for seed in range(answered)]
    aggregate = the_plan.aggregate(uploads, cohort_size=cohort_size, noise=SecureNoise(), like=LIKE)
    assert released_stddev(aggregate, the_plan) == pytest.approx(the_plan.noise_stddev, rel=0.01)
    missing = 1 - answered / cohort_size
    expected = the_plan.noise_stddev * math.sqrt(missing)
    assert aggregate.topped_up_stddev == pytest.approx(expected)


def test_an_empty_poisson_cohort_releases_pure_noise():
    aggregate = plan().aggregate([], cohort_size=0, noise=SecureNoise(), like=LIKE)
    assert released_stddev(aggregate, plan()) == pytest.approx(0.75, rel=0.01)


def test_discarding_releases_nothing_when_a_reply_is_missing_and_all_when_none_is():
    the_plan = plan()
    uploads = [upload(the_plan, 3, seed) for seed in range(3)]
    with pytest.raises(RoundDiscarded, match="2 of 3"):
        the_plan.aggregate(uploads[:2], cohort_size=3, noise=SecureNoise(), like=LIKE)
    whole = the_plan.aggregate(uploads, cohort_size=3, noise=SecureNoise(), like=LIKE)
    assert whole.topped_up_stddev == 0.0


def test_the_sum_is_divided_by_a_public_constant_not_by_who_answered():
    the_plan = plan(FixedSizeSampling(50, 10), noise_placement="server", noise_multiplier=1e-9)
    like = {"a": np.zeros(2)}
    for answered in (1, 4):
        uploads = [{"a": np.array([0.3, 0.0])}] * answered
        value = the_plan.aggregate(uploads, cohort_size=10, noise=SecureNoise(), like=like).value
        np.testing.assert_allclose(value["a"], [0.3 * answered / 10, 0.0], atol=1e-7)


def test_a_server_that_noises_bounds_every_upload_itself():
    the_plan = plan(noise_placement="server", noise_multiplier=1e-9)
    like = {"a": np.zeros(2)}
    hostile = {"a": np.array([1e30, -1e30])}
    value = the_plan.aggregate([hostile], cohort_size=1, noise=SecureNoise(), like=like).value
    assert np.linalg.norm(value["a"]) * 10 == pytest.approx(0.5, rel=1e-6)
    assert the_plan.client_noise_stddev(5) == 0.0


def test_server_noise_is_all_of_it():
    the_plan = plan(noise_placement="server")
    aggregate = the_plan.aggregate([LIKE] * 4, cohort_size=9, noise=SecureNoise(), like=LIKE)
    assert released_stddev(aggregate, the_plan) == pytest.approx(0.75, rel=0.01)
    assert aggregate.topped_up_stddev == 0.0


@pytest.mark.parametrize("like", [np.zeros(3, np.float32), np.zeros(3, np.float16), torch.zeros(3)])
def test_the_release_has_the_type_of_the_model(like):
    value = plan().aggregate([], cohort_size=0, noise=SecureNoise(), like={"a": like}).value["a"]
    assert type(value) is type(like)
    assert value.dtype == like.dtype


def test_more_uploads_than_were_asked_for_are_refused():
    with pytest.raises(ValueError, match="2 uploads from a cohort of 1"):
        plan().aggregate([LIKE] * 2, cohort_size=1, noise=SecureNoise(), like=LIKE)


def test_what_is_accounted_is_what_is_planned():
    the_plan = plan()
    assert the_plan.release.sampling is the_plan.sampling
    assert the_plan.release.noise_multiplier == the_plan.noise_stddev / the_plan.clipping_norm
    assert plan(FixedSizeSampling(9, 3)).relation is NeighboringRelation.REPLACE_ONE
    assert plan(PoissonSampling(9, 0.3)).relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert plan(FullParticipation(9)).relation is NeighboringRelation.ADD_OR_REMOVE_ONE


def test_a_plan_for_a_target_meets_it():
    made = ReleasePlan.for_target(
        epsilon=2.0,
        delta=1e-2,
        sampling=PoissonSampling(100, 0.1),
        rounds=60,
        clipping_norm=0.1,
        noise_placement="server",
    )
    spent = privacy_loss_of({made.release: 60}, delta=1e-2).epsilon
    assert 1.99 < spent <= 2.0
    assert made.noise_placement == "server"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clipping_norm", 0.0),
        ("clipping_norm", math.inf),
        ("noise_multiplier", 0.0),
        ("noise_multiplier", math.nan),
        ("rounds", 0),
        ("noise_multiplier", math.inf),
        ("sensitivity", 0.0),
        ("sensitivity", math.inf),
        ("sensitivity", math.nan),
        ("delta", 0.0),
        ("delta", 1.0),
        ("noise_placement", "nowhere"),
        ("dropout_policy", "hope"),
        ("relation", NeighboringRelation.REPLACE_ONE),
    ],
)
def test_unfit_plans_are_refused_by_field(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        plan(**{field: value})


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_upload_releases_nothing(placement, value):
    plan = ReleasePlan(
        sampling=PoissonSampling(50, 0.2),
        clipping_norm=0.5,
        noise_multiplier=1.5,
        rounds=10,
        delta=1e-2,
        noise_placement=placement,
    )
    with pytest.raises(NonFiniteUpdate):
        plan.aggregate(
            [{"a": np.array([1.0, value])}],
            cohort_size=2,
            noise=SecureNoise(),
            like={"a": np.zeros(2)},
        )


def test_a_few_of_many_missing_are_topped_up_too():
    plan = ReleasePlan(
        sampling=PoissonSampling(400, 0.5),
        clipping_norm=0.5,
        noise_multiplier=1.5,
        rounds=10,
        delta=1e-2,
    )
    like = {"a": np.zeros(1_000)}
    uploads = [like] * 399  # uploads without noise, so that only the top-up is left
    value = plan.aggregate(uploads, cohort_size=400, noise=SecureNoise(), like=like).value["a"]
    expected = plan.noise_stddev / math.sqrt(400)
    assert value.std() * 200 == pytest.approx(expected, rel=0.15)


def test_a_unit_that_moves_a_sum_further_is_accounted_with_less_noise():
    far = plan(FullParticipation(4), noise_multiplier=6.0, sensitivity=3.0)
    near = plan(FullParticipation(4), noise_multiplier=2.0)
    assert far.release == near.release
    assert far.noise_stddev == 6.0 * far.clipping_norm
    target = {"epsilon": 2.0, "delta": 1e-3, "rounds": 5, "clipping_norm": 1.0}
    aimed = ReleasePlan.for_target(sampling=FullParticipation(4), sensitivity=3.0, **target)
    assert 1.99 < privacy_loss_of({aimed.release: 5}, delta=1e-3).epsilon <= 2.0


@pytest.mark.parametrize("relation", [*NeighboringRelation])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_plan_for_a_target_meets_it_under_the_relation_and_the_accountant_asked_for(
    relation, accountant
):
    made = ReleasePlan.for_target(
        epsilon=2.0,
        delta=1e-3,
        sampling=FullParticipation(9),
        rounds=5,
        clipping_norm=1.0,
        relation=relation,
        accountant=accountant,
    )
    spent = privacy_loss_of({made.release: 5}, delta=1e-3, accountant=accountant).epsilon
    assert made.relation is relation
    assert 1.98 < spent <= 2.0


def test_a_plan_for_one_round_is_a_plan():
    assert plan(rounds=1).rounds == 1


@pytest.mark.parametrize("placement", ["client", "server"])
def test_every_sum_lies_on_a_grid_that_tells_nothing_of_its_cohort(placement):
    """A client's share of noise depends on the cohort's size; a grid made of it would show it."""
    like = {"a": np.zeros(3_000)}
    the_plan = plan(noise_placement=placement)
    rng, finest = np.random.default_rng(0), set()
    for cohort_size in (1, 2, 5, 16, 64, 300):
        for answered in {cohort_size, cohort_size - 1, cohort_size // 2}:
            value = {"a": rng.normal(size=3_000) / 200}
            stddev = the_plan.client_noise_stddev(cohort_size)
            uploads = [
                SecureNoise().add_gaussian(value, stddev, grid=the_plan.noise_grid)
                for _ in range(answered)
            ]
            made = the_plan.aggregate(
                uploads, cohort_size=cohort_size, noise=SecureNoise(), like=like
            )
            whole = np.rint(made.value["a"] * 10 / the_plan.noise_grid)  # the mean is over 10
            np.testing.assert_array_equal(made.value["a"], whole * the_plan.noise_grid / 10)
            finest.add(int((whole % 2 == 1).mean() * 4))  # odd multiples: half of them
    assert finest <= {1, 2}
