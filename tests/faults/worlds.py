"""Small real learning problems, on which the methods run under faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from flower_ext.algorithms import (
    APFL,
    Apple,
    Centaur,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    FedALA,
    FedAMP,
    FedPer,
    FedRep,
    PFedMe,
    Scaffold,
)
from flower_ext.algorithms.scaffold import STEPS
from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
)
from flower_ext.data import Examples, SiloData
from flower_ext.federation import FederatedStrategy, Sgd
from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted import SUM
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.secure.weighting.protocol import WeightingProtocol, load_protocol, protocols
from flower_ext.training import LocalTraining, Task
from tests.faults.grid import Rates, times
from tests.faults.malformed import ENVELOPE, METRICS, TRAIN, Mutation, in_array, metric
from tests.support.plans import release_plan
from tests.support.strategies import private_strategy_of, strategy_of

CLIENTS, SILOS, USERS, SEED = 8, 3, 12, 5
CLASSES, FEATURES, RECORDS = 3, 5, 20
FAST = LocalTraining(epochs=1, batch_size=10)


class Net(nn.Module):
    """Two layers, of which the last is the personal head of methods that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.extractor(x)))
        return result


def client_data(number: int) -> SiloData:
    """Return the records of one client or silo, and their owners."""
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(RECORDS + 10, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (RECORDS + 10,), generator=generator)
    features[:, 0] += 2.0 * targets
    return SiloData(
        train=Examples(features[:RECORDS], targets[:RECORDS]),
        test=Examples(features[RECORDS:], targets[RECORDS:]),
        owners=torch.randint(USERS, (RECORDS,), generator=generator),
    )


DATA = [client_data(number) for number in range(CLIENTS)]


def task() -> Task:
    """Return the problem as a task for every method."""
    return Task(model=Net, data=lambda number: DATA[number], device="cpu")


def initial() -> ArrayRecord:
    """Return the model before the first round."""
    return ArrayRecord(task().initial_params(SEED))


USUAL = Rates()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method, and the faults that can happen to its replies."""

    name: str
    build: Callable[..., FederatedStrategy]
    """A function that takes options of `FederatedStrategy`."""
    nodes: int = CLIENTS
    rates: Rates = USUAL
    mutations: dict[str, Mutation]
    huge: Mutation | None = None

    def client_app(self, strategy: FederatedStrategy) -> ClientApp:
        """Return its ClientApp, which allows simulation."""
        return strategy.method.client_app(task(), allow_seeded_noise=True)


private_plan = partial(
    release_plan, CLIENTS, sampling=PoissonSampling(CLIENTS, 0.7), rounds=200, delta=1e-3
)


def user_plan(**changes: Any) -> ReleasePlan:
    """Return a plan of user-level privacy over silos."""
    return private_plan(**{"sampling": PoissonSampling(USERS, 0.6), **changes})


def record_plan() -> RecordLevelPlan:
    """Return a plan of record-level privacy for each client's uploads."""
    return RecordLevelPlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=2.0,
        noise_stddev=0.3,
        num_examples=RECORDS,
        rounds=200,
        delta=1e-3,
    )


def nobody_private() -> NonPrivatePlan:
    """Return a plan without privacy; the server refuses bad replies under it, too."""
    return NonPrivatePlan(sampling=FullParticipation(CLIENTS))


_SPARSE = Rates(
    dropped=0.01,
    late=0.04,
    malformed=0.01,
    raises=0.01,
    huge=0.01,
    duplicated=0.25,
    replayed=0.25,
    relabelled=0.25,
    stranger=0.1,
)
_NO_HUGE = Rates(huge=0.0)

CASES: tuple[Case, ...] = (
    Case(
        name="DP-FedAvg, clients noise",
        build=lambda **o: strategy_of(DPFedAvg, plan=private_plan(), local=FAST, **o),
        mutations=TRAIN,
        huge=times(1e4),
    ),
    Case(
        name="DP²-FedSAM, clients noise",
        build=lambda **o: strategy_of(
            DP2FedSAM, plan=private_plan(), head=FAST, extractor=FAST, **o
        ),
        rates=_SPARSE,
        mutations=TRAIN,
        huge=times(1e4),
    ),
    Case(
        name="DP-FedAvg, server noises",
        build=lambda **o: strategy_of(
            DPFedAvg, plan=private_plan(noise_placement="server"), local=FAST, **o
        ),
        rates=_NO_HUGE,  # uploads are clipped
        mutations=TRAIN,
    ),
    Case(
        name="ULDP-AVG, silos noise",
        build=lambda **o: strategy_of(
            UldpAvg,
            plan=user_plan(),
            num_silos=SILOS,
            local=FAST,
            server=Sgd(learning_rate=3.0),
            **o,
        ),
        nodes=SILOS,
        mutations=TRAIN,
        huge=times(1e4),
    ),
    Case(
        name="DP-Ditto, noise on models",
        build=lambda **o: strategy_of(
            DPDitto, plan=record_plan(), local=FAST, personal_training=FAST, **o
        ),
        mutations=TRAIN,
        huge=times(1e4),
    ),
    Case(
        name="SCAFFOLD, no privacy",
        build=lambda **o: strategy_of(Scaffold, plan=nobody_private(), local=FAST, **o),
        rates=_NO_HUGE,  # no bound says that an upload is too large
        mutations={
            **TRAIN,
            "steps impossible": metric(STEPS, [0, -1, 0.5, float("nan"), [2], 10**400]),
        },
    ),
)


