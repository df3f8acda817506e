"""One run of a method with many canaries, each a client with an axis of the model.

``python plugins/audit/tests/many_canaries.py`` measures the bounds of one run in docs/audit.md.
"""

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    FullParticipation,
    ReleasePlan,
    SecureSum,
)
from flower_ext.training import Task
from flower_ext_audit import ViewAudit, World, audit_in_one_run
from flower_ext_audit.linear import BEYOND, HUGE, ONE_STEP, Turns

SERVER: dict[str, Any] = {"noise_placement": "server"}
MECHANISMS: dict[str, tuple[dict[str, Any], float]] = {
    "server noise": (SERVER, HUGE),
    "adaptive clipping": (SERVER | {"clipping_norm": AdaptiveClipping(initial_norm=1.0)}, HUGE),
    "secure sum": ({"noise_placement": SecureSum(colluding=0.0, dropouts=0.0)}, BEYOND),
}
"""Options of the plan and the force of a canary, by mechanism."""


def plan_of(
    mechanism: str, *, canaries: int, noise_multiplier: float, delta: float
) -> tuple[ReleasePlan, float]:
    """Return the plan of a mechanism for one round of all canaries, and their force."""
    options, force = MECHANISMS[mechanism]
    usual: dict[str, Any] = {
        "sampling": FullParticipation(canaries),
        "clipping_norm": 1.0,
        "noise_multiplier": noise_multiplier,
        "rounds": 1,
        "delta": delta,
    }
    return ReleasePlan(**usual | options), force


def audit_of(
    plan: ReleasePlan, *, canaries: int, guesses: int, confidence: float, force: float
) -> ViewAudit:
    """Audit one round of DP-FedAvg, in which each canary pulls its axis with ``force``."""

    def world(included: np.ndarray) -> World:
        axes = force * torch.eye(canaries) * torch.tensor(included).float()

        def data(partition: int) -> ClientData:
            record = Examples(axes[partition : partition + 1], torch.ones(1))
            return ClientData(train=record, test=record)

        task = Task(
            model=lambda: nn.Linear(canaries, 1, bias=False),
            data=data,
            loss=Turns().loss,
            metrics={},
            device="cpu",
        )
        return World(
            strategy=lambda: FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=0),
            client_app=DPFedAvg.client_app(task),
            num_clients=canaries,
        )

    return audit_in_one_run(
        world,
        initial=ArrayRecord({"weight": torch.zeros(1, canaries)}),
        scores=lambda seen: np.ravel(seen.models[1]["weight"]),
        canaries=canaries,
        guesses=guesses,
        view=AdversaryView.RELEASED_MODELS,
        confidence=confidence,
    )


def main(runs: int = 5, canaries: int = 400, guesses: int = 80) -> None:
    """Print the medians of both bounds for each mechanism."""
    for mechanism in MECHANISMS:
        plan, force = plan_of(mechanism, canaries=canaries, noise_multiplier=1.0, delta=1e-5)
        audits = [
            audit_of(plan, canaries=canaries, guesses=guesses, confidence=0.95, force=force)
            for _ in range(runs)
        ]
        medians = np.median([[b.epsilon for b in audit.bounds] for audit in audits], axis=0)
        reported = audits[0].best.terms.reported
        print(f"{mechanism}: reported {reported:.2f}, shown {np.round(medians, 2)}")


if __name__ == "__main__":
    main()
