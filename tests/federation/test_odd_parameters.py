"""Parameters of odd shapes, types and byte orders train, or are refused before any training."""

import logging
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedYogi
from torch import nn

from flower_ext.algorithms import (
    APFL,
    Apple,
    Centaur,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    DPFedSAM,
    FedALA,
    FedAMP,
    FedDyn,
    FedPer,
    FedRep,
    Hosted,
    PFedMe,
    Scaffold,
    UldpNaive,
    UldpSgd,
    Upcycled,
)
from flower_ext.algorithms.uldp import PrivateWeighting, UldpAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid, client_level_dp_mod
from flower_ext.privacy import (
    FullParticipation,
    OutputPerturbation,
    PerturbationPlan,
    SecureSum,
)
from flower_ext.training import DpSgdTraining, Task, UnshareableModel
from tests.faults.worlds import (
    CLASSES,
    CLIENTS,
    DATA,
    FAST,
    FEATURES,
    SILOS,
    USERS,
    nobody_private,
    record_plan,
    release_plan,
    user_plan,
)
from tests.support.grids import grid
from tests.support.strategies import group_strategy, private_strategy_of, strategy_of

EVERYONE = FullParticipation(CLIENTS)
DP_SGD = DpSgdTraining(
    steps=2,
    sampling_rate=0.5,
    batch_size=4,
    learning_rate=0.1,
    clipping_norm=0.5,
    noise_multiplier=1.0,
)


class Odd(nn.Module):
    """A network whose outputs are scaled by a scalar, and that has a parameter without numbers."""

    def __init__(self, counter: torch.dtype | None) -> None:
        super().__init__()
        self.extractor = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.ones(0, 5))
        if counter is not None:
            ones = torch.ones(2, dtype=counter)
            self.extractor.register_buffer("counter", ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.extractor(x)))
        return logits * (self.scale + self.none.sum())


def task(counter=None) -> Task:
    return Task(model=lambda: Odd(counter), data=lambda client: DATA[client], device="cpu")


