"""A round keeps the metrics of its updates, and the updates only if a method reads them."""

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.round import Updates

ARRIVED = [(3, records.Update({}, {"loss": 1.0})), (1, records.Update({}, {"loss": 2.0}))]


def updates_of(*, kept):
    updates = Updates(kept=kept)
    for partition, update in ARRIVED:
        updates.add(partition, update)
    return updates


def test_updates_that_are_kept_can_be_read_again():
    updates = updates_of(kept=True)
    assert updates.each == dict(ARRIVED)
    assert updates.metrics == {3: {"loss": 1.0}, 1: {"loss": 2.0}}


def test_of_updates_that_are_not_kept_only_the_partitions_and_metrics_stay():
    updates = updates_of(kept=False)
    assert [*updates.each] == [3, 1]
    assert len(updates.each) == 2
    assert updates.metrics == {3: {"loss": 1.0}, 1: {"loss": 2.0}}
    with pytest.raises(InvalidValue, match="needs_each_update = True"):
        updates.each[3]
