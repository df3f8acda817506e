"""Every way in which an update becomes part of a sum, by name: its bound and its scale.

Each path of `PATHS` carries an update of ten clipping norms, and one of half a norm. The first must
count as one norm, the second as it is, in every number and up to noise of a thousandth of a norm. A
path names the functions that it must call, so that no path quietly becomes another one. Functions
that bound or add, and classes of protections, plans, sums, rows and grids, must each be on a path.
"""

import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn

import flower_ext
from flower_ext.algorithms import DPDitto, DPFedAvg
from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
    UldpNaive,
    UldpSgd,
)
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import (
    ClientMethod,
    FederatedStrategy,
    InProcessGrid,
    LocalResult,
    Memory,
    Method,
    VirtualGrid,
    client_level_dp_mod,
)
from flower_ext.federation.client import client_level_mod
from flower_ext.federation.engines import workers
from flower_ext.federation.messages import packing, records
from flower_ext.federation.messages.upload_reply import Update, UploadReply
from flower_ext.federation.sums import masked, plain, weighted_silo
from flower_ext.federation.sums.summation import Summation
from flower_ext.federation.sums.weighted import WeightedSum
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.mechanisms import bounds, protections, quantization
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    Protection,
)
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.mechanisms.updates import RunningSum
from flower_ext.privacy.plans.group_plan import GroupPlan
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.training import DpSgdTraining, LocalTraining, Task
from tests.support import planted_faults as faults
from tests.support.plans import release_plan
from tests.support.strategies import group_strategy, private_strategy_of, strategy_of
from tests.support.travelling import Tampering

CLIENTS, USERS, SILOS = 4, 2, 3
LAST = CLIENTS - 1
"""The client with an update; of two processes, the second one has it."""
NORM, NOISE, DELTA = 0.5, 2.0**-10, 1e-5
"""Clipping norm C, and standard deviation of a sum's noise in clipping norms."""
SIZES = (10.0, 0.5)
EVERYONE = FullParticipation(CLIENTS)
SHAPES = {"weight": (4, 9), "bias": (4,), "scale": ()}
_DRAWN = {n: np.random.default_rng(3).standard_normal(shape) for n, shape in SHAPES.items()}
_LENGTH = math.sqrt(sum(float(np.sum(array**2)) for array in _DRAWN.values()))
DIRECTION = {name: array / _LENGTH for name, array in _DRAWN.items()}
"""Direction of the update, of norm 1."""
AXIS = {"weight": np.full((1, 16), 0.25)}
"""The same for methods that train a linear model."""
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)
SECURE = {"noise_placement": SecureSum(colluding=0.0, dropouts=0.0)}

Sum = Mapping[str, np.ndarray]
"""The sum that a run has released, in clipping norms."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way into a sum.

    Attributes
    ----------
    run : Callable[[float], Sum]
        Returns the sum with an update of so many clipping norms.
    through, around : tuple of (owner, name)
        Functions and properties that a run must call, and others that it must not call.
    bound : float
        Largest part of an update in the sum, in clipping norms.
    """

    run: Callable[[float], Sum]
    through: tuple[tuple[object, str], ...]
    around: tuple[tuple[object, str], ...] = ()
    bound: float = 1.0
    direction: Sum | None = None


class Parts(nn.Module):
    """A model with the arrays of `SHAPES`."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x):
        return x @ self.weight.T + self.bias * self.scale


def update_of(work):
    """The client's update, whose length its data name, like the received model."""
    length = float(work.data.train.features[0, 0])
    return {
        name: (length * torch.from_numpy(np.asarray(DIRECTION[name]))).to(value.dtype)
        for name, value in work.received.items()
    }


@dataclass(frozen=True, kw_only=True)
class Sent(Method):
    """A method whose clients send the update that their data name."""

    client = ClientMethod(
        name="sent",
        local_update=lambda work: LocalResult(update=update_of(work)),
        local_model=lambda work: work.received,
        memory=Memory.NONE,
    )
    any_client_app = True

    @property
    def training(self):
        return {"local": ONE_STEP}


@dataclass(frozen=True, kw_only=True)
class SentModels(Sent):
    """The same with whole models."""

    client = replace(
        Sent.client,
        local_update=lambda work: LocalResult(
            model={n: work.received[n] + part for n, part in update_of(work).items()}
        ),
    )


