"""A client whose training fails sends what a client without examples sends, noised."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from flower_ext.algorithms import DP2FedSAM, DPDitto, DPFedAvg, FedDyn
from flower_ext.algorithms.uldp import UldpAvg, UldpNaive
from flower_ext.federation import FederatedStrategy, LocalResult
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.federation.messages import records
from flower_ext.federation.storage.memory import ClientMemory
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    RecordLevelPlan,
    SecureScores,
    SecureSum,
)
from flower_ext.training import LocalTraining
from tests.support.failing import FAILING, KINDS, failing_task
from tests.support.grids import grid as grid_of
from tests.support.plans import release_plan
from tests.support.silos import USERS, silos
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import client_data, initial

CLIENTS, EXAMPLES = 8, 30
FAST = LocalTraining(epochs=1, batch_size=10, learning_rate=0.1)
FULL = LocalTraining(steps=1, batch_size=EXAMPLES, learning_rate=0.1)
OPTIONS = {"evaluate_every": 0, "seed": 1, "timeout": 5.0}
released = partial(release_plan, CLIENTS, noise_multiplier=1e-6, delta=1e-5)  # hardly any noise


def of_records(**changes):
    facts = {"sampling": FullParticipation(CLIENTS), "num_examples": EXAMPLES, "rounds": 3}
    return RecordLevelPlan(**facts, delta=1e-5, clipping_norm=100.0, noise_stddev=1e-6, **changes)


def fedavg(plan):
    return strategy_of(DPFedAvg, plan=plan, local=FAST, **OPTIONS)


def ditto(plan):
    return strategy_of(DPDitto, plan=plan, local=FAST, personal_training=FAST, **OPTIONS)


SUMS = SecureSum(colluding=0.0, dropouts=0.3)
SETUPS = {
    "discard": lambda: fedavg(released()),
    "server": lambda: fedavg(released(noise_placement="server")),
    "secure sum": lambda: fedavg(released(noise_multiplier=1.0, noise_placement=SUMS)),
    "head": lambda: strategy_of(DP2FedSAM, plan=released(), head=FAST, extractor=FAST, **OPTIONS),
    "ditto": lambda: ditto(released()),
    "feddyn": lambda: strategy_of(FedDyn, plan=released(), local=FAST, **OPTIONS),
    "records": lambda: ditto(of_records()),
}


def run(strategy, task, rounds=1, clients=CLIENTS, workers=1):
    app = strategy.method.client_app(task)
    run_grid = Recorder(app, num_clients=clients, workers=workers)
    run_grid.result = strategy.start(run_grid, initial(), num_rounds=rounds)
    return run_grid


def trained(grid):
    """Return the replies to trainings of the client that fails, and those of all others."""
    replies = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    mine = [m for m in replies if m.metadata.src_node_id - 1_000 == FAILING]
    return mine, [m for m in replies if m not in mine]


def moved(reply):
    update = records.to_arrays(reply.content.array_records[records.UPDATE])
    return math.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in update.values()))


CASES = [pytest.param(setup, kind, id=f"{setup}, {kind}") for setup in SETUPS for kind in KINDS]


@pytest.mark.parametrize(
    ("setup", "kind"),
    grid_of(CASES, lambda name: name.startswith("discard") or name.endswith("range")),
)
def test_no_failure_that_data_cause_shows_in_a_protected_run(setup, kind):
    strategy = SETUPS[setup]()
    grid = run(strategy, failing_task(kind), rounds=2)
    assert strategy.refusals == []
    mine, others = trained(grid)
    assert (len(mine), len(others)) == (2, 2 * (CLIENTS - 1))
    assert not any(reply.has_error() for reply in (*mine, *others))
    if setup != "secure sum":
        assert moved(mine[0]) < 1e-3
        assert min(moved(other) for other in others[: CLIENTS - 1]) > 1e-2
    contents = {tuple(sorted(reply.content.keys())) for reply in (*mine, *others)}
    assert len(contents) == 1
    sizes = {m.content.get(records.METRICS, {}).get("num-examples") for m in (*mine, *others)}
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", ["a NaN", "data that raise"])
def test_a_failing_client_has_the_noise_of_all_others(kind):
    plan = released(noise_multiplier=5.0)
    mine, others = trained(run(fedavg(plan), failing_task(kind), rounds=12))
    numbers = [
        np.concatenate([a.ravel() for a in records.to_arrays(m.content[records.UPDATE]).values()])
        for m in mine
    ]
    share = plan.mechanism().client_noise_stddev(CLIENTS)
    assert len(numbers) == 12
    assert np.std(numbers) == pytest.approx(share, rel=0.2)  # of 1,104 numbers
    assert len(others) == 12 * (CLIENTS - 1)


def test_a_failed_training_is_reported_in_the_log_of_its_client(logged):
    run(fedavg(released()), failing_task("data that raise"))
    (line,) = [r.getMessage() for r in logged.records if "could not be loaded" in r.getMessage()]
    assert "OSError" in line
    assert "cannot be read" not in line  # the message may hold a record


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("failing", [1, CLIENTS])
def test_a_simulation_says_once_that_no_client_trained(failing, workers, logged):
    def data(partition):
        sound = client_data(partition)
        return replace(sound, train=replace(sound.train, targets=sound.train.targets + 99))

    wrong = {client: data(client) for client in range(failing)}
    task = replace(failing_task(None), data=lambda client: wrong.get(client) or client_data(client))
    strategy = fedavg(released())
    run(strategy, task, rounds=3, workers=workers).workers.abandon()
    errors = [r.getMessage() for r in logged.records if r.levelname == "ERROR"]
    if failing < CLIENTS:
        assert errors == []
    else:
        assert len(errors) == 1
        assert f"{CLIENTS} clients hid {CLIENTS} errors in answers to train." in errors[0]
    assert strategy.refusals == []


@pytest.mark.parametrize("setup", ["head", "ditto", "feddyn"])
def test_a_client_whose_later_data_fail_keeps_the_rounds_memory(setup):
    strategy = SETUPS[setup]()
    kept = []

    class Looking(Recorder):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            memory = ClientMemory(self.contexts[1_000 + FAILING], strategy.method.client.name)
            kept.append((memory.newest(), memory.load()))
            return replies

    task = failing_task("data that raise", beginning=1)
    strategy.start(Looking(strategy.method.client_app(task), num_clients=CLIENTS), initial(), 2)
    versions = [version for version, _ in kept if version]
    assert versions == [1, 2]
    if setup != "ditto":  # whose personal model goes on towards the shared one
        first, second = (memory for version, memory in kept if version)
        assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)


class Overflowing(DPFedAvg):
    """Client `FAILING` trains a finite model whose difference to the received one is not."""

    @staticmethod
    def local_update(work):
        if bool((work.data.train.targets == 99).any()):
            return LocalResult(model={n: -p for n, p in work.received.items()})
        return LocalResult(model=work.received)

    client = replace(DPFedAvg.client, local_update=local_update)


def test_a_difference_that_overflows_is_no_error_either():
    strategy = strategy_of(Overflowing, plan=released(), local=FAST, **OPTIONS)
    task = failing_task("a label out of range")
    grid = Recorder(Overflowing.client_app(task), num_clients=CLIENTS)
    large = {n: np.full_like(a, 3e38) for n, a in records.to_arrays(initial()).items()}
    strategy.start(grid, records.to_record(large), num_rounds=1)
    assert strategy.refusals == []
    assert len(trained(grid)[0]) == 1


class Raising(DP2FedSAM):
    """A method that fails on its own beside any training, also without examples."""

    @staticmethod
    def local_update(work):
        if work.round == 2:
            raise ZeroDivisionError
        return (yield from DP2FedSAM.client.local_update(work))

    client = replace(DP2FedSAM.client, local_update=local_update)


def test_a_method_that_fails_without_examples_too_sends_the_received_model():
    strategy = strategy_of(Raising, plan=released(), head=FAST, extractor=FAST, **OPTIONS)
    mine, _ = trained(grid := run(strategy, failing_task(None), rounds=2))
    assert strategy.refusals == []
    assert moved(mine[0]) > 1e-2
    assert moved(mine[1]) < 1e-3
    assert ClientMemory(grid.contexts[1_000 + FAILING], strategy.method.client.name).newest() == 2


@pytest.mark.parametrize("kind", ["data that raise", "tensors of an unusual kind"])
def test_summed_scores_do_not_reveal_that_data_could_not_be_used(kind):
    scores = SecureScores(noise_multiplier=1.0, times=3, bounds=(("loss", 0.0, 3.0),))
    plan = released(noise_multiplier=1.0, noise_placement=SUMS, queries=(scores,))
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan, seed=1, evaluate_every=1, timeout=5.0)
    grid = run(strategy, failing_task(kind))
    assert strategy.refusals == []
    scored = [m for m in grid.received if m.metadata.message_type.startswith("evaluate")]
    assert sum(not m.has_error() for m in scored) == CLIENTS


def test_without_protection_a_client_says_what_is_wrong_with_its_data():
    strategy = fedavg(NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    run(strategy, failing_task("data of another type"))
    assert len(strategy.refusals) == 1
    strategy = fedavg(NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    run(strategy, failing_task("a label out of range"))
    assert len(strategy.refusals) == 1


@pytest.mark.parametrize(
    "kind", ["a label out of range", "an end of the process", "data that raise"]
)
def test_noise_in_steps_cannot_stand_in_for_data_that_are_missing(kind):
    steps = ClippedSteps(learning_rate=0.1, gradient_clipping_norm=1.0, num_examples=EXAMPLES)
    plan = of_records(steps=steps)
    strategy = strategy_of(DPDitto, plan=plan, local=FULL, personal_training=FAST, **OPTIONS)
    run(strategy, failing_task(kind))
    assert len(strategy.refusals) == (kind == "data that raise")
    texts = [text for one in strategy.guarantees() for text in one.assumptions]
    assert any("keeps a client from loading its data" in text for text in texts)


@pytest.mark.parametrize("method", [UldpAvg, UldpNaive])
def test_a_silo_that_cannot_load_its_data_counts_as_one_without_users(method):
    plan = released(sampling=FullParticipation(USERS))
    whole = silos(3)

    def data(partition):
        if partition == FAILING:
            raise OSError
        return whole[partition]

    strategy = strategy_of(method, plan=plan, num_silos=3, local=FAST, **OPTIONS)
    grid = run(strategy, replace(failing_task(None), data=data), clients=3)
    assert strategy.refusals == []
    assert moved(trained(grid)[0][0]) < 1e-3


def test_no_data_are_no_examples_of_no_users():
    assert len(NO_DATA.train) == len(NO_DATA.test) == 0
    assert NO_DATA.by_user() == {}
