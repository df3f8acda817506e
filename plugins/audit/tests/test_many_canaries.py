"""One run with many canaries: no bound exceeds the reported ε, unless clipping is off."""

import pytest
from many_canaries import MECHANISMS, audit_of, plan_of

from tests.support import planted_faults as faults
from tests.support.grids import grid

CANARIES = 200


@pytest.mark.parametrize("clipped", [True, False])
def test_one_run_exceeds_what_is_reported_where_clipping_is_off_alone(clipped, monkeypatch):
    if not clipped:
        faults.clipping_off(monkeypatch, None)
    # So small a δ and so much noise let a run refute the guarantee with this confidence.
    plan, force = plan_of("server noise", canaries=CANARIES, noise_multiplier=8.0, delta=1e-10)
    result = audit_of(
        plan, canaries=CANARIES, guesses=CANARIES // 2, confidence=1 - 1e-6, force=force
    )
    assert [bound.exceeds for bound in result.bounds] == [not clipped] * 2, result


@pytest.mark.parametrize("mechanism", grid(MECHANISMS, lambda name: name != "secure sum"))
def test_the_curve_of_a_gaussian_is_tighter_on_the_same_run(mechanism):
    plan, force = plan_of(mechanism, canaries=CANARIES, noise_multiplier=0.5, delta=1e-5)
    result = audit_of(plan, canaries=CANARIES, guesses=40, confidence=0.95, force=force)
    any_mechanism, gaussian = result.bounds
    assert 1.3 * any_mechanism.epsilon < gaussian.epsilon < gaussian.terms.reported
    assert result.best is gaussian
