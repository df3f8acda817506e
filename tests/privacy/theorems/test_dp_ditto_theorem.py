"""DP-Ditto's calibration compared with the paper's formulas, and with real neighbours."""

import json
import math

import numpy as np
import pytest

from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Guarantee,
    NeighboringRelation,
    PrivacyUnit,
    RecordLevelPlan,
    gaussian_loss,
)
from flower_ext.privacy.theorems.dp_ditto_theorem import (
    check_global_weight,
    dp_ditto_noise_stddev,
)
from tests.support.plans import steps
from tests.support.run_summary import run_summary

FEDERATION = {"num_clients": 20, "num_examples": 3000, "clipping_norm": 20.0}
TARGET = {"epsilon": 10.0, "delta": 0.01, "rounds": 80}


def guarantees(stddev=0.01, *, num_clients=20, secure_noise=True, not_covered=(), **changes):
    """Return the published and the provable guarantee of a run of DP-Ditto."""
    values = {"num_examples": 50, "rounds": 80, "delta": 0.01, "clipping_norm": 20.0, **changes}
    plan = RecordLevelPlan(sampling=FullParticipation(num_clients), noise_stddev=stddev, **values)
    run = run_summary(rounds=plan.rounds, secure_noise=secure_noise, not_covered=not_covered)
    published, provable = plan.guarantees(run)
    assert (published.basis, provable.basis) == ("published", "provable")
    return published, provable


def test_the_published_noise_is_equation_8_and_its_epsilon_the_inverse():
    C, D, N, T = 20.0, 3000, 20, 80
    stddev = dp_ditto_noise_stddev(**TARGET, **FEDERATION)
    printed = (2 * C / D) * math.sqrt(2 * T * N * math.log(1 / 0.01)) / (10.0 * N)
    assert stddev == pytest.approx(printed, rel=1e-12)
    published, _ = guarantees(stddev=stddev, rounds=T, **FEDERATION)
    assert published.epsilon == pytest.approx(10.0, rel=1e-12)


def test_sigma_z_of_equation_8_is_the_published_noise_of_all_clients():
    stddev = dp_ditto_noise_stddev(**TARGET, **FEDERATION)
    sigma_z = (2 * 20.0 / 3000) * math.sqrt(2 * 80 * math.log(100)) / 10.0
    assert math.sqrt(20) * stddev == pytest.approx(sigma_z, rel=1e-12)


def test_the_variance_of_both_calibrations_grows_linearly_with_the_rounds():
    # The planner needs it: σ_u²/T is a constant of the budget.
    target = {"epsilon": 2.0, "delta": 1e-3}
    published = [dp_ditto_noise_stddev(**target, rounds=T, **FEDERATION) for T in (1, 9)]
    terms = {"sampling": FullParticipation(1), "num_examples": 50, "clipping_norm": 1.0, **target}
    provable = [
        RecordLevelPlan.for_target(**terms, rounds=T, steps=steps()).noise_stddev for T in (1, 9)
    ]
    assert published[1] == pytest.approx(3 * published[0], rel=1e-12)
    assert provable[1] == pytest.approx(3 * provable[0], rel=1e-12)


def test_a_clipped_model_can_move_by_2C_not_2C_over_D():
    # Least squares on two neighbours: one record reverses the slope, and clipping keeps both ends.
    C, far = 1.0, 1e6
    base = [(0.1, 0.1), (0.1, -0.1)]

    def fit(records):
        x, y = np.array(records).T
        return float(np.clip(x @ y / (x @ x), -C, C))

    moved = abs(fit([*base, (1.0, far)]) - fit([*base, (1.0, -far)]))
    assert moved == pytest.approx(2 * C)
    assert moved > 2 * C / 3


def test_a_run_names_both_numbers_and_what_fails_of_the_published_one():
    published, provable = guarantees(clipping_norm=20.0)
    failed = [c.text for c in published.conditions if not c.holds]
    assert any("q = 1/20" in text for text in failed)
    assert any("what holds is 40" in text for text in failed)
    assert provable.epsilon > 1000 * published.epsilon
    for one in (published, provable):
        assert (one.unit, one.relation, one.view, one.delta) == (
            PrivacyUnit.RECORD,
            NeighboringRelation.REPLACE_ONE,
            AdversaryView.EACH_UPLOAD,
            0.01,
        )
    assert Guarantee.from_dict(json.loads(json.dumps(published.to_dict()))) == published
    assert "NOT met" in published.statement()
    assert "SIMULATION" in guarantees(secure_noise=False)[1].statement()


