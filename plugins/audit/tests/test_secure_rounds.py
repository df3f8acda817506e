"""The server's view of a secure round, computed from its messages."""

import numpy as np
import pytest

from flower_ext.privacy import AdversaryView
from flower_ext_audit import observe
from flower_ext_audit.mechanisms import MECHANISMS
from tests.support import planted_faults as faults


def seen(experiment, trials=3):
    return list(observe(experiment, experiment.present, trials=trials))


def test_the_server_computes_the_sum_that_it_releases_and_reads_no_upload():
    for one, strategy in seen(MECHANISMS["secure-sum"].experiment(rounds=2)):
        cell = strategy.run.mechanism.masked.cell
        for number in range(2):
            released = one.models[number + 1]["weight"] - one.models[number]["weight"]
            expected = one.sums[number]["weight"] * cell / 3
            np.testing.assert_allclose(released, expected, atol=1e-5)
            assert one.bare[number] == {}


def test_without_the_masks_of_pairs_the_server_reads_each_upload(monkeypatch):
    experiment = faults.pair_masks_left_out(monkeypatch, MECHANISMS["secure-sum"].experiment())
    for one, _ in seen(experiment):
        assert set(one.bare[0]) == {0, 1, 2}
        total = sum(update["weight"] for update in one.bare[0].values())
        np.testing.assert_array_equal(total, one.sums[0]["weight"])  # which shows no fault
        update = float(one.bare[0][0]["weight"][0, 0] + one.bare[0][0]["bias"][0])
        assert experiment.score(one, AdversaryView.SUM_ONLY) == pytest.approx(update)


def test_plain_sums_have_no_secure_round():
    ((one, _),) = seen(MECHANISMS["client-noise"].experiment(), trials=1)
    assert list(one.sums) == [None]
    assert list(one.bare) == [{}]
