"""Fixtures of tests of federations."""

from logging import getLogger

import pytest


@pytest.fixture
def logged(caplog, monkeypatch):
    """What the log of Flower says."""
    monkeypatch.setattr(getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", logger="flwr")
    return caplog