def test_one_client_with_one_record_meets_both_of_the_first_conditions():
    published, _ = guarantees(stddev=400.0, num_clients=1, num_examples=1, rounds=1)
    assert [c.holds for c in published.conditions] == [True, True, True]


def test_even_with_its_sensitivity_the_closed_form_fails_at_large_epsilon():
    def covered(epsilon):
        facts = {"num_clients": 1, "num_examples": 1, "clipping_norm": 20.0}
        stddev = dp_ditto_noise_stddev(epsilon=epsilon, delta=0.01, rounds=1, **facts)
        return guarantees(stddev=stddev, rounds=1, **facts)[0].conditions[2]

    assert covered(1.0).holds
    assert not covered(100.0).holds
    assert "exact ε = 618.6" in covered(100.0).text


def test_clipped_gradients_bring_the_provable_number_down_from_2C():
    worst = guarantees()[1]
    clipped = guarantees(steps=steps())[1]
    several = guarantees(steps=steps(local_steps=3))[1]
    assert clipped.epsilon < several.epsilon < worst.epsilon
    assert "2C = 40" in worst.source
    assert "2ηG/B" in clipped.source
    assert "80 rounds of 3 noised steps" in several.source


def test_one_noised_step_equals_one_noised_upload_of_its_sensitivity():
    s = steps()
    upload = gaussian_loss(0.01 / s.upload_sensitivity, releases=80, delta=0.01)
    assert guarantees(steps=s)[1].epsilon == pytest.approx(upload.epsilon, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dp_ditto_noise_stddev(**{**TARGET, "epsilon": 0.0}, **FEDERATION), "epsilon=0.0"),
        (lambda: dp_ditto_noise_stddev(**{**TARGET, "delta": 1.0}, **FEDERATION), "delta=1.0"),
        (lambda: dp_ditto_noise_stddev(**{**TARGET, "rounds": 0}, **FEDERATION), "rounds=0"),
        (
            lambda: dp_ditto_noise_stddev(**TARGET, **{**FEDERATION, "clipping_norm": 0.0}),
            "clipping_norm=0.0",
        ),
        (
            lambda: dp_ditto_noise_stddev(**TARGET, **{**FEDERATION, "num_clients": 0}),
            "num_clients=0",
        ),
        (lambda: guarantees(stddev=0.0), "noise_stddev=0.0"),
        (lambda: steps(num_examples=0), "num_examples=0: expected"),
        (lambda: guarantees(steps=steps(num_examples=7)), "num_examples=50: expected 7"),
        (lambda: steps(batch_size=51), "batch_size=51: expected"),
        (lambda: steps(local_steps=0), "local_steps=0: expected"),
        (lambda: steps(learning_rate=math.nan), "learning_rate=nan: expected"),
        (lambda: steps(gradient_clipping_norm=math.inf), "gradient_clipping_norm=inf: expected"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_closed_form_covers_the_thinned_releases_at_a_small_epsilon():
    """The form is used to thin T releases out to T/N for any number of clients."""
    for clients in (1, 20, 400):
        facts = {"num_clients": clients, "num_examples": 50, "clipping_norm": 20.0}
        stddev = dp_ditto_noise_stddev(epsilon=0.5, delta=0.01, rounds=80, **facts)
        condition = guarantees(stddev=stddev, **facts)[0].conditions[2]
        assert condition.holds
        exact = gaussian_loss(stddev * 50 / 40, releases=80 / clients, delta=0.01).epsilon
        assert f"exact ε = {exact:.4g}" in condition.text


def test_the_provable_guarantee_lists_uncovered_values():
    for given in (None, steps()):
        provable = guarantees(not_covered=["scores"], secure_noise=False, steps=given)[1]
        assert provable.not_covered == ("scores",)
        assert "SIMULATION" in provable.statement()


def test_a_weight_from_0_to_2_is_accepted_and_no_other():
    check_global_weight(0)
    check_global_weight(2)
    for bad in (-1e-9, 2 + 1e-9, math.nan):
        with pytest.raises(ValueError, match=f"global_weight={bad!r}: expected λ"):
            check_global_weight(bad)
