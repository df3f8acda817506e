"""Guarantees of Uldp-FL's methods for whole users."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from flower_ext.privacy import (
    AdversaryView,
    DpSgd,
    FullParticipation,
    Guarantee,
    PoissonSampling,
    PrivacyUnit,
    SecureSum,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.run_summary import MethodTraits, RunSummary, SumTerms
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees
from flower_ext.privacy.theorems.uldp_theorem import (
    drawn_by_silos,
    uldp_avg_guarantees,
    uldp_closed_form,
    uldp_naive_guarantees,
)
from tests.support.guarantees import by_basis
from tests.support.plans import mechanism_of, release_plan
from tests.support.run_summary import run_summary, worst_case

DELTA = 1e-5
SILO = DpSgd(noise_multiplier=5.0, sampling_rate=0.05, steps=500)
plan = partial(release_plan, 100, clipping_norm=1.0, noise_multiplier=5.0, rounds=100, delta=DELTA)


def provable_by_view(guarantees):
    return {g.view: g.epsilon for g in guarantees if g.basis == "provable"}


def averaging_guarantees(
    plan,
    *,
    rounds,
    num_silos=5,
    weighting="equal",
    drawn=None,
    hidden_draw=None,
    sensitivity=1.0,
    **facts,
):
    """Return the guarantees of a run in which one user was drawn so many times."""
    method = MethodTraits(name="UldpAvg", num_silos=num_silos, weighting=weighting)
    seen = worst_case(rounds if drawn is None else drawn, 1)
    seen.rounds = rounds
    terms = SumTerms(hidden_draw=hidden_draw)
    run = RunSummary(method=method, participations=seen, sums=terms, **facts)
    sums = mechanism_of(plan, silos=num_silos, sensitivity=sensitivity)
    return uldp_avg_guarantees(sums, run)


def naive_guarantees(*, rounds=10, noise_multiplier=5.0, **facts):
    sums = mechanism_of(plan(noise_multiplier=5 * noise_multiplier), silos=5, sensitivity=10.0)
    return uldp_naive_guarantees(sums, run_summary(rounds=rounds, **facts))


def all_guarantees():
    """Yield the guarantees of all methods, samplings and weightings."""
    yield from naive_guarantees()
    yield from uldp_group_guarantees(SILO, group_size=5, delta=DELTA)
    for sampling in (FullParticipation(100), PoissonSampling(100, 0.3)):
        for weighting in ("equal", "by-records"):
            yield from averaging_guarantees(
                plan(sampling), num_silos=5, rounds=100, weighting=weighting
            )


def test_the_closed_form_is_the_formula_of_theorem_5_optimized():
    def at(alpha):
        return (
            100 * alpha / (2 * 25)
            + math.log((alpha - 1) / alpha)
            - (math.log(DELTA) + math.log(alpha)) / (alpha - 1)
        )

    best = min(at(1 + step / 1_000) for step in range(1, 20_000))
    closed = uldp_closed_form(noise_multiplier=5.0, rounds=100, delta=DELTA)
    assert closed == pytest.approx(best, rel=1e-6)
    assert closed <= best + 1e-12
    assert uldp_closed_form(noise_multiplier=5.0, rounds=0, delta=DELTA) == 0.0
    # Exact composition of the same Gaussians is a little less.
    exact = gaussian_loss(5.0, releases=100, delta=DELTA).epsilon
    assert 0.9 * closed < exact < closed


def test_a_user_moves_a_silo_update_by_2c_which_halves_naives_noise():
    published, provable = by_basis(naive_guarantees(rounds=10))
    assert provable.epsilon == gaussian_loss(2.5, releases=10, delta=DELTA).epsilon
    assert provable.epsilon > published.epsilon
    assert not published.conditions_hold
    assert "2C" in published.statement()
    assert provable.view is AdversaryView.EACH_UPLOAD


def test_sampling_users_helps_only_against_adversaries_that_miss_the_sample():
    full = provable_by_view(averaging_guarantees(plan(), num_silos=5, rounds=100))
    sampled = provable_by_view(
        averaging_guarantees(plan(PoissonSampling(100, 0.1)), num_silos=5, rounds=100)
    )
    models, sums = AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY
    assert sampled[models] < 0.5 * full[models]
    assert sampled[sums] == full[sums] == full[models]
    seldom = averaging_guarantees(
        plan(PoissonSampling(100, 0.1)), num_silos=5, rounds=100, drawn=18
    )
    assert provable_by_view(seldom)[sums] < full[sums]
    assert provable_by_view(seldom)[models] == sampled[models]


def test_with_equal_weights_seeing_uploads_reveals_no_more_than_sums():
    sums, uploads = AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD
    equal = provable_by_view(averaging_guarantees(plan(), num_silos=5, rounds=10))
    assert equal[uploads] == equal[sums]
    weighted = provable_by_view(
        averaging_guarantees(plan(), num_silos=5, rounds=10, weighting="by-records")
    )
    assert weighted[sums] == equal[sums]
    expected = gaussian_loss(5 / math.sqrt(5), releases=10, delta=DELTA).epsilon
    assert weighted[uploads] == pytest.approx(expected)


def test_each_guarantee_names_the_user_and_its_needs_and_survives_json():
    for guarantee in all_guarantees():
        assert guarantee.unit is PrivacyUnit.USER
        text = guarantee.statement()
        for word in ("one user", guarantee.relation.value, guarantee.accountant, guarantee.source):
            assert word in text
        again = Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict())))
        assert again == guarantee


def test_seeds_are_named_as_simulation():
    sampled = plan(PoissonSampling(100, 0.1))
    seeded = [
        *naive_guarantees(secure_noise=False)[1:],
        *uldp_group_guarantees(SILO, group_size=2, delta=DELTA, secure_noise=False)[1:],
        *averaging_guarantees(sampled, num_silos=2, rounds=1, secure_noise=False)[1:],
    ]
    for guarantee in seeded:
        assert any(text.startswith("SIMULATION: noise") for text in guarantee.assumptions)
    models = averaging_guarantees(sampled, num_silos=2, rounds=1, secure_cohorts=False)[1]
    assert any(text.startswith("SIMULATION: sampled users") for text in models.assumptions)


@pytest.mark.parametrize(
    ("field", "value"), [("noise_multiplier", 0.0), ("rounds", -1), ("delta", 0.0)]
)
def test_unfit_numbers_of_the_theorems_are_refused_by_name(field, value):
    facts = {"noise_multiplier": 5.0, "rounds": 10, "delta": DELTA}
    with pytest.raises(ValueError, match=f"{field}="):
        uldp_closed_form(**{**facts, field: value})


PROTOCOL, OTHERS, DRAWN = (
    "follows the protocol",
    "none of the parties that add noise",
    "sampled users are drawn",
)
SECURE, HIDDEN, TRANSFER = "secure aggregation", "neither who was drawn nor", "nobody saw the draw"
MODELS, SUMS, UPLOADS = (
    AdversaryView.RELEASED_MODELS,
    AdversaryView.SUM_ONLY,
    AdversaryView.EACH_UPLOAD,
)


@pytest.mark.parametrize("hidden", [None, TRANSFER])
@pytest.mark.parametrize("sampling", [FullParticipation(100), PoissonSampling(100, 0.3)])
def test_each_promise_of_averaging_names_what_it_rests_on_and_nothing_else(sampling, hidden):
    guarantees = averaging_guarantees(
        plan(sampling), num_silos=5, rounds=9, hidden_draw=hidden, not_covered=["scores"]
    )
    secret = set() if isinstance(sampling, FullParticipation) else {HIDDEN, DRAWN}
    at_server = {TRANSFER} if hidden else set()
    rests_on = {
        MODELS: {PROTOCOL, OTHERS, *secret},
        SUMS: {SECURE, *at_server},
        UPLOADS: at_server,
    }
    every = {PROTOCOL, OTHERS, DRAWN, SECURE, HIDDEN, TRANSFER}
    for guarantee in guarantees[1:]:
        text = " ".join(guarantee.assumptions)
        assert {words for words in every if words in text} == rests_on[guarantee.view]
        for always in ("sum to at most 1", "nothing of other users", "same id", "do not collude"):
            assert always in text


def test_every_provable_guarantee_lists_uncovered_values():
    out = {"not_covered": ["scores"]}
    every = [
        *naive_guarantees(**out),
        *uldp_group_guarantees(SILO, group_size=2, delta=DELTA, **out),
        *averaging_guarantees(plan(), num_silos=2, rounds=1, **out),
    ]
    for guarantee in every:
        assert ("scores" in guarantee.not_covered) == (guarantee.basis == "provable")


@pytest.mark.parametrize("hidden", [None, TRANSFER])
@pytest.mark.parametrize("weighting", ["equal", "by-records"])
@pytest.mark.parametrize("sampling", [FullParticipation(100), PoissonSampling(100, 0.3)])
def test_a_user_that_moves_a_sum_further_gets_a_weaker_promise(sampling, weighting, hidden):
    """Only the provable guarantee changes; the published one knows one clipping norm only."""
    run = {"num_silos": 5, "rounds": 9, "weighting": weighting, "hidden_draw": hidden}
    far = averaging_guarantees(plan(sampling, noise_multiplier=10.0), sensitivity=2.0, **run)
    near = averaging_guarantees(plan(sampling, noise_multiplier=5.0), **run)
    assert provable_by_view(far) == provable_by_view(near)
    same = averaging_guarantees(plan(sampling, noise_multiplier=10.0), **run)
    assert far[0].epsilon == same[0].epsilon < near[0].epsilon


def test_a_draw_that_nobody_knows_amplifies_against_the_server_too():
    run = {"num_silos": 5, "rounds": 30, "drawn": 12}
    sampled = plan(PoissonSampling(100, 0.1))
    known = provable_by_view(averaging_guarantees(sampled, **run))
    hidden = provable_by_view(averaging_guarantees(sampled, hidden_draw=TRANSFER, **run))
    assert hidden[SUMS] == hidden[UPLOADS] == hidden[MODELS] == known[MODELS] < known[SUMS]
    assert known[SUMS] == gaussian_loss(5.0, releases=12.0, delta=DELTA).epsilon


def test_the_upload_of_a_single_silo_is_the_sum_whatever_its_weights():
    for weighting in ("equal", "by-records"):
        alone = provable_by_view(
            averaging_guarantees(plan(), num_silos=1, rounds=3, weighting=weighting)
        )
        assert alone[UPLOADS] == alone[SUMS] == pytest.approx(alone[MODELS])


@pytest.mark.parametrize("sampling", [FullParticipation(100), PoissonSampling(100, 0.3)])
def test_a_person_with_two_numbers_has_a_group_of_twos_epsilon(sampling):
    (released,) = (
        guarantee
        for guarantee in averaging_guarantees(plan(sampling), rounds=100)
        if guarantee.basis == "provable" and guarantee.view.value == "released-models"
    )
    (sentence,) = (text for text in released.assumptions if "two numbers" in text)
    epsilon = float(sentence.rpartition("ε = ")[2])
    assert epsilon > 1.8 * released.epsilon
    if isinstance(sampling, FullParticipation):
        twice_as_far = gaussian_loss(5.0 / 2, releases=100, delta=DELTA).epsilon
        assert epsilon == pytest.approx(twice_as_far, rel=0.01)


@pytest.mark.parametrize("hidden", [None, TRANSFER])
def test_the_least_noise_in_secure_sums_has_a_guarantee_for_each_upload(hidden):
    """A share of this noise is too small for a sum, but nobody runs a sum with it."""
    least = plan(noise_multiplier=1.3e-4, noise_placement=SecureSum())
    run = {"num_silos": 16, "rounds": 3, "weighting": "by-records", "hidden_draw": hidden}
    epsilons = provable_by_view(averaging_guarantees(least, **run))
    answers = mechanism_of(least, silos=16).masked.parameters.least_answers
    of_share = gaussian_loss(1.3e-4 / math.sqrt(answers), releases=3, delta=DELTA).epsilon
    assert epsilons[UPLOADS] == pytest.approx(of_share)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("weighting", ["equal", "by-records"])
def test_a_lying_server_sees_only_the_noise_of_honest_answers(weighting, signed):
    sums = SecureSum(colluding=0.0, dropouts=0.2, signed=signed)
    sampling = PoissonSampling(100, 0.3)
    mechanism = mechanism_of(plan(sampling, noise_placement=sums), silos=10)
    method = MethodTraits(name="UldpAvg", num_silos=10, weighting=weighting)
    run = RunSummary(method=method, participations=worst_case(10, 1))
    parameters = mechanism.masked.parameters
    assert parameters.honest_answers == (6 if signed else 8)
    part = parameters.honest_answers / parameters.least_answers if weighting != "equal" else 1
    seen = replace(mechanism, noise_multiplier=mechanism.noise_multiplier * math.sqrt(part))
    by_silos = SumTerms(hidden_draw=drawn_by_silos(mechanism, 10))
    claims = uldp_avg_guarantees(mechanism, replace(run, sums=by_silos))
    (of_sums,) = (c for c in claims if c.view is AdversaryView.SUM_ONLY and c.basis == "provable")
    expected = privacy_loss_of({seen.release: 10}, delta=mechanism.delta).epsilon
    assert of_sums.epsilon == pytest.approx(expected, rel=1e-9)
    full = privacy_loss_of({mechanism.release: 10}, delta=mechanism.delta).epsilon
    assert (of_sums.epsilon > full * 1.05) is (part < 1)
    assert f"noise multiplier {seen.noise_multiplier:.4g}," in of_sums.source