PLANS = {
    "no privacy": nobody_private,
    "clients noise": lambda: release_plan(sampling=EVERYONE),
    "server noises": lambda: release_plan(sampling=EVERYONE, noise_placement="server"),
    "secure sums": lambda: release_plan(
        sampling=EVERYONE, noise_placement=SecureSum(colluding=0.0, dropouts=0.3)
    ),
    "noised models": record_plan,
    "output perturbation": lambda: PerturbationPlan(
        sampling=EVERYONE,
        perturbation=OutputPerturbation(clipping_norm=2.0, noise_stddev=0.1),
        delta=1e-3,
    ),
}
METHODS = {
    "DP-FedAvg": lambda plan, **o: strategy_of(DPFedAvg, plan=plan, local=FAST, **o),
    "DP-FedAvg-FT": lambda plan, **o: strategy_of(
        DPFedAvg, plan=plan, local=FAST, fine_tuning=FAST, **o
    ),
    "DP-FedSAM": lambda plan, **o: strategy_of(DPFedSAM, plan=plan, **o),
    "DP-FedSAM-FT": lambda plan, **o: strategy_of(DPFedSAM, plan=plan, fine_tuning=FAST, **o),
    "DP²-FedSAM": lambda plan, **o: strategy_of(
        DP2FedSAM, plan=plan, head=FAST, extractor=FAST, **o
    ),
    "Centaur": lambda plan, **o: strategy_of(Centaur, plan=plan, head=FAST, extractor=FAST, **o),
    "FedPer": lambda plan, **o: strategy_of(FedPer, plan=plan, local=FAST, **o),
    "FedRep": lambda plan, **o: strategy_of(FedRep, plan=plan, head=FAST, extractor=FAST, **o),
    "APFL": lambda plan, **o: strategy_of(APFL, plan=plan, local=FAST, **o),
    "DP-Ditto": lambda plan, **o: strategy_of(
        DPDitto, plan=plan, local=FAST, personal_training=FAST, **o
    ),
    "FedALA": lambda plan, **o: strategy_of(FedALA, plan=plan, local=FAST, **o),
    "FedAMP": lambda plan, **o: strategy_of(FedAMP, plan=plan, local=FAST, **o),
    "APPLE": lambda plan, **o: strategy_of(Apple, plan=plan, local=FAST, **o),
    "FedDyn": lambda plan, **o: strategy_of(FedDyn, plan=plan, local=FAST, **o),
    "pFedMe": lambda plan, **o: strategy_of(PFedMe, plan=plan, local=FAST, **o),
    "SCAFFOLD": lambda plan, **o: strategy_of(Scaffold, plan=plan, local=FAST, **o),
    "FedYogi": lambda plan, **o: strategy_of(Hosted, FedYogi(), plan=plan, local=FAST, **o),
    "Upcycled": lambda plan, **o: Upcycled(strategy_of(DPFedAvg, plan=plan, local=FAST, **o)),
}
OVER_SILOS = {
    "ULDP-AVG": lambda **o: strategy_of(
        UldpAvg, plan=user_plan(), num_silos=SILOS, local=FAST, **o
    ),
    "ULDP-AVG, secure sums": lambda **o: strategy_of(
        UldpAvg,
        plan=user_plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.0)),
        num_silos=SILOS,
        local=FAST,
        **o,
    ),
    "ULDP-SGD": lambda **o: strategy_of(UldpSgd, plan=user_plan(), num_silos=SILOS, **o),
    "ULDP-NAIVE": lambda **o: strategy_of(
        UldpNaive,
        plan=user_plan(sampling=FullParticipation(USERS)),
        num_silos=SILOS,
        local=FAST,
        **o,
    ),
    "ULDP-GROUP": lambda **o: group_strategy(
        num_silos=SILOS, num_users=USERS, group_size=4, delta=1e-3, local=DP_SGD, **o
    ),
    "ULDP-AVG-w": lambda **o: private_strategy_of(
        UldpAvg,
        plan=user_plan(),
        num_silos=SILOS,
        local=FAST,
        protocol=PrivateWeighting(
            key_bits=512, allow_insecure_key_size=True, max_records_per_user=60, precision=1e-4
        ),
        **o,
    ),
}
OPTIONS = {"seed": 1, "evaluate_every": 0}


class Counting(InProcessGrid):
    """A grid that counts messages of training."""

    trainings = 0

    def _answer_here(self, messages):
        self.trainings += sum(
            message.metadata.message_type.startswith("train") and "arrays" in message.content
            for message in messages
        )
        return super()._answer_here(messages)


def run(strategy, problem, nodes, arrays=None):
    """Run two rounds; return the initial and the final model, and the grid."""
    method = getattr(strategy, "base", strategy).method
    grid = Counting(method.client_app(problem, allow_seeded_noise=True), nodes)
    initial = problem.initial_params(0)
    result = strategy.start(grid, ArrayRecord(arrays or initial), num_rounds=2)
    return initial, result.arrays.to_torch_state_dict(), grid


def assert_trained(strategy, initial, final, caplog):
    assert getattr(strategy, "base", strategy).refusals == []
    assert "failed" not in caplog.text
    for name, value in final.items():
        assert value.shape == initial[name].shape
        assert torch.isfinite(value).all()
        assert value.numel() == 0 or not torch.equal(value, initial[name]), name


DAILY = {
    *(("DP-FedAvg", plan) for plan in PLANS),
    *((method, "no privacy") for method in METHODS),
    ("SCAFFOLD", "secure sums"),
    ("DP-Ditto", "noised models"),
    ("FedYogi", "output perturbation"),
    ("pFedMe", "clients noise"),
}
REFUSING = {"DP-FedAvg", "DP²-FedSAM", "FedPer", "DP-Ditto", "APPLE", "FedYogi", "Upcycled"}


