"""No ε of released statistics that an attack exceeds; and each planted fault shows as exceeded.

A bound by records in place of people is `summed_over_records`, with the clipping behind it off.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from flower_ext_audit import audit
from flower_ext_audit.experiment import projected
from flower_ext_consortium.released_statistics import JOINT, STATISTICS, canary_part
from flower_ext_consortium.statistics import JointStatistics
from flower_ext_consortium.statistics.release import RELEASED
from flower_ext_consortium.statistics.statistic import columns_of
from tests.support import planted_faults as faults
from tests.support.grids import grid

CONFIDENCE, OF_A_FAULT = 1 - 1e-6, 0.999
FEW, MORE, MANY = 48, 100, 2_500
MORE_NOISE, VAST_NOISE = 2.0, 64.0
"""With vast noise an ε near 0.1 is reported, which a fault that no noise hides soon exceeds."""
FEWEST, FEWEST_CLEAN = 24, 40
"""Trials with vast noise, of such a fault and at the confidence of no fault."""


def summed_over_records(patch, experiment):
    """Bound records and not people: a part is the sum over a person's records."""

    def part(self, examples):
        columns = columns_of(examples)
        sums = [each.vectors(columns).sum(axis=0) / self._unit(each) for each in self.statistics]
        return 4 * np.concatenate(sums)

    patch.setattr(
        JointStatistics, "parts", lambda self, units: np.stack([part(self, each) for each in units])
    )
    return faults.clipping_off(patch, experiment)


def count_in_the_clear(patch, experiment):
    """Leave a silo's number of people without noise; the attack looks at that number alone."""
    first = np.eye(1, JOINT.size)[0]
    seen = projected({RELEASED: first}, partitions=[0])
    return replace(faults.part_unnoised(patch, experiment), score=seen)


FAULTS = {
    "unbounded": (summed_over_records, MORE_NOISE, FEW),
    "σ/4": (faults.less_noise(4), MORE_NOISE, MORE),
    "count in the clear": (count_in_the_clear, VAST_NOISE, FEWEST),
}


@pytest.mark.parametrize("name", grid(STATISTICS, "statistics-clients".__eq__))
def test_no_bound_exceeds_what_is_reported(name):
    experiment = STATISTICS[name](noise=VAST_NOISE)
    result = audit(experiment, trials=FEWEST_CLEAN, confidence=CONFIDENCE)
    assert not result.broken, result.to_dict()


DAILY = {
    ("statistics-users", "unbounded"),
    ("statistics-clients", "σ/4"),
    ("statistics-secure-sum", "count in the clear"),
}


@pytest.mark.parametrize(
    ("name", "fault"), grid(itertools.product(STATISTICS, FAULTS), DAILY.__contains__)
)
def test_a_planted_fault_is_found(name, fault, monkeypatch):
    plant, noise, trials = FAULTS[fault]
    experiment = plant(monkeypatch, STATISTICS[name](noise=noise))
    result = audit(experiment, trials=trials, confidence=OF_A_FAULT)
    assert result.broken, result.to_dict()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STATISTICS)
def test_with_more_trials_the_bounds_stay_below_and_come_near(name):
    result = audit(STATISTICS[name](), trials=MANY, confidence=CONFIDENCE)
    assert not result.broken, result.to_dict()
    assert max(view.best.epsilon / view.best.terms.reported for view in result.views) > 0.5


def test_the_canary_s_part_has_the_largest_norm():
    assert np.linalg.norm(canary_part()) == pytest.approx(1.0)
