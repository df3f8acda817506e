"""Fixtures for tests of batched training."""

import pytest

from flower_ext.training.batched import network


@pytest.fixture
def compiled(monkeypatch):
    """Count the models that compiled code trains."""
    trained = []
    minimise = network.CompiledNetwork.minimise

    def counted(self, jobs, *others):
        trained.extend(jobs)
        return minimise(self, jobs, *others)

    monkeypatch.setattr(network.CompiledNetwork, "minimise", counted)
    return trained
