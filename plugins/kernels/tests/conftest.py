"""Fixtures for tests of the machine code.

The process that hands out tests imports this module too, so PyTorch is imported in the fixtures.
"""

import pytest


@pytest.fixture(autouse=True)
def _offered(monkeypatch):
    """Offer the form of this plug-in, even if the plug-in is not installed."""
    from flower_ext import plugins
    from flower_ext_kernels import network

    monkeypatch.setattr(plugins, "offered", lambda group: (network.form_for,))


@pytest.fixture
def compiled(monkeypatch):
    """Count the models that machine code trains, except those of trials."""
    from flower_ext.training.batched import many
    from flower_ext_kernels import network

    trained = []
    train, trains_alike = network.CompiledNetwork.train, many.trains_alike

    def counted(self, jobs, *others):
        trained.extend(jobs)
        return train(self, jobs, *others)

    def tried(*given):
        before = len(trained)
        answer = trains_alike(*given)
        del trained[before:]
        return answer

    monkeypatch.setattr(network.CompiledNetwork, "train", counted)
    monkeypatch.setattr(many, "trains_alike", tried)
    return trained
