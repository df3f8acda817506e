"""Theorem 2 of DP²-FedSAM: its noise, its conditions and its published claim."""

import math
from pathlib import Path

import pytest

from flower_ext.privacy import PoissonSampling, calibrate_noise_multiplier
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
    theorem2_of_run,
)
from tests.support.plans import plan
from tests.support.run_summary import run_summary


def test_theorem_2_and_its_noise_multiplier_undo_each_other():
    for epsilon in (0.3, 1.0, 2.0, 8.0):
        facts = {"sampling_rate": 0.05, "rounds": 200, "delta": 1e-3}
        sigma = dp2_fedsam_theorem2_noise_multiplier(epsilon=epsilon, **facts)
        claim = dp2_fedsam_theorem2(noise_multiplier=sigma, **facts)
        assert claim.epsilon == pytest.approx(epsilon)
        # Eq. 26 as printed.
        needed = 7 * 0.05**2 * 200 * (epsilon + 2 * math.log(1e3)) / epsilon**2
        assert sigma**2 == pytest.approx(needed)


def test_the_page_weighs_the_noise_of_a_round_against_its_signal():
    """σC√d₁/(rN), without the last layer of 1,290, 31,806 and 630 parameters."""

    def theorem(clients):
        return dp2_fedsam_theorem2_noise_multiplier(
            epsilon=1.0, delta=1 / clients, sampling_rate=0.05, rounds=200
        )

    sampling = PoissonSampling(100, 0.1)
    ours = calibrate_noise_multiplier(epsilon=2.0, delta=0.01, sampling=sampling, rounds=60)
    page = (Path(__file__).parents[3] / "docs/proved/dp2-fedsam.md").read_text()
    for shared, sigma, clip, cohort in (
        (667_402 - 1_290, theorem(1000), 0.1, 50),
        (667_402 - 1_290, theorem(500), 0.1, 25),
        (11_181_642 - 31_806, theorem(500), 0.2, 25),
        (19_988 - 630, ours, 0.1, 10),
    ):
        norm = sigma * clip * math.sqrt(shared) / cohort
        assert f"| {shared:,} | {sigma:.2f} | {norm:.3g} | {clip} |" in page


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


def test_the_order_of_theorem_2_is_compared_with_its_lemmas_bound():
    """Compare α = 1 + 2 ln(1/δ)/ε with the lemma's bound 1 + (2/3) σ² ln(1/(r α (1 + σ²)))."""
    orders = set()
    for sigma in (0.8, 1.5, 3.0, 6.0, 20.0):
        for rate in (1e-5, 1e-3, 0.05, 0.5):
            for rounds in (1, 100, 20_000):
                facts = {"sampling_rate": rate, "rounds": rounds, "delta": 1e-3}
                epsilon = dp2_fedsam_theorem2(noise_multiplier=sigma, **facts).epsilon
                order = 1 + 2 * math.log(1e3) / epsilon
                bound = 1 + 2 / 3 * sigma**2 * -math.log(rate * order * (1 + sigma**2))
                assert holds("α ≤", noise_multiplier=sigma, **facts) == (order <= bound)
                orders.add(order <= bound)
    assert orders == {True, False}


def test_the_published_claim_says_that_it_does_not_fit_its_setting():
    claim = theorem2_of_run(plan().mechanism(), run_summary(rounds=60))[0]
    assert claim.basis == "published"
    assert not claim.conditions_hold
    failed = [c.text for c in claim.conditions if not c.holds]
    assert any("replacing one moves the sum by 2C" in text for text in failed)
    assert any("single uploads" in text for text in failed)


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
