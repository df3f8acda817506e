import json
import math
from dataclasses import replace

import pytest

from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    Guarantee,
    NeighboringRelation,
    Participations,
    PoissonSampling,
    PrivacyUnit,
    Release,
    ReleasePlan,
    client_level_guarantees,
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
    privacy_loss,
    theorem2_of_plan,
)

RELEASE = Release(
    sampling=PoissonSampling(100, 0.1),
    noise_multiplier=1.0,
    relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
)


def plan(sampling=None, **changes) -> ReleasePlan:
    facts = {
        "sampling": sampling or PoissonSampling(100, 0.1),
        "clipping_norm": 0.1,
        "noise_multiplier": 1.2,
        "rounds": 60,
        "delta": 1e-2,
    }
    return ReleasePlan(**{**facts, **changes})


def by_view(plan, participations, **how):
    return {g.view: g for g in client_level_guarantees(plan, participations, **how)}


def test_theorem_2_and_its_noise_multiplier_undo_each_other():
    for epsilon in (0.3, 1.0, 2.0, 8.0):
        facts = {"sampling_rate": 0.05, "rounds": 200, "delta": 1e-3}
        sigma = dp2_fedsam_theorem2_noise_multiplier(epsilon=epsilon, **facts)
        claim = dp2_fedsam_theorem2(noise_multiplier=sigma, **facts)
        assert claim.epsilon == pytest.approx(epsilon)
        # Eq. 26 as printed.
        needed = 7 * 0.05**2 * 200 * (epsilon + 2 * math.log(1e3)) / epsilon**2
        assert sigma**2 == pytest.approx(needed)


def holds(text: str, **facts) -> bool:
    claim = dp2_fedsam_theorem2(**facts)
    (condition,) = [c for c in claim.conditions if c.text.startswith(text)]
    return condition.holds


def test_each_condition_of_theorem_2_is_seen_to_hold_and_to_fail():
    mild = {"sampling_rate": 0.01, "rounds": 10, "delta": 1e-3}
    assert holds("σ² ≥ 0.7", noise_multiplier=0.84, **mild)
    assert not holds("σ² ≥ 0.7", noise_multiplier=0.83, **mild)
    assert holds("ε < 2 ln", noise_multiplier=2.0, **mild)
    assert not holds("ε < 2 ln", noise_multiplier=1.0, sampling_rate=1.0, rounds=99, delta=0.1)
    assert holds("α ≤", noise_multiplier=3.0, sampling_rate=0.001, rounds=200_000, delta=1e-2)
    assert not holds("α ≤", noise_multiplier=3.0, **mild)


def test_the_order_of_theorem_2_is_held_against_the_bound_of_its_lemma():
    """α = 1 + 2 ln(1/δ)/ε against 1 + (2/3) σ² ln(1/(r α (1 + σ²))), written out."""
    found = set()
    for sigma in (0.8, 1.5, 3.0, 6.0, 20.0):
        for rate in (1e-5, 1e-3, 0.05, 0.5):
            for rounds in (1, 100, 20_000):
                facts = {"sampling_rate": rate, "rounds": rounds, "delta": 1e-3}
                epsilon = dp2_fedsam_theorem2(noise_multiplier=sigma, **facts).epsilon
                order = 1 + 2 * math.log(1e3) / epsilon
                bound = 1 + 2 / 3 * sigma**2 * -math.log(rate * order * (1 + sigma**2))
                assert holds("α ≤", noise_multiplier=sigma, **facts) == (order <= bound)
                found.add(order <= bound)
    assert found == {True, False}


def test_the_published_claim_says_that_it_does_not_fit_its_own_setting():
    claim = theorem2_of_plan(plan(), 60)
    assert claim.basis == "published"
    assert not claim.conditions_hold
    failed = [c.text for c in claim.conditions if not c.holds]
    assert any("replacing one moves the sum by 2C" in text for text in failed)
    assert any("single uploads" in text for text in failed)


def test_a_stronger_adversary_is_promised_less():
    seen = Participations()
    for number in range(60):
        seen.record([number % 40, (number + 1) % 40, *range(50, 58)], answered=10)
    guarantees = by_view(plan(), seen)
    models = guarantees[AdversaryView.RELEASED_MODELS].epsilon
    sums = guarantees[AdversaryView.SUM_ONLY].epsilon
    uploads = guarantees[AdversaryView.EACH_UPLOAD].epsilon
    assert models < sums < uploads


