from pathlib import Path

import numpy as np
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


def spend(path: Path, **changes) -> None:
    """Charge one round, whose run has a hundred users in three silos, to an account."""
    new = {
        "run": "a",
        "name": "a",
        "method": "UldpNaive",
        "training": 1,
        "unit": USER,
        "population": 100,
        "relation": RELATION,
        "epsilon": 1.0,
        "delta": DELTA,
        "release": Release(sampling=FullParticipation(3), noise_multiplier=5.0, relation=RELATION),
    }
    charge(path, Charge(**{**new, **changes}), Budget(epsilon=1e4, delta=DELTA))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study.jsonl"


def test_only_a_participant_of_the_study_can_withdraw(path):
    with pytest.raises(InvalidValue, match="expected the account that the study's setting"):
        withdrawal.withdraw(path, USER, [7])
    spend(path)
    with pytest.raises(InvalidValue, match="user=100: expected an integer >= 0 and below 100"):
        withdrawal.withdraw(path, USER, [100])
    with pytest.raises(InvalidValue, match="expected --user"):
        withdrawal.withdraw(path, PrivacyUnit.CLIENT, [1])


def test_every_user_can_withdraw_whatever_the_releases_draw_from(path):
    """The release of ULDP-NAIVE draws silos, and a run under ULDP-GROUP has no release."""
    spend(path)
    assert withdrawal.withdrawn(withdrawal.withdraw(path, USER, [99])) == {99}
    spend(path, run="b", name="b", release=None, population=200, delta=DELTA / 2)
    assert withdrawal.withdrawn(withdrawal.withdraw(path, USER, [199])) == {99, 199}
    with pytest.raises(InvalidValue, match="below 200"):
        withdrawal.withdraw(path, USER, [200])


@pytest.mark.parametrize("wrong", [99_999, -1, True, 2.0])
def test_a_refused_number_leaves_the_account_as_it_was(path, wrong):
    spend(path)
    before = path.read_bytes()
    with pytest.raises(InvalidValue, match="expected an integer >= 0 and below 100"):
        withdrawal.withdraw(path, USER, [3, wrong])
    assert path.read_bytes() == before
    assert withdrawal.withdrawn(withdrawal.withdraw(path, USER, np.array([3, 5]))) == {3, 5}
