"""Settings for all tests."""

import gc
from logging import getLogger

import pytest
import torch

from flower_ext import runs

# Tests run side by side and their models are tiny: more threads would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def without_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """End runs of this process without their report, unless a test is marked ``report``.

    Its figures take longer to draw than a small run takes.
    """
    if request.node.get_closest_marker("report") is None:
        monkeypatch.setattr(runs, "write_report", lambda run: run.path)


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return the log of Flower."""
    monkeypatch.setattr(getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", logger="flwr")
    return caplog


def pytest_collection_finish() -> None:
    """Keep the collections of garbage that runs begin with from walking through all modules."""
    gc.collect()
    gc.freeze()