def test_each_view_is_accounted_as_it_says():
    seen = Participations()
    for _ in range(9):
        seen.record([0, 1, 2, 3], answered=4)
    seen.record([1, 2, 3, 4], answered=4)
    guarantees = by_view(plan(), seen)
    gaussian = {
        "sampling": FullParticipation(100),
        "relation": NeighboringRelation.REPLACE_SPECIAL,
        "delta": 1e-2,
    }
    assert guarantees[AdversaryView.RELEASED_MODELS].epsilon == pytest.approx(
        privacy_loss(
            sampling=PoissonSampling(100, 0.1),
            noise_multiplier=1.2,
            rounds=10,
            delta=1e-2,
            relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        ).epsilon
    )
    assert guarantees[AdversaryView.SUM_ONLY].epsilon == pytest.approx(
        privacy_loss(noise_multiplier=1.2, rounds=10, **gaussian).epsilon
    )
    # One upload carries noise σ/√4.
    assert guarantees[AdversaryView.EACH_UPLOAD].epsilon == pytest.approx(
        privacy_loss(noise_multiplier=0.6, rounds=10, **gaussian).epsilon
    )


def test_noise_that_the_server_topped_up_does_not_count_against_the_server():
    complete, half = Participations(), Participations()
    complete.record([0, 1], answered=2)
    half.record([0, 1], answered=1)
    views = [by_view(plan(), seen) for seen in (complete, half)]
    sums = [v[AdversaryView.SUM_ONLY].epsilon for v in views]
    models = [v[AdversaryView.RELEASED_MODELS].epsilon for v in views]
    assert sums[1] > sums[0]
    assert models[1] == models[0]


def test_server_side_noise_promises_nothing_against_the_server():
    guarantees = by_view(plan(noise_placement="server"), Participations.worst_case(60, 10))
    assert math.isfinite(guarantees[AdversaryView.RELEASED_MODELS].epsilon)
    for view in (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD):
        assert math.isinf(guarantees[view].epsilon)
        assert "No (ε, δ) is promised" in guarantees[view].statement()


def test_fixed_size_sampling_is_accounted_with_twice_the_bound():
    fixed = plan(FixedSizeSampling(100, 10), noise_multiplier=5.0)
    models = by_view(fixed, Participations.worst_case(60, 10))[AdversaryView.RELEASED_MODELS]
    assert models.relation is NeighboringRelation.REPLACE_ONE
    assert "sensitivity 2C" in models.source


def test_seeded_noise_is_named_as_simulation_in_every_guarantee():
    seen = Participations.worst_case(60, 10)
    for secure, word in ((True, "cryptographic generator"), (False, "SIMULATION")):
        for guarantee in client_level_guarantees(plan(), seen, secure_noise=secure):
            assert any(word in text for text in guarantee.assumptions)


def test_seeded_cohorts_are_named_as_simulation_where_their_secrecy_counts():
    seen = Participations.worst_case(60, 10)
    for secure in (True, False):
        models = by_view(plan(), seen, secure_cohorts=secure)[AdversaryView.RELEASED_MODELS]
        warned = any(text.startswith("SIMULATION: cohorts") for text in models.assumptions)
        assert warned == (not secure)


@pytest.mark.parametrize(
    ("sampling", "memory", "assumed"),
    [
        (FixedSizeSampling(100, 10), True, True),
        (FixedSizeSampling(100, 10), False, False),
        (PoissonSampling(100, 0.1), True, False),
        (FullParticipation(100), True, False),
    ],
)
def test_memory_is_assumed_not_to_tell_who_was_drawn_where_a_fixed_number_is(
    sampling, memory, assumed
):
    seen = Participations.worst_case(60, 10)
    for view, guarantee in by_view(plan(sampling), seen, memory=memory).items():
        found = any("does not tell who was drawn" in text for text in guarantee.assumptions)
        assert found == (assumed and view is AdversaryView.RELEASED_MODELS)


@pytest.mark.parametrize("placement", ["client", "server"])
def test_every_guarantee_names_all_it_needs_and_survives_json(placement):
    seen = Participations.worst_case(60, 10)
    guarantees = client_level_guarantees(
        plan(noise_placement=placement), seen, not_covered=["test scores"]
    )
    for g in [theorem2_of_plan(plan(), 60), *guarantees]:
        text = g.statement()
        for word in (g.unit.value, g.relation.value, g.basis, g.accountant, g.source, "δ", "sees"):
            assert word in text or math.isinf(g.epsilon)
        assert g.unit is PrivacyUnit.CLIENT
        assert Guarantee.from_dict(g.to_dict()) == g
    assert "Not covered: test scores" in guarantees[0].statement()


@pytest.mark.parametrize(
    ("epsilon", "delta", "said"),
    [
        (2.0, 1e-5, "ε = 2 at δ = 1e-05 "),
        (2.000049, 1.0004e-5, "ε = 2.01 at δ = 1.01e-05 "),
        (0.12341, 0.0012341, "ε = 0.124 at δ = 0.00124 "),
        (9.991, 9.991e-6, "ε = 10 at δ = 1e-05 "),
        (0.0, 0.0, "ε = 0 at δ = 0 "),
    ],
)
def test_a_statement_promises_no_more_than_holds(epsilon, delta, said):
    (claim, *_) = client_level_guarantees(plan(), Participations.worst_case(60, 10))
    assert said in replace(claim, epsilon=epsilon, delta=delta).statement()