private_plan = partial(
    release_plan, CLIENTS, clipping_norm=NORM, noise_multiplier=NOISE, rounds=1, delta=DELTA
)
BY_SERVER, BY_CLIENTS = private_plan(noise_placement="server"), private_plan()
BY_MODELS = PerturbationPlan(
    sampling=EVERYONE,
    perturbation=OutputPerturbation(clipping_norm=NORM, noise_stddev=NOISE * NORM / CLIENTS),
    delta=DELTA,
)


def lengths(size):
    return {client: size * NORM if client == LAST else 0.0 for client in range(CLIENTS)}


def sent_task(size, dtype=torch.float32, records_of=lambda client: 1):
    """Return a task whose clients' data determine the update that they send."""

    def data(client):
        features = torch.full((records_of(client), 9), lengths(size)[client], dtype=dtype)
        examples = Examples(features, torch.zeros(len(features), dtype=torch.int64))
        return ClientData(train=examples, test=examples)

    return Task(model=lambda: Parts().to(dtype), data=data, device="cpu")


def start(strategy, grid, initial):
    """Return by how much one round moves the model."""
    before = {name: np.asarray(array) for name, array in initial.items()}
    first = records.to_record(before)
    result = strategy.start(grid, first, num_rounds=1)
    after = records.to_arrays(result.arrays)
    return {name: after[name].astype(np.float64) - array for name, array in before.items()}


def sent(
    size,
    plan=BY_SERVER,
    *,
    method=Sent,
    grid=InProcessGrid,
    dtype=np.float32,
    app=None,
    records_of=lambda client: 1,
    factor=CLIENTS,
    **options,
):
    """Run one round of `Sent`, or of a ClientApp from elsewhere."""
    kind = torch.float64 if dtype == np.float64 else torch.float32
    loop_task = app(size) if app else method.client_app(sent_task(size, kind, records_of))
    clients = grid(loop_task, CLIENTS, **options)
    initial = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    strategy = strategy_of(method, plan=plan, evaluate_every=0, timeout=5.0)
    try:
        moved = start(strategy, clients, initial)
    finally:
        if isinstance(clients, InProcessGrid):
            clients.workers.abandon()
    return {name: array * factor / NORM for name, array in moved.items()}


class Messages(InProcessGrid):
    """A grid that delivers Flower's records."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(list(messages), timeout=timeout))
        for reply in replies:
            _ = reply.content if reply.has_content() else None
        return replies


class Lossy(Tampering):
    """A grid that loses the replies of a client without an update."""

    tamper = {LAST - 1: lambda reply: []}


def packed(app, clients, per_node=2):
    return VirtualGrid(InProcessGrid(app, clients // per_node), per_node)


def foreign(mod, size):
    """A ClientApp from elsewhere, with a mod of this package."""
    app = ClientApp(mods=[mod])

    @app.train()
    def _(message, context):
        length = lengths(size)[context.node_config["partition-id"]]
        received = records.to_arrays(message.content.array_records["arrays"])
        model = {
            n: (base + length * DIRECTION[n]).astype(base.dtype) for n, base in received.items()
        }
        content = RecordDict({"arrays": records.to_record(model)})
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=message)

    return app


def linear(size, strategy, factor, *, silos=0, norm=NORM):
    """Run one round of a method that trains a linear model, with one record of ``size``."""
    x = torch.from_numpy(size * norm * AXIS["weight"]).float()

    def silo(number):
        return SiloData(
            train=Examples(torch.cat([x, 0 * x]), torch.ones(2)),
            test=Examples(x, torch.ones(1)),
            owners=torch.tensor([0, 1]),
        )

    def client(number):
        examples = Examples(x if number == 0 else 0 * x, torch.ones(1))
        return ClientData(train=examples, test=examples)

    task = Task(
        model=lambda: nn.Linear(16, 1, bias=False),
        data=silo if silos else client,
        loss=lambda outputs, targets: -(outputs.squeeze(-1) * targets).mean(),
        metrics={},
        device="cpu",
    )
    app = strategy.method.client_app(task, allow_seeded_noise=True)
    population = silos or strategy.run.plan.sampling.population
    moved = start(strategy, InProcessGrid(app, population), {"weight": np.zeros((1, 16), "f4")})
    return {name: array * factor / norm for name, array in moved.items()}


def users(size, method=UldpAvg, *, silos=2, factor=USERS, plan=None, **options):
    """Run one round of Uldp-FL; the user's records lie in every silo, with the same update."""
    local = {} if method is UldpSgd else {"local": ONE_STEP}
    facts = {"sampling": FullParticipation(USERS), **(plan or {})}
    make = private_strategy_of if "protocol" in options else strategy_of
    strategy = make(
        method, plan=private_plan(**facts), num_silos=silos, evaluate_every=0, **local, **options
    )
    return linear(size, strategy, factor * silos, silos=silos)


