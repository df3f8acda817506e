"""Settings for all tests.

The process that hands out tests to others imports this module before it starts them. It needs
neither PyTorch nor the package, which take seconds.
"""

import gc
import os
from logging import Logger, getLogger
from pathlib import Path
from types import SimpleNamespace

import pytest

# Workers of Ray yield to all other processes unless told otherwise; beside tests they would starve.
os.environ.setdefault("RAY_worker_niceness", "0")


def has_room(folder: Path) -> bool:
    """Return True if tests can write their files to ``folder`` and execute them there.

    A container may have a small folder in memory, or one whose files cannot be executed.
    """
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    return free > 2 * 2**30 and not system.f_flag & os.ST_NOEXEC


# Runs wait for the disk thousands of times, after each line of a ledger. Memory does not wait.
if has_room(Path("/dev/shm")):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# A worker collects 8,000 tests, none of which is garbage.
gc.set_threshold(200_000, 20, 20)


@pytest.fixture(autouse=True)
def without_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """End runs of this process without their report, unless a test is marked ``report``.

    Drawing the figures of a report takes longer than a small run. So reports and comparisons have
    no figures, even if the test itself asks for them, unless the test is marked ``figures``.
    """
    from flower_ext import runs
    from flower_ext.runs import comparison, report

    if request.node.get_closest_marker("report") is None:
        monkeypatch.setattr(runs, "write_report", lambda run: run.path)
    if request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(report, "draw_figures", lambda run, folder: {})
        monkeypatch.setattr(comparison, "_figures", lambda groups, folder: {})


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return the log of Flower."""
    monkeypatch.setattr(getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", logger="flwr")
    return caplog


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all data folders except those that a test names."""
    monkeypatch.delenv("FLOWER_EXT_DATA", raising=False)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that the test calls run apps in forks of its process, not in a new Python."""
    # Each run imports these two for its accounting and its report.
    import dp_accounting  # noqa: F401
    import matplotlib.figure  # noqa: F401

    from flower_ext.cli import processes
    from tests.support.forked_runs import Fork

    known = vars(processes.subprocess)
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(**{**known, "Popen": Fork}))


def pytest_collection_finish() -> None:
    """Let PyTorch use one thread, and leave all loaded modules out of garbage collections."""
    import torch

    # Tests run side by side with tiny models, so more threads would only wait for one another.
    torch.set_num_threads(1)
    # In each phase of each test, pytest adds handlers to all loggers that do not propagate. PyTorch
    # has forty of them.
    for name, logger in getLogger().manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