def test_unknown_fields_of_a_guarantee_are_refused():
    facts = theorem2_of_plan(plan(), 60).to_dict() | {"epsilon_really": 1.0}
    with pytest.raises(ValueError, match="epsilon_really"):
        Guarantee.from_dict(facts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("noise_multiplier", 0.0),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.5),
        ("rounds", 0),
        ("delta", 1.0),
    ],
)
def test_unfit_parameters_of_theorem_2_are_refused_by_name(field, value):
    facts = {
        "noise_multiplier": 1.0,
        "sampling_rate": 0.1,
        "rounds": 10,
        "delta": 1e-2,
        field: value,
    }
    with pytest.raises(ValueError, match=f"{field}="):
        dp2_fedsam_theorem2(**facts)
    if field != "noise_multiplier":
        del facts["noise_multiplier"]
        with pytest.raises(ValueError, match=f"{field}="):
            dp2_fedsam_theorem2_noise_multiplier(epsilon=1.0, **facts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": PrivacyUnit.USER}, "unit='user' of the plan: expected 'client'"),
        ({"sensitivity": 0.5}, "sensitivity=0.5 of the plan: expected 1"),
        ({"sensitivity": 3.0}, "sensitivity=3.0 of the plan: expected 1"),
    ],
)
def test_nothing_is_promised_to_clients_by_a_plan_of_other_units(changes, said):
    with pytest.raises(ValueError, match=said):
        client_level_guarantees(plan(**changes), Participations.worst_case(60, 10))


@pytest.mark.parametrize(("delta", "large"), [(0.1, True), (1.1e-3, True), (1e-3, False)])
def test_a_delta_that_promises_little_is_said_to(delta, large):
    seen = Participations.worst_case(60, 10)
    for guarantee in by_view(plan(FullParticipation(100), delta=delta), seen).values():
        said = "This δ is large: with that probability all of one client may show"
        assert (said in guarantee.statement()) == (large and math.isfinite(guarantee.epsilon))


def test_guarantees_and_releases_survive_json_text():
    plan = ReleasePlan(
        sampling=PoissonSampling(50, 0.2),
        clipping_norm=0.5,
        noise_multiplier=1.5,
        rounds=10,
        delta=1e-2,
        noise_placement="server",  # with infinite ε
    )
    for guarantee in client_level_guarantees(plan, Participations.worst_case(10, 10)):
        text = json.dumps(guarantee.to_dict(), allow_nan=False)
        assert Guarantee.from_dict(json.loads(text)) == guarantee
    assert Release.from_dict(json.loads(json.dumps(RELEASE.to_dict()))) == RELEASE


PROTOCOL, OTHERS, CLIENTS = "follows the protocol", "none of those who add noise", "clients clip"
AGGREGATION, REFUSED = "secure aggregation", "no honest upload is refused"
WHOLE = "single precision or wider"
HIDDEN, PLACES = "neither who was drawn nor how many", "who was drawn is not known"
DRAWN = "cohorts are drawn by a cryptographic generator"
EVERY = {PROTOCOL, OTHERS, CLIENTS, AGGREGATION, REFUSED, WHOLE, HIDDEN, PLACES, DRAWN}
MODELS, SUMS, UPLOADS = (
    AdversaryView.RELEASED_MODELS,
    AdversaryView.SUM_ONLY,
    AdversaryView.EACH_UPLOAD,
)


@pytest.mark.parametrize(
    ("placement", "rests_on"),
    [
        (
            "client",
            {
                MODELS: {PROTOCOL, OTHERS, REFUSED, WHOLE, CLIENTS},
                SUMS: {AGGREGATION, WHOLE, CLIENTS},
                UPLOADS: {CLIENTS},
            },
        ),
        ("server", {MODELS: {PROTOCOL}, SUMS: set(), UPLOADS: set()}),
    ],
)
@pytest.mark.parametrize(
    ("sampling", "secret"),
    [
        (PoissonSampling(100, 0.1), {HIDDEN, DRAWN}),
        (FixedSizeSampling(100, 10), {PLACES, DRAWN}),
        (FullParticipation(100), set()),
    ],
)
def test_each_promise_names_what_it_rests_on_and_nothing_else_and_what_it_leaves_out(
    placement, rests_on, sampling, secret
):
    seen = Participations.worst_case(60, 10)
    guarantees = by_view(plan(sampling, noise_placement=placement), seen, not_covered=["scores"])
    assert set(guarantees) == set(rests_on)
    for view, guarantee in guarantees.items():
        if math.isinf(guarantee.epsilon):
            continue
        expected = rests_on[view] | (secret if view is MODELS else set())
        text = " ".join(guarantee.assumptions)
        assert {words for words in EVERY if words in text} == expected
        assert "rounded to a public grid" in text
        assert "low-order bits" not in text
        assert guarantee.not_covered == ("scores",)