def _renumbered(message: np.ndarray, number: int) -> np.ndarray:
    """Return a masked sum with another number of its round, which follows its kind."""
    return np.concatenate(
        [message[:4], np.frombuffer(number.to_bytes(8, "big"), np.uint8), message[12:]]
    )


_SUM = {
    "no ciphertext": in_array(
        records.UPDATE,
        lambda a, rng: type(a)(np.full(a.shape, rng.choice([0, 255]), np.uint8)),
        only=SUM,
    ),
    "number of another round": in_array(
        records.UPDATE,
        lambda a, rng: type(a)(_renumbered(a.numpy(), int(rng.choice([0, 10**6, 2**62])))),
        only=SUM,
    ),
}
PRIVATE = Case(
    name="ULDP-AVG-w, encrypted",
    build=lambda **o: private_strategy_of(
        UldpAvg,
        plan=user_plan(),
        num_silos=SILOS,
        local=FAST,
        protocol=PrivateWeighting(
            key_bits=512, allow_insecure_key_size=True, max_records_per_user=60, precision=1e-4
        ),
        **o,
    ),
    nodes=SILOS,
    rates=Rates(
        dropped=0.03,
        late=0.06,
        malformed=0.05,
        raises=0.03,
        huge=0.0,
        duplicated=0.25,
        replayed=0.25,
        relabelled=0.25,
        stranger=0.1,
    ),
    mutations={
        **{
            n: m
            for n, m in TRAIN.items()
            if not n.startswith("array ") or n[6:] not in ("NaN", "infinite", "huge")
        },
        **_SUM,
        **METRICS,
        **ENVELOPE,
    },
)


def _plug_in(name: str) -> Case:
    """Return private weights under the protocol of a plug-in."""
    protocol: Callable[..., WeightingProtocol] = load_protocol(name)
    return replace(
        PRIVATE,
        name=f"ULDP-AVG-w, protocol {name}",
        build=lambda **o: private_strategy_of(
            UldpAvg,
            plan=user_plan(),
            num_silos=SILOS,
            local=FAST,
            protocol=protocol(max_records_per_user=60),
            **o,
        ),
    )


PRIVATE_PLUG_INS = tuple(_plug_in(name) for name in sorted(protocols()) if name != "paillier")


PERSONALISED: dict[str, Callable[[], FederatedStrategy]] = {
    "DP²-FedSAM": lambda: FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), private_plan()),
    "CENTAUR": lambda: FederatedStrategy(Centaur(head=FAST, extractor=FAST), private_plan()),
    "P-FedSAM (no noise)": lambda: FederatedStrategy(
        DP2FedSAM(head=FAST, extractor=FAST), nobody_private()
    ),
    "FedPer": lambda: FederatedStrategy(FedPer(local=FAST), private_plan()),
    "FedRep": lambda: FederatedStrategy(FedRep(head=FAST, extractor=FAST), private_plan()),
    "APFL": lambda: FederatedStrategy(APFL(weight_learning_rate=0.1, local=FAST), private_plan()),
    "DP-Ditto": lambda: FederatedStrategy(
        DPDitto(local=FAST, personal_training=FAST), record_plan()
    ),
    "Ditto (no noise)": lambda: FederatedStrategy(
        DPDitto(local=FAST, personal_training=FAST), nobody_private()
    ),
    "DP-FedAMP": lambda: FederatedStrategy(FedAMP(local=FAST), record_plan()),
    "DP-APPLE": lambda: FederatedStrategy(Apple(local=FAST), record_plan()),
    "DP-FedALA": lambda: FederatedStrategy(FedALA(adaptive=("head",), local=FAST), record_plan()),
    "pFedMe": lambda: FederatedStrategy(
        PFedMe(local=FAST, personal_training=LocalTraining(steps=2, epochs=1)), record_plan()
    ),
}
