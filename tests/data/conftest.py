"""Fixtures of tests of data."""

import pytest


@pytest.fixture
def offline(monkeypatch):
    """No folder of data but those that a test names, and no hub."""
    monkeypatch.delenv("FLOWER_EXT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
