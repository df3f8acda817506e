"""Fixtures for tests of batched training."""

import pytest

from flower_ext.training.batched import many
from flower_ext.training.batched.mapped import MappedModel


@pytest.fixture
def batched(monkeypatch):
    """Train every job in a batch, however small; return the number of jobs in each batch."""
    held = []
    groups = many.train_groups

    def counted(*args, **settings):
        for group, rows in groups(*args, **settings):
            held.extend([len(group)] * (len(group) > 1))
            yield group, rows

    monkeypatch.setattr(MappedModel, "fewest", 1)
    monkeypatch.setattr(many, "train_groups", counted)
    return held
