"""Faults that the check finds in the number of messages."""

from types import SimpleNamespace

import pytest
from scipy.stats import binom

from flower_ext.privacy import PoissonSampling, PrivacyUnit
from flower_ext_check.faults_of_parts import add_uncounted_messages
from flower_ext_check.findings import Case
from flower_ext_check.measured import DECISION_ERROR

POPULATION, RATE, ROUNDS = 100, 0.1, 2
LAW = binom(ROUNDS * POPULATION, RATE)


def cases_found(requests):
    """Return the faults of a run whose plan draws clients, with this many requests in all."""
    release = SimpleNamespace(sampling=PoissonSampling(POPULATION, RATE))
    traits = SimpleNamespace(
        stated_guarantee=SimpleNamespace(unit=PrivacyUnit.CLIENT),
        strategies=(),
        mechanism=SimpleNamespace(declared=SimpleNamespace(release=release)),
    )
    cohorts = {1: range(requests // 2), 2: range(requests - requests // 2)}
    real = SimpleNamespace(cohorts=cohorts, rounds=ROUNDS, strategy_starts=1)
    cases = []
    findings = SimpleNamespace(add=lambda case, **values: cases.append(case))
    add_uncounted_messages(SimpleNamespace(real=real, traits=traits), findings)
    return cases


@pytest.mark.parametrize("probability", [DECISION_ERROR, 1e-6])
def test_requests_are_a_fault_only_if_rare_among_many_decisions(probability):
    requests = int(LAW.isf(probability)) + 1  # at least so many are sent with this probability
    expected = [Case.SAMPLING] if LAW.sf(requests - 1) < DECISION_ERROR else []
    assert cases_found(requests) == expected
    assert bool(expected) == (probability == DECISION_ERROR)
