"""Withdrawals from a study."""

from pathlib import Path

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    Budget,
    FullParticipation,
    NeighboringRelation,
    PrivacyUnit,
    Release,
    withdrawal,
)
from flower_ext.privacy.shared_ledger import Charge, charge

DELTA, RELATION = 1e-5, NeighboringRelation.ADD_OR_REMOVE_ONE
USER = PrivacyUnit.USER


def test_only_a_participant_of_the_study_can_withdraw(tmp_path: Path):
    path = tmp_path / "study.jsonl"
    with pytest.raises(InvalidValue, match="expected the account that the study's setting"):
        withdrawal.withdraw(path, USER, [7])
    new = Charge(
        run="a",
        name="a",
        method="UldpAvg",
        training=1,
        unit=USER,
        relation=RELATION,
        epsilon=1.0,
        delta=DELTA,
        release=Release(sampling=FullParticipation(100), noise_multiplier=5.0, relation=RELATION),
    )
    charge(path, new, Budget(epsilon=1e4, delta=DELTA))
    with pytest.raises(InvalidValue, match="user=100: expected an integer >= 0 and below 100"):
        withdrawal.withdraw(path, USER, [100])
    with pytest.raises(InvalidValue, match="expected --user"):
        withdrawal.withdraw(path, PrivacyUnit.CLIENT, [1])
