"""Guarantees of clients against each adversary's view."""

import math

import pytest

from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.run_summary import SumTerms
from flower_ext.privacy.theorems.assumptions import NOT_PROVIDED
from tests.support.guarantees import by_view, client_level
from tests.support.losses import privacy_loss
from tests.support.plans import mechanism, mechanism_of, plan
from tests.support.run_summary import worst_case


def test_a_stronger_adversary_is_promised_less():
    seen = Participations()
    for number in range(60):
        seen.record([number % 40, (number + 1) % 40, *range(50, 58)], answered=10)
    guarantees = by_view(mechanism(), seen)
    models = guarantees[AdversaryView.RELEASED_MODELS].epsilon
    sums = guarantees[AdversaryView.SUM_ONLY].epsilon
    uploads = guarantees[AdversaryView.EACH_UPLOAD].epsilon
    assert models < sums < uploads


def test_each_view_is_accounted_as_it_says():
    seen = Participations()
    for _ in range(9):
        seen.record([0, 1, 2, 3], answered=4)
    seen.record([1, 2, 3, 4], answered=4)
    guarantees = by_view(mechanism(), seen)
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
    views = [by_view(mechanism(), seen) for seen in (complete, half)]
    sums = [v[AdversaryView.SUM_ONLY].epsilon for v in views]
    models = [v[AdversaryView.RELEASED_MODELS].epsilon for v in views]
    assert sums[1] > sums[0]
    assert models[1] == models[0]


def test_server_side_noise_promises_nothing_against_the_server():
    guarantees = by_view(mechanism(noise_placement="server"), worst_case(60, 10))
    assert math.isfinite(guarantees[AdversaryView.RELEASED_MODELS].epsilon)
    for view in (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD):
        assert math.isinf(guarantees[view].epsilon)
        assert "No (ε, δ) is promised" in guarantees[view].statement()


def test_fixed_size_sampling_is_accounted_with_twice_the_bound():
    fixed = mechanism(FixedSizeSampling(100, 10), noise_multiplier=5.0)
    models = by_view(fixed, worst_case(60, 10))[AdversaryView.RELEASED_MODELS]
    assert models.relation is NeighboringRelation.REPLACE_ONE
    assert "sensitivity 2C" in models.source


def test_seeded_noise_is_named_as_simulation_in_every_guarantee():
    seen = worst_case(60, 10)
    for secure, word in ((True, "cryptographic generator"), (False, "SIMULATION")):
        for guarantee in client_level(mechanism(), seen, secure_noise=secure):
            assert any(word in text for text in guarantee.assumptions)


def test_seeded_cohorts_are_named_as_simulation_where_their_secrecy_counts():
    seen = worst_case(60, 10)
    for secure in (True, False):
        models = by_view(mechanism(), seen, secure_cohorts=secure)[AdversaryView.RELEASED_MODELS]
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
def test_fixed_cohort_sizes_assume_that_memory_does_not_reveal_the_draw(sampling, memory, assumed):
    seen = worst_case(60, 10)
    for view, guarantee in by_view(mechanism(sampling), seen, memory=memory).items():
        is_assumed = any("does not reveal who was drawn" in text for text in guarantee.assumptions)
        assert is_assumed == (assumed and view is AdversaryView.RELEASED_MODELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"silos": 3}, "silos=3 and sensitivity=1.0: expected None and 1"),
        (
            {"sensitivity": 3.0},
            "silos=None and sensitivity=3.0: expected None and 1",
        ),
    ],
)
def test_nothing_is_promised_to_clients_by_sums_of_other_units(changes, message):
    with pytest.raises(ValueError, match=message):
        client_level(mechanism_of(plan(), **changes), worst_case(60, 10))


PROTOCOL, OTHERS, CLIENTS = (
    "follows the protocol",
    "none of the parties that add noise",
    "clients clip",
)


AGGREGATION, REFUSED = "secure aggregation", "refuses no honest upload"


WHOLE = "single precision or wider"


HIDDEN, PLACES = "neither who was drawn nor how many", "does not know who was drawn"


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
def test_each_promise_names_exactly_its_assumptions_and_what_it_omits(
    placement, rests_on, sampling, secret
):
    seen = worst_case(60, 10)
    guarantees = by_view(
        mechanism(sampling, noise_placement=placement), seen, not_covered=["scores"]
    )
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


def test_guarantees_state_what_the_runs_sum_assumes_against_each_adversary():
    def against(view, sums):
        return by_view(mechanism(), worst_case(2, 4), sums=sums)[view].assumptions

    terms = SumTerms(
        secure_sum="two helpers do not collude",
        assumptions={view: (f"seen: {view.value}",) for view in AdversaryView},
    )
    for view in by_view(mechanism(), worst_case(2, 4)):
        assert set(against(view, terms)) - set(against(view, SumTerms())) == {
            f"seen: {view.value}",
            *(["two helpers do not collude"] if view is AdversaryView.SUM_ONLY else []),
        }
    assert any(NOT_PROVIDED in text for text in against(AdversaryView.SUM_ONLY, SumTerms()))
    assert not any(NOT_PROVIDED in text for text in against(AdversaryView.SUM_ONLY, terms))