def group(size):
    """Run one round of ULDP-GROUP: in each of two silos, DP-SGD takes one step on a record."""
    local = DpSgdTraining(
        steps=1,
        sampling_rate=1.0,
        batch_size=1.0,
        learning_rate=1.0,
        clipping_norm=NORM,
        noise_multiplier=NOISE,
    )
    strategy = group_strategy(
        num_silos=2, num_users=2, group_size=2, local=local, delta=DELTA, evaluate_every=0
    )
    return linear(size, strategy, 1, silos=2)


def ditto(size, *, steps):
    """Run one round of DP-Ditto with a bound on the model, or on each record's gradient."""
    local = LocalTraining(steps=1, batch_size=1, learning_rate=1.0)
    clipped = ClippedSteps(
        learning_rate=1.0,
        gradient_clipping_norm=NORM if steps else 100 * NORM,
        num_examples=1,
        local_steps=1,
    )
    plan = RecordLevelPlan(
        sampling=FullParticipation(1),
        num_examples=1,
        rounds=1,
        delta=DELTA,
        clipping_norm=100 * NORM if steps else NORM,
        noise_stddev=NOISE * NORM,
        steps=clipped,
    )
    strategy = FederatedStrategy(
        DPDitto(local=local, personal_training=ONE_STEP), plan, evaluate_every=0
    )
    return linear(size, strategy, 1)


def scores(size):
    """Return the centred score that one client adds to the noised sum, in units of its bound."""
    shown = SecureScores(noise_multiplier=NOISE / 4, times=1)
    plan = private_plan(noise_multiplier=1.0, queries=(shown,), **SECURE)

    def data(client):
        score = 0.5 + 0.5 * size * (client == LAST)
        examples = Examples(torch.zeros(1, 16), torch.tensor([score]))
        return ClientData(train=examples, test=examples)

    task = Task(
        model=lambda: nn.Linear(16, 1, bias=False),
        data=data,
        loss=lambda outputs, targets: 0 * outputs.sum(),
        metrics={"accuracy": lambda outputs, targets: float(targets.mean())},
        device="cpu",
    )
    strategy = FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=1)
    grid = InProcessGrid(DPFedAvg.client_app(task), CLIENTS)
    initial = ArrayRecord({"weight": torch.zeros(1, 16)})
    score = strategy.start(grid, initial, num_rounds=1).evaluate_metrics_clientapp[1]
    assert score["scored_clients"] == pytest.approx(CLIENTS, abs=8 * NOISE * shown.norm)
    return {"score": 2 * score["scored_clients"] * (score["accuracy_mean"] - 0.5)}


