"""Guarantees name all that they need, survive JSON, and never promise too much."""

import json
import math
from dataclasses import replace

import pytest

from flower_ext.privacy import (
    FullParticipation,
    Guarantee,
    NeighboringRelation,
    PoissonSampling,
    PrivacyUnit,
    Release,
    epsilon_text,
)
from flower_ext.privacy.guarantee import large_delta
from flower_ext.privacy.theorems.dp2_fedsam_theorem import theorem2_of_run
from tests.support.guarantees import by_view, client_level
from tests.support.plans import mechanism, plan
from tests.support.run_summary import run_summary, worst_case

RELEASE = Release(
    sampling=PoissonSampling(100, 0.1),
    noise_multiplier=1.0,
    relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
)


@pytest.mark.parametrize("placement", ["client", "server"])
def test_every_guarantee_names_all_it_needs_and_survives_json(placement):
    seen = worst_case(60, 10)
    guarantees = client_level(
        mechanism(noise_placement=placement), seen, not_covered=["test scores"]
    )
    for g in [theorem2_of_run(plan().mechanism(), run_summary(rounds=60))[0], *guarantees]:
        text = g.statement()
        for word in (g.unit.value, g.relation.value, g.basis, g.accountant, g.source, "δ", "sees"):
            assert word in text or math.isinf(g.epsilon)
        assert g.unit is PrivacyUnit.CLIENT
        assert Guarantee.from_dict(g.to_dict()) == g
    assert "Not covered: test scores" in guarantees[0].statement()


@pytest.mark.parametrize(
    ("epsilon", "delta", "message"),
    [
        (2.0, 1e-5, "ε = 2 at δ = 1e-05 "),
        (2.000049, 1.0004e-5, "ε = 2.01 at δ = 1.01e-05 "),
        (0.12341, 0.0012341, "ε = 0.124 at δ = 0.00124 "),
        (9.991, 9.991e-6, "ε = 10 at δ = 1e-05 "),
        (0.0, 0.0, "ε = 0 at δ = 0 "),
    ],
)
def test_a_statement_promises_no_more_than_holds(epsilon, delta, message):
    (claim, *_) = client_level(mechanism(), worst_case(60, 10))
    assert message in replace(claim, epsilon=epsilon, delta=delta).statement()


def test_unknown_fields_of_a_guarantee_are_refused():
    facts = theorem2_of_run(plan().mechanism(), run_summary(rounds=60))[0].to_dict() | {
        "epsilon_really": 1.0
    }
    with pytest.raises(ValueError, match="epsilon_really"):
        Guarantee.from_dict(facts)


@pytest.mark.parametrize(("delta", "large"), [(0.1, True), (1.1e-3, True), (1e-3, False)])
def test_the_statement_says_that_a_large_delta_promises_little(delta, large):
    seen = worst_case(60, 10)
    for guarantee in by_view(mechanism(FullParticipation(100), delta=delta), seen).values():
        message = "is large: with that probability all of one client's data may be revealed"
        assert (message in guarantee.statement()) == (large and math.isfinite(guarantee.epsilon))


@pytest.mark.parametrize(
    ("delta", "units", "large"),
    [(1e-5, 100_000, True), (9.9e-6, 100_000, False), (1e-4, 100_000, True), (1e-3, 100, False)],
)
def test_a_delta_of_at_least_one_over_the_units_is_called_large(delta, units, large):
    seen = worst_case(60, 10)
    for guarantee in by_view(mechanism(FullParticipation(100), delta=delta), seen).values():
        message = f"is large for {units} clients" in replace(guarantee, units=units).statement()
        assert message == (large and math.isfinite(guarantee.epsilon))
    assert large_delta(delta, PrivacyUnit.RECORD) is None


def test_guarantees_and_releases_survive_json_text():
    by_server = mechanism(noise_placement="server")  # with infinite ε
    for guarantee in client_level(by_server, worst_case(10, 10)):
        text = json.dumps(guarantee.to_dict(), allow_nan=False)
        assert Guarantee.from_dict(json.loads(text)) == guarantee
    assert Release.from_dict(json.loads(json.dumps(RELEASE.to_dict()))) == RELEASE


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [
        (41.2329, "41.3"),
        (2.0000000000000004, "2"),
        (0.99951, "1"),
        (1082.99, "1.09e+03"),
        (0, "0.001"),
    ],
)
def test_a_printed_epsilon_is_never_smaller_than_the_computed_one(epsilon, printed):
    assert epsilon_text(epsilon) == printed
