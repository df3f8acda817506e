"""Fixtures for tests of batched training."""

import pytest

from flower_ext import plugins


@pytest.fixture(autouse=True)
def _without_plugins(monkeypatch):
    """Train in the package's own forms, even where a plug-in is installed."""
    monkeypatch.setattr(plugins, "offered", lambda group: ())