ADDED, CLIPPED = (RunningSum, "add"), (bounds.ClippedSum, "add")
LOST = {"noise_placement": SecureSum(colluding=0.0, dropouts=0.25)}
PAILLIER = PrivateWeighting(
    key_bits=512, allow_insecure_key_size=True, max_records_per_user=SILOS, precision=1e-6
)
PATHS = {
    # One process, where an update stays plain arrays.
    "arrays, the server clips": Path(run=sent, through=(CLIPPED, (UploadReply, "update"))),
    "arrays, the clients clip": Path(
        run=partial(sent, plan=BY_CLIENTS),
        through=(ADDED, (ClipAndNoise, "released"), (protections, "clip")),
    ),
    "arrays of float64, the server clips": Path(
        run=partial(sent, dtype=np.float64), through=(CLIPPED, (UploadReply, "update"))
    ),
    "arrays, a few at a time": Path(
        run=partial(sent, memory_limit=1),
        through=(CLIPPED, (InProcessGrid, "_replies_to")),
    ),
    "arrays, as they are": Path(
        run=partial(sent, plan=NonPrivatePlan(sampling=EVERYONE)),
        through=(ADDED, (NonPrivatePlan, "aggregate")),
        bound=math.inf,
    ),
    "arrays, weighted by examples": Path(
        run=partial(
            sent,
            plan=NonPrivatePlan(sampling=EVERYONE, weighting="examples"),
            records_of=lambda client: 5 if client == LAST else 1,
            factor=(CLIENTS + 4) / 5,
        ),
        through=(ADDED, (plain, "as_float64"), (plain, "divided")),
        bound=math.inf,
    ),
    "arrays, whole models": Path(
        run=partial(sent, plan=BY_MODELS, method=SentModels),
        through=(ADDED, (OutputPerturbation, "released"), (PerturbationPlan, "protection")),
    ),
    # Several processes, which share the clients.
    "workers, the server clips": Path(
        run=partial(sent, grid=Lossy, workers=2),
        through=(CLIPPED, (workers.Workers, "_replies_of")),
    ),
    "workers, the clients clip": Path(
        run=partial(sent, plan=BY_CLIENTS, workers=2),
        through=(ADDED, (workers.Workers, "_replies_of")),
    ),
    # Messages, as Ray and SuperNodes send them.
    "messages, the server clips": Path(
        run=partial(sent, grid=Messages),
        through=(CLIPPED, (plain.PlainSum, "open"), (Update, "content")),
    ),
    "messages, the clients clip": Path(
        run=partial(sent, plan=BY_CLIENTS, grid=Messages),
        through=(
            ADDED,
            (Update, "content"),
            (ReleaseMechanism, "protection"),
            (ClipAndNoise, "released"),
            (NoisedSum, "aggregate"),
        ),
    ),
    "messages of several clients, the server clips": Path(
        run=partial(sent, grid=packed), through=(CLIPPED, (VirtualGrid, "send_and_receive"))
    ),
    "messages of several clients, the clients clip": Path(
        run=partial(sent, plan=BY_CLIENTS, grid=packed), through=(ADDED, (packing, "_joined"))
    ),
    "another ClientApp, the server clips": Path(
        run=partial(sent, app=partial(foreign, client_level_dp_mod())), through=(CLIPPED,)
    ),
    "another ClientApp, a mod clips": Path(
        run=partial(sent, plan=BY_CLIENTS, app=partial(foreign, client_level_dp_mod())),
        through=(ADDED, (client_level_mod, "_update"), (ClipAndNoise, "released")),
    ),
    # Sums that hide their parts from the server.
    "masked sum": Path(
        run=partial(sent, plan=private_plan(**SECURE)),
        through=(
            (protections, "in_cells"),
            (masked.MaskedMember, "seal"),
            (masked.MaskedSum, "open"),
            (masked.OpenMaskedSum, "read"),
        ),
    ),
    "masked sum without one member": Path(
        run=partial(sent, plan=private_plan(**LOST), grid=Lossy),
        through=(
            (protections, "in_cells"),
            (ReleaseMechanism, "protection"),
            (NoisedSum, "aggregate"),
            (quantization.CellSum, "add"),
        ),
    ),
    "masked scores": Path(
        run=scores,
        through=((SecureScores, "vector"), (protections, "in_cells")),
        direction={"score": np.asarray(1.0)},
    ),
    # Sums over users or records in a silo.
    "users' sum": Path(
        run=users,
        through=(ADDED, (protections, "sum_clipped_rows"), (bounds.BoundedSum, "noised")),
        direction=AXIS,
    ),
    "users' sum of gradients": Path(
        run=partial(users, method=UldpSgd),
        through=((protections, "sum_clipped_rows"), (ClipAndNoise, "released_sum")),
        direction=AXIS,
    ),
    "users' sum, weighted by records": Path(
        run=partial(users, weighting="by-records"),
        through=((protections, "sum_clipped_rows"), (bounds.BoundedSum, "noised")),
        direction=AXIS,
    ),
    "users' masked sum": Path(
        run=partial(users, silos=SILOS, plan=SECURE),
        through=((protections, "sum_rows_in_cells"), (bounds.BoundedSum, "noised")),
        direction=AXIS,
    ),
    "users' encrypted sum": Path(
        run=partial(
            users,
            method=UldpAvg,
            silos=SILOS,
            protocol=PAILLIER,
        ),
        through=(
            (weighted_silo, "clip_each_row"),
            (weighted_silo.HiddenSum, "__init__"),
            (WeightedSum, "open"),
        ),
        direction=AXIS,
    ),
    "silos' sum": Path(
        run=lambda size: users(2 * size, UldpNaive, factor=0.5),  # one of two records
        through=(ADDED, (ClipAndNoise, "released")),
        direction=AXIS,
    ),
    "records' gradients": Path(run=group, through=((GroupPlan, "protection"),), direction=AXIS),
    "records' gradients in local steps": Path(
        run=partial(ditto, steps=True), through=((ClipSteps, "released"),), direction=AXIS
    ),
    "models after local steps": Path(
        run=partial(ditto, steps=False),
        through=((ClipSteps, "released"), (RecordLevelPlan, "protection")),
        direction=AXIS,
    ),
}


