"""Clients, plans and updates for tests of protections."""

from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.upload import protected
from flower_ext.federation.messages import records
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.privacy import (
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    ReleasePlan,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.protections import Unprotected
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.training import LocalTraining, Task
from tests.support.jobs import train_one
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder

CLIENTS = 3
ROUND = {"number": 1, "seed": 0}
"""The entries that every message of a round has."""
DIMENSION = 2
MU = 0.1
EXACT = LocalTraining(tolerance=1e-10, proximal_weight=MU)
OUTPUT = OutputPerturbation(clipping_norm=0.8, noise_stddev=0.05)
OBJECTIVE = ObjectivePerturbation(rate=2.0)
KNOWN = LocalObjective(
    convex=True,
    generalised_linear=True,
    gradient_bound=1.0,
    curvature_bound=0.25,
    feature_norm_bound=1.0,
)


def facts_of(the_plan, cohort_size=4, *, seeded_noise=False, bounds_units=False):
    """Return the facts in a method's message under a plan."""
    method = MethodTraits(name="method", bounds_units=bounds_units)
    run = RunSummary(
        method=method,
        participations=Participations(),
        training={"local": EXACT},
        proximal_weight=MU,
    )
    mechanism = the_plan.mechanism(method) if isinstance(the_plan, ReleasePlan) else the_plan
    return facts_under(mechanism.protection(run, cohort_size), seeded_noise=seeded_noise)


def facts_under(protection, *, seeded_noise=False):
    """Return the entries of a message that ask clients for a protection."""
    of_round = RoundEntries(
        number=1, seed=0, protection=protection or Unprotected(), seeded_noise=seeded_noise
    )
    return {name: value for name, value in of_round.to_record().items() if name not in ROUND}


def protection_in(facts):
    """Return the protection for which the entries of a message ask."""
    return RoundEntries.of({**ROUND, **facts}).protection


def leaving(update, received, facts, *, context=None, allow_seeded_noise=False):
    """Return the upload of a client whose request has ``facts``."""
    of_round = RoundEntries.of({**ROUND, **facts})
    noise = NodePolicy(context, allow_seeded_noise).noise(of_round, "client-noise")
    return protected(update, received, of_round.protection, noise)


def logistic_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-labels * outputs.squeeze(1)).mean()


def client_data(client: int, size: int = 12) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(size, DIMENSION, generator=generator).double()
    x /= x.norm(dim=1, keepdim=True).clamp(min=1.0)
    y = torch.sign(x[:, 0] - 0.3 + 0.1 * torch.randn(size, generator=generator))
    data = Examples(features=x, targets=y)
    return ClientData(train=data, test=data)


def task(sizes: dict[int, int] | None = None) -> Task:
    """Return logistic regression of two classes in float64, without bias."""
    return Task(
        model=lambda: nn.Linear(DIMENSION, 1, bias=False).double(),
        data=lambda client: client_data(client, (sizes or {}).get(client, 12)),
        loss=logistic_loss,
        metrics={},
        device="cpu",
    )


def initial(value: float = 0.5) -> ArrayRecord:
    return ArrayRecord({"weight": torch.full((1, DIMENSION), value).double()})


def plan(perturbation=OUTPUT, **changes) -> PerturbationPlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "perturbation": perturbation,
        "objective": KNOWN,
        "delta": 1e-3,
    }
    return PerturbationPlan(**{**facts, **changes})


def run(the_plan, *, start=None, rounds=1, clients=CLIENTS, app=None, **options):
    """Run FedAvg under a plan; return the strategy and all messages."""
    app = app or DPFedAvg.client_app(task(), allow_seeded_noise=True)
    grid = Recorder(app, num_clients=clients)
    strategy = strategy_of(
        DPFedAvg, plan=the_plan, **{"local": EXACT, "evaluate_every": 0, **options}
    )
    strategy.start(grid, start or initial(), num_rounds=rounds)
    return strategy, grid


def of_training(messages):
    return [m for m in messages if m.metadata.message_type.startswith("train")]


def uploads(grid) -> dict[int, np.ndarray]:
    """Return the model that each client sent in the only round, by partition."""
    sent = {}
    for question, reply in zip(of_training(grid.sent), of_training(grid.received), strict=True):
        base = question.content.array_records[records.MODEL]["weight"].numpy()
        update = reply.content.array_records[records.UPDATE]["weight"].numpy()
        sent[reply.metadata.src_node_id - 1_000] = (base + update).ravel()
    return sent


def trained(client: int, start: float = 0.5) -> np.ndarray:
    """Return a client's exact local model, without any protection."""
    params = {"weight": torch.full((1, DIMENSION), start).double()}
    moved = train_one(task(), params, client_data(client).train, EXACT, generator=torch.Generator())
    return moved["weight"].numpy().ravel()


private_plan = partial(release_plan, CLIENTS)