@pytest.mark.parametrize(("method", "plan"), grid(product(METHODS, PLANS), DAILY.__contains__))
def test_scalar_and_empty_parameters_train_by_every_method_and_plan(method, plan, caplog):
    try:
        strategy = METHODS[method](PLANS[plan](), **OPTIONS)
    except InvalidValue:  # this method has no such plan, whatever the model
        return
    with caplog.at_level(logging.WARNING, "flwr"):
        initial, final, _ = run(strategy, task(), CLIENTS)
    assert_trained(strategy, initial, final, caplog)


@pytest.mark.parametrize(
    "method", grid(OVER_SILOS, lambda method: method not in ("ULDP-AVG", "ULDP-AVG-w"))
)
def test_a_scalar_and_an_empty_parameter_train_over_silos(method, caplog):
    strategy = OVER_SILOS[method](**OPTIONS)
    with caplog.at_level(logging.WARNING, "flwr"):
        initial, final, _ = run(strategy, task(), SILOS)
    assert_trained(strategy, initial, final, caplog)


@pytest.mark.parametrize("method", grid(METHODS, REFUSING.__contains__))
def test_whole_numbers_are_refused_before_any_training_and_the_remedies_work(method, caplog):
    plan = PLANS["no privacy"]
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(UnshareableModel, match=r"'extractor.counter' has dtype.*forward pass"):
            run(METHODS[method](plan(), **OPTIONS), task(dtype), CLIENTS)
    remedies = [({}, task())]
    if method in ("DP²-FedSAM", "Centaur", "FedPer", "FedRep"):
        remedies += [({"personal": ("head", "extractor.counter")}, task(torch.int64))]
    for options, problem in remedies:
        strategy = METHODS[method](plan(), **OPTIONS, **options)
        with caplog.at_level(logging.WARNING, "flwr"):
            initial, final, _ = run(strategy, problem, CLIENTS)
        assert "extractor.counter" not in final
        assert_trained(strategy, initial, final, caplog)


@pytest.mark.parametrize("plan", PLANS)
def test_arrays_of_another_byte_order_train(plan, caplog):
    initial = task().initial_params(0)
    arrays = {name: Array(value.numpy().astype(">f4")) for name, value in initial.items()}
    strategy = METHODS["DP-FedAvg"](PLANS[plan](), **OPTIONS)
    with caplog.at_level(logging.WARNING, "flwr"):
        initial, final, _ = run(strategy, task(), CLIENTS, arrays)
    assert_trained(strategy, initial, final, caplog)


# ClientApps that do not use this package ----------------------------------------------------------

START = {
    "w": np.array([0.5, 0.25], np.float32),
    "scalar": np.array(-1.0, np.float32),
    "none": np.ones((0, 5), np.float32),
}
STEP = 0.125


