"""One run with many canaries: no bound exceeds the reported ε, unless clipping is off."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.auditing import World, audit_in_one_run
from flower_ext.auditing.linear import ONE_STEP, Turns
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import AdversaryView, FullParticipation, ReleasePlan
from flower_ext.training import Task
from tests.support import planted_faults as faults

CANARIES = 200


@pytest.mark.parametrize("clipped", [True, False])
def test_one_run_exceeds_what_is_reported_where_clipping_is_off_alone(clipped, monkeypatch):
    if not clipped:
        faults.clipping_off(monkeypatch, None)
    plan = ReleasePlan(
        sampling=FullParticipation(CANARIES),
        clipping_norm=1.0,
        noise_multiplier=4.0,
        rounds=1,
        delta=1e-7,
        noise_placement="server",
    )

    def world(included):
        axes = 1e3 * torch.eye(CANARIES) * torch.tensor(included).float()

        def data(partition):
            own = Examples(axes[partition : partition + 1], torch.ones(1))
            return ClientData(train=own, test=own)

        task = Task(
            model=lambda: nn.Linear(CANARIES, 1, bias=False),
            data=data,
            loss=Turns().loss,
            metrics={},
            device="cpu",
        )
        return World(
            strategy=lambda: FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=0),
            client_app=DPFedAvg.client_app(task),
            num_clients=CANARIES,
        )

    found = audit_in_one_run(
        world,
        initial=ArrayRecord({"weight": torch.zeros(1, CANARIES)}),
        scores=lambda seen: np.ravel(seen.models[1]["weight"]),
        canaries=CANARIES,
        guesses=CANARIES // 2,
        view=AdversaryView.RELEASED_MODELS,
        confidence=0.9999,
    )
    assert found.exceeds is not clipped, found
