"""Fixtures of tests of data."""

import pytest


@pytest.fixture
def offline(monkeypatch):
    """Hide all data folders except those that a test names, and the hub."""
    monkeypatch.delenv("FLOWER_EXT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