def foreign(placement: str, reply_order: str = "=", **unsent: np.ndarray) -> ClientApp:
    """Return an app that moves every number by `STEP`, and returns ``unsent`` arrays as well."""
    app = ClientApp(mods=[client_level_dp_mod()] if placement == "client" else [])

    @app.train()
    def _(message: Message, context: object) -> Message:
        received = message.content["arrays"]
        moved = {name: array.numpy() + np.float32(STEP) for name, array in received.items()}
        sent = {
            n: np.asarray(a, np.dtype("f4").newbyteorder(reply_order)) for n, a in moved.items()
        }
        arrays = ArrayRecord({name: Array(array) for name, array in {**sent, **unsent}.items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def run_foreign(app, placement, arrays=START, **options):
    plan = release_plan(
        sampling=EVERYONE, clipping_norm=1.0, noise_multiplier=1e-6, noise_placement=placement
    )
    strategy = strategy_of(DPFedAvg, plan=plan, evaluate_every=0, **options)
    grid = Counting(app, CLIENTS)
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return strategy, grid, lambda: strategy.start(grid, initial, num_rounds=1)


def assert_moved_by_a_step(strategy, result):
    assert strategy.refusals == []
    for name, array in START.items():
        np.testing.assert_allclose(result.arrays[name].numpy(), array + STEP, atol=1e-4)


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize(("sent", "returned"), [*product("<>", repeat=2)])
def test_odd_shapes_and_byte_orders_train_in_a_custom_app(sent, returned, placement):
    arrays = {n: a.astype(a.dtype.newbyteorder(sent)) for n, a in START.items()}
    strategy, _, start = run_foreign(foreign(placement, returned), placement, arrays)
    assert_moved_by_a_step(strategy, start())


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_a_custom_app_with_whole_numbers_is_refused_and_remedies_work(dtype, placement):
    counter = {"counter": np.ones(2, dtype)}
    app = foreign(placement, **counter)
    _, grid, start = run_foreign(app, placement, {**START, **counter})
    with pytest.raises(UnshareableModel, match="leave it out of the initial arrays"):
        start()
    assert grid.trainings == 0
    for arrays, options in ((START, {}), ({**START, **counter}, {"personal": ("counter",)})):
        strategy, _, start = run_foreign(app, placement, arrays, **options)
        assert_moved_by_a_step(strategy, start())


@pytest.mark.parametrize("placement", ["client", "server"])
def test_a_custom_app_with_tied_names_is_refused_unless_one_is_sent(placement):
    rng = np.random.default_rng(0)
    tied = {"embedding.weight": rng.normal(size=(4, 3)).astype(np.float32)}
    both = {**START, **tied, "head.weight": tied["embedding.weight"]}
    app = foreign(placement, **{"head.weight": both["head.weight"] + np.float32(STEP)})
    _, grid, start = run_foreign(app, placement, both)
    said = r"'head.weight' has the same initial numbers as 'embedding.weight', as if tied to it"
    with pytest.raises(UnshareableModel, match=said):
        start()
    assert grid.trainings == 0
    strategy, _, start = run_foreign(app, placement, {**START, **tied})
    assert_moved_by_a_step(strategy, start())


EQUAL = np.random.default_rng(1).normal(size=9).astype(np.float32)


@pytest.mark.parametrize(
    ("names", "values", "warned"),
    [
        (("norm.weight", "other.weight"), np.ones(64, np.float32), False),
        (("a.bias", "b.bias"), np.zeros(64, np.float32), False),
        (("a.eye", "b.eye"), np.eye(5, dtype=np.float32), False),
        (("a.scale", "b.scale"), np.array(2.5, np.float32), False),
        (("layers.0.weight", "layers.1.weight"), EQUAL, True),  # copies, as in TransformerEncoder
    ],
)
def test_parameters_that_begin_equal_but_are_no_proof_of_a_tie_train(names, values, warned, caplog):
    app, arrays = foreign("server"), dict.fromkeys(names, values)
    strategy, _, start = run_foreign(app, "server", arrays)
    with caplog.at_level(logging.WARNING, "flwr"):
        start()
    assert strategy.refusals == []
    assert ("If they are tied" in caplog.text) == warned


def test_without_noise_tied_names_stay_equal_and_are_not_refused():
    arrays = {"a": EQUAL, "b": EQUAL}
    strategy = FederatedStrategy(DPFedAvg(), nobody_private(), evaluate_every=0)
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    result = strategy.start(Counting(foreign("server"), CLIENTS), initial, num_rounds=1)
    np.testing.assert_array_equal(result.arrays["a"].numpy(), result.arrays["b"].numpy())


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return logits


def test_a_run_from_a_state_dict_says_which_names_are_tied():
    problem = Task(model=Tied, data=lambda client: DATA[client], device="cpu")
    strategy = METHODS["DP-FedAvg"](PLANS["no privacy"](), **OPTIONS)
    with pytest.raises(Exception, match="'second.weight' is tied to 'first.weight'"):
        run(strategy, problem, CLIENTS, Tied().state_dict())
