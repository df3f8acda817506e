"""Above a frozen base the trained part is as private as reported, and faults still show."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData
from flower_ext.training import Task
from flower_ext_audit import audit
from flower_ext_audit.experiment import World, projected
from flower_ext_audit.linear import HUGE, SIZE, Turns, pulls
from flower_ext_audit.mechanisms import MECHANISMS
from tests.support import planted_faults as faults
from tests.support.grids import grid

CONFIDENCE, OF_A_FAULT = 1 - 1e-6, 0.999
VAST_NOISE, FEWEST, FEWEST_CLEAN = 64.0, 24, 40
"""An ε near 0.1 is reported, which a fault that no noise hides exceeds in so few trials."""


class Based(nn.Module):
    """A frozen layer with statistics, below a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE))
        self.base[0].weight.data.copy_(torch.eye(SIZE))
        self.base.requires_grad_(False)
        self.head = nn.Linear(SIZE, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


def client(feature: float) -> ClientData:
    return ClientData(train=pulls(feature), test=pulls(feature))


def experiment(noise: float = 1.0):
    """Return `client-noise`, with its plan and strategy, and a frozen base below its model."""
    plain, turns = MECHANISMS["client-noise"].experiment(noise=noise), Turns()

    def world(canary: float) -> World:
        data = [client(canary), client(0.0)]
        task = Task(model=Based, data=data.__getitem__, loss=turns.loss, metrics={}, device="cpu")
        return replace(plain.without, client_app=DPFedAvg.client_app(task))

    return replace(
        plain,
        name="client noise above a frozen base",
        without=world(0.0),
        present=world(HUGE),
        initial=ArrayRecord({"head.weight": torch.zeros(1, SIZE)}),
        score=projected({"head.weight": np.eye(1, SIZE)}, partitions=[0]),
        on_round=turns.begin,
    )


def test_no_bound_exceeds_what_is_reported():
    outcome = audit(experiment(noise=VAST_NOISE), trials=FEWEST_CLEAN, confidence=CONFIDENCE)
    assert not outcome.broken, outcome.to_dict()
    assert all(view.best.terms.reported > 0 for view in outcome.views)


@pytest.mark.parametrize(
    ("plant", "noise", "trials"),
    grid(
        [
            pytest.param(faults.clipping_off, VAST_NOISE, FEWEST, id="clip"),
            pytest.param(faults.less_noise(8), 2.0, 64, id="σ/8"),
        ],
        lambda fault: fault == "clip",
    ),
)
def test_a_planted_fault_is_found(plant, noise, trials, monkeypatch):
    planted = plant(monkeypatch, experiment(noise=noise))
    outcome = audit(planted, trials=trials, confidence=OF_A_FAULT)
    assert outcome.broken, outcome.to_dict()
