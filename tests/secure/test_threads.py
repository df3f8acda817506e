"""Work in threads."""

import logging

import pytest

from flower_ext.secure import threads
from flower_ext.secure.threads import map_slices


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_order_whatever_the_number_of_threads(workers, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: workers)
    for count in (0, 1, 7, 500):
        squares = map_slices(lambda xs: [x * x for x in xs], range(count))
        assert squares == [x * x for x in range(count)]


def test_only_long_work_with_a_name_logs_the_time_left(caplog, monkeypatch):
    clock = iter(3.0 * tick for tick in range(100))
    monkeypatch.setattr(threads.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "flwr"):
        map_slices(lambda xs: xs, range(8))
        map_slices(lambda xs: xs, range(8), name="coordinates")
    assert [record.message for record in caplog.records] == ["coordinates: 4 of 8, 12 s left"]
