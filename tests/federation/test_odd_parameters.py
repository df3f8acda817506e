"""Parameters of odd shapes, types and byte orders train, or are refused before any training."""

import logging
from itertools import product

import pytest
import torch
from flwr.app import Array
from torch import nn

from flower_ext.algorithms import (
    UldpNaive,
    UldpSgd,
)
from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    FullParticipation,
    SecureSum,
)
from flower_ext.training import DpSgdTraining, Task, UnshareableModel
from tests.faults.worlds import (
    CLASSES,
    CLIENTS,
    DATA,
    FAST,
    FEATURES,
    PRIVATE,
    SILOS,
    USERS,
    user_plan,
)
from tests.support.grids import grid
from tests.support.odd_parameters import METHODS, OPTIONS, PLANS, run
from tests.support.strategies import group_strategy, strategy_of

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
    "ULDP-AVG-w": PRIVATE.build,
}


def assert_trained(strategy, initial, final, caplog):
    """Assert that every parameter trained, and that no client failed."""
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
NEVER = {
    *product(
        ("FedAMP", "APPLE", "SCAFFOLD", "FedYogi"),
        ("clients noise", "server noises", "secure sums"),
    )
}
"""Methods and plans that are refused together, whatever the model."""
REFUSING = {"DP-FedAvg", "DP²-FedSAM", "FedPer", "DP-Ditto", "APPLE", "FedYogi", "Upcycled"}


@pytest.mark.parametrize(("method", "plan"), grid(product(METHODS, PLANS), DAILY.__contains__))
def test_scalar_and_empty_parameters_train_by_every_method_and_plan(method, plan, caplog):
    if (method, plan) in NEVER:
        with pytest.raises(InvalidValue):
            METHODS[method](PLANS[plan](), **OPTIONS)
        return
    strategy = METHODS[method](PLANS[plan](), **OPTIONS)
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
