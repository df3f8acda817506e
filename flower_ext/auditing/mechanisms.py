"""The package's own mechanisms as experiments: tiny runs whose canary makes the tight case.

The model is linear and its loss as well, so that an update is a sum of features, whatever the
model: the canary's are far above every bound, along one axis; all others pull the other way, or
not at all. The loss turns its sign with every round, which noise that is used twice does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedProx
from torch import Tensor, nn

from flower_ext.algorithms import DPDitto, DPFedAvg, Hosted
from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.auditing.experiment import Experiment, World, projected
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import (
    AdversaryView,
    ClippedSteps,
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    PrivacyUnit,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.training import DpSgdTraining, LocalTraining, Task

SIZE = 100
"""Numbers of the model."""
HUGE = 1e3
"""Of a canary's features: far above every bound."""
LARGE = 30.0
"""The same, and below what a server refuses of clients that noise: so that it is released."""
DELTA = 1e-5
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


@dataclass
class Turns:
    """A public schedule: the sign of the loss turns with every round."""

    sign: float = field(default=1.0)

    def begin(self, number: int) -> None:
        """Begin training round ``number``, from 1."""
        self.sign = 1.0 if number % 2 else -1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the mean output, or plus."""
        return -self.sign * (outputs.squeeze(-1) * targets).mean()

    __hash__ = object.__hash__


def pulls(*features: float, size: int = SIZE) -> Examples:
    """Records along the first axis, one a number."""
    x = torch.zeros(len(features), size)
    x[:, 0] = torch.tensor(features)
    return Examples(x, torch.ones(len(features)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy, and each partition's data without the canary and with it."""

    name: str
    strategy: Callable[[], FederatedStrategy]
    without: Sequence[ClientData]
    present: Sequence[ClientData]
    views: Sequence[AdversaryView] = tuple(AdversaryView)
    rounds: int = 1
    partitions: Sequence[int] | None = None
    whole: bool = False
    gaussian: bool | None = None
    size: int = SIZE

    def experiment(self) -> Experiment:
        """The two worlds."""
        turns = Turns()
        method = type(self.strategy())

        def world(data: Sequence[ClientData]) -> World:
            task = Task(
                model=lambda: nn.Linear(self.size, 1, bias=False),
                data=lambda partition: data[partition],
                loss=turns.loss,
                metrics={},
                device="cpu",
            )
            return World(
                strategy=self.strategy, client_app=method.client_app(task), num_clients=len(data)
            )

        axis = np.zeros((1, self.size))
        axis[0, 0] = 1.0
        return Experiment(
            name=self.name,
            without=world(self.without),
            present=world(self.present),
            initial=ArrayRecord({"weight": torch.zeros(1, self.size)}),
            score=projected(
                {"weight": axis},
                signs=[1.0 - 2.0 * (number % 2) for number in range(self.rounds)],
                partitions=self.partitions,
                whole=self.whole,
            ),
            rounds=self.rounds,
            views=self.views,
            gaussian=self.gaussian,
            on_round=turns.begin,
        )


def _client(*features: float, size: int = SIZE) -> ClientData:
    own = pulls(*features, size=size)
    return ClientData(train=own, test=own)


def _silo(owners: Sequence[int], features: Sequence[float]) -> SiloData:
    own = pulls(*features)
    return SiloData(train=own, test=own, owners=torch.tensor(owners))


