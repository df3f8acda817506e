"""The plan of group privacy covers all silos in all rounds."""

import pytest

from flower_ext.privacy import DpSgd, FullParticipation, GroupPlan
from flower_ext.privacy.theorems.uldp_group_theorem import uldp_group_guarantees
from tests.support.run_summary import run_summary

DELTA = 1e-5


def test_a_group_plan_covers_all_its_silos_in_all_rounds():
    one_round = DpSgd(noise_multiplier=5.0, sampling_rate=0.05, steps=20)
    made = GroupPlan(sampling=FullParticipation(3), one_round=one_round, delta=DELTA)
    stated = {"group_size": 4, "not_covered": ["scores"], "secure_noise": False}
    every = DpSgd(noise_multiplier=5.0, sampling_rate=0.05, steps=140)
    expected = uldp_group_guarantees(every, num_silos=3, delta=DELTA, **stated)
    facts = {"not_covered": ["scores"], "secure_noise": False}
    assert made.guarantees(run_summary(rounds=7, group_size=4, **facts)) == expected
    assert made.guarantees(run_summary(rounds=7, **facts)) == []  # k is not known yet
    assert "SIMULATION" in expected[1].statement()
    assert "scores" in expected[1].not_covered
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError, match="delta="):
            GroupPlan(sampling=FullParticipation(3), one_round=one_round, delta=delta)