def watched(patch, owner, name):
    """Return a list that grows with every call of a function, or reading of a property."""
    calls, real = [], inspect.getattr_static(owner, name)
    function = real.fget if isinstance(real, property) else real

    def noting(*arguments, **named):
        calls.append(name)
        return function(*arguments, **named)

    patch.setattr(owner, name, property(noting) if isinstance(real, property) else noting)
    return calls


def check(patch, path):
    """Send an update that is too long, and one that is not, on a path.

    Raises
    ------
    AssertionError
        A sum is wrong, or a run went another way.
    """
    through = [watched(patch, *place) for place in path.through]
    around = [watched(patch, *place) for place in path.around]
    direction = DIRECTION if path.direction is None else path.direction
    for size in SIZES:
        released = path.run(size)
        assert released.keys() == direction.keys()
        for name, array in released.items():
            expected = min(size, path.bound) * direction[name]
            np.testing.assert_allclose(array, expected, atol=8 * NOISE, err_msg=name)
    assert all(through), path.through
    assert not any(around), path.around


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_an_update_counts_as_at_most_one_norm_and_stays_if_short(path, monkeypatch):
    check(monkeypatch, path)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("arrays, the server clips", faults.updates_clipped_late),
        ("arrays, a few at a time", faults.updates_clipped_late),
        ("users' sum", faults.weights_of_two),
    ],
)
def test_a_planted_fault_shows_on_its_path(name, plant, monkeypatch):
    plant(monkeypatch, None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(monkeypatch, PATHS[name])


NOT_HERE = {
    "ObjectivePerturbation": "bounds nothing: its theorems assume bounded gradients",
    "ProtectedByServer": "leaves an upload as it is; the paths on which the server clips",
    "ProtectedByTraining": "leaves an upload as it is; the path of records' gradients",
    "Unprotected": "leaves an upload as it is; nothing is promised",
    "AdaptiveRelease": "the paths of ReleaseMechanism, with every noise placement",
    "QuerySum": "the path of masked scores",
    "SpacedRelease": "the path of ReleaseMechanism with noise by the server",
    "squared_norms_of_rows": "adds nothing",
    "SidedSum": "the path of ClippedSum, with one more number",
    "checked_weights": "adds nothing",
    "cell_of": "adds nothing",
    "check_cell": "adds nothing",
}
"""Names that need no path of their own."""


CARRIERS = ("privacy", "federation")


def classes():
    """Return the public classes of the package that hold, bound, carry or add parts of sums."""
    for module in pkgutil.walk_packages(flower_ext.__path__, f"{flower_ext.__name__}."):
        if module.name.split(".")[1] in CARRIERS:
            import_module(module.name)
    kinds_found = set()
    waiting = [Protection, RoundMechanism, bounds.BoundedSum, RunningSum, Grid, Summation]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        is_carrier = kind.__module__.startswith(
            tuple(f"{flower_ext.__name__}.{one}." for one in CARRIERS)
        )
        if is_carrier and kind.__name__[0] != "_" and not inspect.isabstract(kind):
            kinds_found.add(kind.__name__)
    return kinds_found - {Protection.__name__}


def functions(module):
    """Return the public functions of a module."""
    members = inspect.getmembers(module, inspect.isfunction)
    return {name for name, one in members if one.__module__ == module.__name__ and name[0] != "_"}


def test_whatever_bounds_adds_or_carries_an_update_is_on_a_path():
    places = [place for path in PATHS.values() for place in (*path.through, *path.around)]
    named = {name for _, name in places}
    named |= {owner.__name__ for owner, _ in places if inspect.isclass(owner)}
    members = classes() | functions(bounds) | functions(quantization)
    assert members - named - NOT_HERE.keys() == set()
    assert NOT_HERE.keys() - members == set()