def client_level(placement: Any = "client", *, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPFedAvg` over two clients, one of them the canary."""
    plan = ReleasePlan(
        sampling=FullParticipation(2),
        clipping_norm=1.0,
        noise_multiplier=0.5 * noise,
        rounds=rounds,
        delta=DELTA,
        noise_placement=placement,
    )
    return Case(
        name=f"client level, noise by the {placement}",
        strategy=lambda: DPFedAvg(plan=plan, local=ONE_STEP, evaluate_every=0),
        without=[_client(0.0), _client(0.0)],
        present=[_client(HUGE), _client(0.0)],
        rounds=rounds,
        partitions=[0],
    ).experiment()


def client_level_sampled(
    placement: Any = "client", *, noise: float = 1.0, rounds: int = 1
) -> Experiment:
    """`DPFedAvg` with Poisson sampling: amplified, against who sees released models."""
    plan = ReleasePlan(
        sampling=PoissonSampling(2, 0.5),
        clipping_norm=1.0,
        noise_multiplier=3.0 * noise,
        rounds=rounds,
        delta=DELTA,
        noise_placement=placement,
    )
    return Case(
        name=f"client level, Poisson sampling, noise by the {placement}",
        strategy=lambda: DPFedAvg(plan=plan, local=ONE_STEP, evaluate_every=0),
        without=[_client(0.0), _client(0.0)],
        present=[_client(LARGE), _client(0.0)],
        views=[AdversaryView.RELEASED_MODELS],
        rounds=rounds,
    ).experiment()


def uldp(method: Any = UldpAvg, *, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpAvg` or `UldpSgd`: a user with a record in each of two silos."""
    plan = ReleasePlan(
        sampling=FullParticipation(3),
        clipping_norm=1.0,
        noise_multiplier=0.5 * noise,
        rounds=rounds,
        delta=DELTA,
        unit=PrivacyUnit.USER,
    )
    local = {"local": ONE_STEP} if method is UldpAvg else {}
    return Case(
        name="ULDP-AVG" if method is UldpAvg else "ULDP-SGD",
        strategy=lambda: method(plan=plan, num_silos=2, evaluate_every=0, **local),
        without=[_silo([1, 2], [0.0, 0.0])] * 2,
        present=[_silo([0, 1, 2], [HUGE, 0.0, 0.0])] * 2,
        rounds=rounds,
    ).experiment()


def uldp_by_records(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpAvg` weighted by records, as under encryption: a user with all weight in one silo."""
    plan = ReleasePlan(
        sampling=FullParticipation(3),
        clipping_norm=1.0,
        noise_multiplier=0.5 * noise,
        rounds=rounds,
        delta=DELTA,
        unit=PrivacyUnit.USER,
    )
    return Case(
        name="ULDP-AVG, weighted by records",
        strategy=lambda: UldpAvg(
            plan=plan, num_silos=2, weighting="by-records", local=ONE_STEP, evaluate_every=0
        ),
        without=[_silo([1, 2], [0.0, 0.0])] * 2,
        present=[_silo([0, 1, 2], [HUGE, 0.0, 0.0]), _silo([1, 2], [0.0, 0.0])],
        rounds=rounds,
        partitions=[0],
    ).experiment()


def uldp_naive(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpNaive`: with the canary user, both silos' updates point the other way."""
    plan = ReleasePlan(
        sampling=FullParticipation(2),
        clipping_norm=1.0,
        noise_multiplier=noise,
        rounds=rounds,
        delta=DELTA,
        unit=PrivacyUnit.USER,
    )
    return Case(
        name="ULDP-NAIVE",
        strategy=lambda: UldpNaive(plan=plan, num_silos=2, local=ONE_STEP, evaluate_every=0),
        without=[_silo([1], [-HUGE])] * 2,
        present=[_silo([0, 1], [3 * HUGE, -HUGE])] * 2,
        rounds=rounds,
    ).experiment()


def uldp_group(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpGroup` of two records, both in one silo; every step takes all records."""
    local = DpSgdTraining(
        steps=1,
        sampling_rate=1.0,
        batch_size=1.0,
        learning_rate=1.0,
        clipping_norm=1.0,
        noise_multiplier=noise,
    )
    return Case(
        name="ULDP-GROUP-2",
        strategy=lambda: UldpGroup(
            num_silos=2, num_users=2, group_size=2, local=local, delta=DELTA, evaluate_every=0
        ),
        without=[_silo([1], [0.0])] * 2,
        present=[_silo([0, 0, 1], [HUGE, HUGE, 0.0]), _silo([1], [0.0])],
        rounds=rounds,
        partitions=[0],
        gaussian=True,  # nothing is sub-sampled
    ).experiment()


def ditto_uploads(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPDitto` with noise on clipped models: one record turns the model around."""
    plan = RecordLevelPlan(
        sampling=FullParticipation(1),
        clipping_norm=1.0,
        noise_stddev=noise,
        num_examples=2,
        rounds=rounds,
        delta=DELTA,
    )
    return Case(
        name="DP-Ditto, uploads",
        strategy=lambda: DPDitto(
            plan=plan, local=ONE_STEP, personal_training=ONE_STEP, evaluate_every=0
        ),
        without=[_client(-HUGE, 0.0)],
        present=[_client(HUGE, 0.0)],
        rounds=rounds,
        whole=True,
    ).experiment()


def ditto_steps(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPDitto` with clipped and noised steps: one record's gradients turn around."""
    steps = ClippedSteps(
        learning_rate=1.0, gradient_clipping_norm=1.0, num_examples=2, local_steps=2
    )
    plan = RecordLevelPlan(
        sampling=FullParticipation(1),
        clipping_norm=1e3,
        noise_stddev=0.7 * noise,
        num_examples=2,
        rounds=rounds,
        delta=DELTA,
        steps=steps,
    )
    local = LocalTraining(steps=2, batch_size=2, learning_rate=1.0)
    return Case(
        name="DP-Ditto, clipped steps",
        strategy=lambda: DPDitto(
            plan=plan, local=local, personal_training=ONE_STEP, evaluate_every=0
        ),
        without=[_client(-HUGE, 0.0)],
        present=[_client(HUGE, 0.0)],
        rounds=rounds,
    ).experiment()


def output_perturbation(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """FedAvg with clipped and noised models: one record turns the model around."""
    plan = PerturbationPlan(
        sampling=FullParticipation(1),
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=noise),
        delta=DELTA,
    )
    return Case(
        name="output perturbation",
        strategy=lambda: Hosted(
            FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0),
            plan=plan,
            local=ONE_STEP,
            evaluate_every=0,
        ),
        without=[_client(-HUGE, 0.0)],
        present=[_client(HUGE, 0.0)],
        rounds=rounds,
        whole=True,
    ).experiment()


def objective_perturbation(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """FedProx whose exact minimisers are perturbed: one record turns around, in one dimension."""
    plan = PerturbationPlan(
        sampling=FullParticipation(1),
        perturbation=ObjectivePerturbation(rate=1 / noise),
        objective=LocalObjective(
            convex=True,
            generalised_linear=True,
            gradient_bound=1.0,
            curvature_bound=0.0,
            feature_norm_bound=1.0,
        ),
        delta=DELTA,
    )
    return Case(
        name="objective perturbation",
        strategy=lambda: Hosted(
            FedProx(
                proximal_mu=1.0, min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0
            ),
            plan=plan,
            local=LocalTraining(tolerance=1e-9),
            evaluate_every=0,
        ),
        without=[_client(-1.0, 0.0, size=1)],
        present=[_client(1.0, 0.0, size=1)],
        rounds=rounds,
        size=1,
    ).experiment()


MECHANISMS: dict[str, Callable[..., Experiment]] = {
    "client-noise": client_level,
    "server-noise": lambda **more: client_level("server", **more),
    "client-noise-poisson": client_level_sampled,
    "server-noise-poisson": lambda **more: client_level_sampled("server", **more),
    "uldp-avg": uldp,
    "uldp-sgd": lambda **more: uldp(UldpSgd, **more),
    "uldp-avg-by-records": uldp_by_records,
    "uldp-naive": uldp_naive,
    "uldp-group": uldp_group,
    "ditto-uploads": ditto_uploads,
    "ditto-steps": ditto_steps,
    "output-perturbation": output_perturbation,
    "objective-perturbation": objective_perturbation,
}
"""By the names that ``flower-ext audit`` knows them by; each may be given ``rounds``, and
``noise``, in multiples of what it has by default."""
