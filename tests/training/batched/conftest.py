"""Fixtures for tests of batched training."""

import pytest

from flower_ext.training.batched import many, network


@pytest.fixture
def compiled(monkeypatch):
    """Count the models that compiled code trains, but for those of trials."""
    trained = []
    minimise, trains_alike = network.CompiledNetwork.minimise, many.trains_alike

    def counted(self, jobs, *others):
        trained.extend(jobs)
        return minimise(self, jobs, *others)

    def tried(*given):
        before = len(trained)
        answer = trains_alike(*given)
        del trained[before:]
        return answer

    monkeypatch.setattr(network.CompiledNetwork, "minimise", counted)
    monkeypatch.setattr(many, "trains_alike", tried)
    return trained
