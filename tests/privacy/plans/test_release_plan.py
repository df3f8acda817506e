"""Plans of noised sums: every release carries the noise that is accounted for."""

import math

import numpy as np
import pytest
import torch

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    Budget,
    CorrelatedNoise,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NeighboringRelation,
    NonFiniteUpdate,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureNoise,
    SecureSum,
    SeededNoise,
    SpacedSampling,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.shared_ledger import Charge, charge
from flower_ext.privacy.study_composition import total_spent
from tests.support.grids import grid
from tests.support.plans import release_plan
from tests.support.sums import aggregate

DIMENSION = 200_000
LIKE = {"a": np.zeros(DIMENSION - 1, np.float32), "b": np.zeros((), np.float32)}


def mechanism_of(sampling=None, **changes):
    """Return the mechanism of a plan."""
    fields = {"noise_multiplier": 1.5, "rounds": 10, "delta": 1e-2, **changes}
    return release_plan(50, sampling or PoissonSampling(50, 0.2), **fields).mechanism()


def upload(mechanism, cohort_size: int, seed: int):
    """Return the upload of a client without an update: only its share of the noise."""
    stddev = mechanism.client_noise_stddev(cohort_size)
    return SeededNoise(seed, "client").add_gaussian(LIKE, stddev)


def released_stddev(released, mechanism) -> float:
    values = np.append(released.value["a"], released.value["b"]).astype(np.float64)
    return float(values.std() * mechanism.sampling.expected_cohort_size)


@pytest.mark.parametrize("cohort_size", [1, 4, 10, 20])
@pytest.mark.parametrize("lost", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_any_dropout_leaves_the_accounted_noise(cohort_size, lost):
    """The sum has noise σC for every cohort and number of answers; detects ±2 %."""
    mechanism = mechanism_of()
    answered = round((1 - lost) * cohort_size)
    uploads = [upload(mechanism, cohort_size, seed) for seed in range(answered)]
    released = aggregate(
        mechanism, uploads, cohort_size=cohort_size, noise=SecureNoise(), like=LIKE
    )
    assert released_stddev(released, mechanism) == pytest.approx(mechanism.noise_stddev, rel=0.01)
    missing = 1 - answered / cohort_size
    expected = mechanism.noise_stddev * math.sqrt(missing)
    assert released.topped_up_stddev == pytest.approx(expected)


def test_an_empty_poisson_cohort_releases_pure_noise():
    released = aggregate(mechanism_of(), [], cohort_size=0, noise=SecureNoise(), like=LIKE)
    assert released_stddev(released, mechanism_of()) == pytest.approx(0.75, rel=0.01)


def test_the_sum_is_divided_by_a_public_constant():
    mechanism = mechanism_of(
        FixedSizeSampling(50, 10), noise_placement="server", noise_multiplier=1e-9
    )
    like = {"a": np.zeros(2)}
    for answered in (1, 4):
        uploads = [{"a": np.array([0.3, 0.0])}] * answered
        value = aggregate(mechanism, uploads, cohort_size=10, noise=SecureNoise(), like=like).value
        np.testing.assert_allclose(value["a"], [0.3 * answered / 10, 0.0], atol=1e-7)


def test_a_server_that_noises_bounds_every_upload_itself():
    mechanism = mechanism_of(noise_placement="server", noise_multiplier=1e-9)
    like = {"a": np.zeros(2)}
    hostile = {"a": np.array([1e30, -1e30])}
    value = aggregate(mechanism, [hostile], cohort_size=1, noise=SecureNoise(), like=like).value
    assert np.linalg.norm(value["a"]) * 10 == pytest.approx(0.5, rel=1e-6)
    assert mechanism.client_noise_stddev(5) == 0.0


def test_the_server_alone_adds_the_whole_noise():
    mechanism = mechanism_of(noise_placement="server")
    released = aggregate(mechanism, [LIKE] * 4, cohort_size=9, noise=SecureNoise(), like=LIKE)
    assert released_stddev(released, mechanism) == pytest.approx(0.75, rel=0.01)
    assert released.topped_up_stddev == 0.0


@pytest.mark.parametrize("like", [np.zeros(3, np.float32), np.zeros(3, np.float16), torch.zeros(3)])
def test_the_release_has_the_type_of_the_model(like):
    value = aggregate(
        mechanism_of(), [], cohort_size=0, noise=SecureNoise(), like={"a": like}
    ).value["a"]
    assert type(value) is type(like)
    assert value.dtype == like.dtype


def test_more_uploads_than_were_asked_for_are_refused():
    with pytest.raises(ValueError, match="2 uploads from a cohort of 1"):
        aggregate(mechanism_of(), [LIKE] * 2, cohort_size=1, noise=SecureNoise(), like=LIKE)


def test_the_accounted_events_are_the_planned_ones():
    mechanism = mechanism_of()
    assert mechanism.release.sampling is mechanism.sampling
    assert mechanism.release.noise_multiplier == mechanism.noise_stddev / mechanism.clipping_norm
    assert mechanism_of(FixedSizeSampling(9, 3)).relation is NeighboringRelation.REPLACE_ONE
    assert mechanism_of(PoissonSampling(9, 0.3)).relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert mechanism_of(FullParticipation(9)).relation is NeighboringRelation.ADD_OR_REMOVE_ONE


def test_a_plan_for_a_target_meets_it():
    made = ReleasePlan.for_target(
        epsilon=2.0,
        delta=1e-2,
        sampling=PoissonSampling(100, 0.1),
        rounds=60,
        clipping_norm=0.1,
        noise_placement="server",
    )
    spent = privacy_loss_of({made.mechanism().release: 60}, delta=1e-2).epsilon
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
        ("delta", 0.0),
        ("delta", 1.0),
        ("noise_placement", "nowhere"),
        ("relation", NeighboringRelation.REPLACE_ONE),
    ],
)
def test_unfit_plans_are_refused_by_field(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        mechanism_of(**{field: value})


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_upload_releases_nothing(placement, value):
    with pytest.raises(NonFiniteUpdate):
        aggregate(
            mechanism_of(noise_placement=placement),
            [{"a": np.array([1.0, value])}],
            cohort_size=2,
            noise=SecureNoise(),
            like={"a": np.zeros(2)},
        )


def test_a_few_of_many_missing_are_topped_up_too():
    mechanism = mechanism_of(PoissonSampling(400, 0.5))
    like = {"a": np.zeros(1_000)}
    uploads = [like] * 399  # uploads without noise, so that only the top-up is left
    mean = aggregate(mechanism, uploads, cohort_size=400, noise=SecureNoise(), like=like)
    expected = mechanism.noise_stddev / math.sqrt(400)
    assert mean.value["a"].std() * 200 == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("relation", [*NeighboringRelation])
def test_a_plan_for_a_target_meets_it_under_the_relation_asked_for(relation):
    made = ReleasePlan.for_target(
        epsilon=2.0,
        delta=1e-3,
        sampling=FullParticipation(9),
        rounds=5,
        clipping_norm=1.0,
        relation=relation,
    )
    spent = privacy_loss_of({made.mechanism().release: 5}, delta=1e-3).epsilon
    assert made.relation is relation
    assert 1.98 < spent <= 2.0


def test_a_plan_for_one_round_is_a_plan():
    assert mechanism_of(rounds=1).rounds == 1


@pytest.mark.parametrize("placement", ["client", "server"])
def test_every_sum_lies_on_a_grid_that_tells_nothing_of_its_cohort(placement):
    """A client's share of noise depends on the cohort's size; a grid made of it would show it."""
    like = {"a": np.zeros(3_000)}
    mechanism = mechanism_of(noise_placement=placement)
    rng, finest = np.random.default_rng(0), set()
    for cohort_size in (1, 2, 5, 16, 64, 300):
        for answered in {cohort_size, cohort_size - 1, cohort_size // 2}:
            value = {"a": rng.normal(size=3_000) / 200}
            stddev = mechanism.client_noise_stddev(cohort_size)
            uploads = [
                SecureNoise().add_gaussian(value, stddev, grid=mechanism.noise_grid)
                for _ in range(answered)
            ]
            made = aggregate(
                mechanism, uploads, cohort_size=cohort_size, noise=SecureNoise(), like=like
            )
            whole = np.rint(made.value["a"] * 10 / mechanism.noise_grid)  # the mean is over 10
            np.testing.assert_array_equal(made.value["a"], whole * mechanism.noise_grid / 10)
            finest.add(int((whole % 2 == 1).mean() * 4))  # odd multiples: half of them
    assert finest <= {1, 2}


SPACED = SpacedSampling(population=12, size=2, rounds_apart=3, participations=4)
NOISES = [None, CorrelatedNoise(), CorrelatedNoise(bands=2), CorrelatedNoise(bands=7)]


def spaced(correlation=NOISES[1], **changes):
    facts = {"correlation": correlation, "noise_placement": "server", "noise_multiplier": 0.8}
    return mechanism_of(SPACED, rounds=12, **{**facts, **changes})


def epsilon_of(sigma, delta=1e-2):
    return gaussian_loss(sigma, releases=1, delta=delta).epsilon


@pytest.mark.parametrize(
    "correlation", grid(NOISES, lambda noise: noise != CorrelatedNoise(bands=2))
)
def test_all_rounds_of_correlated_noise_are_one_gaussian_however_many_there_are(correlation):
    mechanism = spaced(correlation)
    sensitivity = mechanism.strategy.sensitivity(rounds_apart=3, participations=4)
    assert mechanism.noise_stddev == pytest.approx(0.8 * 0.5 * sensitivity)
    spent, participations = [], Participations()
    for _ in range(200):
        participations.record([0], 1)
        releases = mechanism.releases(participations)
        assert sum(releases.values()) == participations.rounds
        spent.append(privacy_loss_of(releases, delta=1e-2).epsilon)
    assert spent == sorted(spent)
    assert spent[-1] <= epsilon_of(0.8) * (1 + 1e-9)
    assert spent[-1] == pytest.approx(epsilon_of(0.8), rel=1e-6)
    # After few rounds ε is that of the worst client so far: after one, of one participation.
    assert spent[0] == pytest.approx(epsilon_of(0.8 * sensitivity), rel=1e-6)


def test_independent_noise_in_turns_is_a_composition_of_the_participations():
    mechanism = spaced(None)
    assert mechanism.strategy == StrategyMatrix()
    assert mechanism.noise_stddev == pytest.approx(0.8 * 0.5 * math.sqrt(4))
    participations = Participations()
    for _ in range(8):  # the most exposed client takes part in rounds 1, 4 and 7
        participations.record([0], 1)
    loss = privacy_loss_of(mechanism.releases(participations), delta=1e-2)
    expected = gaussian_loss(0.8 * math.sqrt(4), releases=3, delta=1e-2).epsilon
    assert loss.epsilon == pytest.approx(expected, rel=1e-6)


def test_the_guarantee_names_the_adversary_that_sees_cohorts_too():
    participations = Participations()
    for _ in range(12):
        participations.record([0, 1], 2)
    run = RunSummary(method=MethodTraits(name="test"), participations=participations)
    claims = spaced().guarantees(run)
    by_view = {claim.view: claim for claim in claims}
    models = by_view[AdversaryView.MODELS_AND_COHORTS]
    assert models.relation is NeighboringRelation.REPLACE_SPECIAL
    assert models.epsilon == by_view[AdversaryView.RELEASED_MODELS].epsilon < epsilon_of(0.8)
    assert "one Gaussian mechanism of noise multiplier 0.8" in models.source
    assert any("has taken part, whether it answers or not" in each for each in models.assumptions)
    assert not any("drawn" in each for each in models.assumptions)
    assert by_view[AdversaryView.SUM_ONLY].epsilon == math.inf


def test_a_target_is_that_of_all_rounds():
    terms = {"epsilon": 2.0, "delta": 1e-2, "sampling": SPACED, "clipping_norm": 0.5}
    noise = {"correlation": CorrelatedNoise(), "noise_placement": "server"}
    plans = [ReleasePlan.for_target(rounds=rounds, **terms, **noise) for rounds in (3, 12, 500)]
    assert len({plan.noise_multiplier for plan in plans}) == 1
    assert 1.99 < epsilon_of(plans[0].noise_multiplier) <= 2.0


def test_a_ledger_and_an_account_of_two_runs_compose_their_rounds(tmp_path):
    mechanism = spaced()
    ledger = Ledger(tmp_path / "ledger", budget=Budget(epsilon=epsilon_of(0.8), delta=1e-2))
    for number in range(1, 40):
        with ledger.reserve(mechanism.release_in(number), server_round=number):
            pass
    assert ledger.spent(1e-2).epsilon == pytest.approx(epsilon_of(0.8), rel=1e-4)
    ledger.close()
    account = tmp_path / "account"
    for run in ("one", "other"):
        for number in range(1, 40):
            entry = Charge(
                run=run,
                method="test",
                training=number,
                unit=PrivacyUnit.CLIENT,
                population=mechanism.sampling.population,
                relation=NeighboringRelation.REPLACE_SPECIAL,
                epsilon=1.0,
                delta=1e-2,
                release=mechanism.release_in(number),
            )
            charge(account, entry, Budget(epsilon=100.0, delta=1e-2, ledger=account))
    both = gaussian_loss(0.8, releases=2, delta=1e-2).epsilon
    assert total_spent(Ledger.read(account), 1e-2) == pytest.approx(both, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"noise_placement": "client"}, "a client did not add because it dropped out"),
        (
            {"noise_placement": SecureSum(colluding=0.0, dropouts=0.0)},
            "a client did not add because it dropped out",
        ),
        ({"clipping_norm": AdaptiveClipping()}, "expected a number"),
        ({"sampling": PoissonSampling(12, 0.2)}, "expected SpacedSampling"),
        ({"sampling": FixedSizeSampling(12, 2)}, "expected SpacedSampling"),
        ({"sampling": FullParticipation(12)}, "expected SpacedSampling"),
        ({"relation": NeighboringRelation.ADD_OR_REMOVE_ONE}, "delays the turns of all others"),
    ],
)
def test_correlated_noise_refuses_cohorts_that_break_its_bound(changes, refusal):
    facts = {"sampling": SPACED, "correlation": CorrelatedNoise(), "noise_placement": "server"}
    with pytest.raises(InvalidValue, match=refusal):
        mechanism_of(**{**facts, **changes})


@pytest.mark.parametrize("traits", [{"num_silos": 3}, {"bounds_units": True}])
def test_correlated_noise_refuses_users_in_silos(traits):
    plan = release_plan(12, SPACED, noise_placement="server", delta=1e-2)
    with pytest.raises(InvalidValue, match="counted in all silos together"):
        plan.mechanism(MethodTraits(name="test", **traits))


def test_replacing_a_client_costs_twice_as_much():
    relation = NeighboringRelation.REPLACE_ONE
    mechanism, participations = spaced(relation=relation), Participations()
    for _ in range(200):
        participations.record([0], 1)
    loss = privacy_loss_of(mechanism.releases(participations), delta=0.9)
    assert loss.epsilon == pytest.approx(epsilon_of(0.4, delta=0.9), rel=1e-6)
