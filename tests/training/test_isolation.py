"""One client's code changes nothing in the process that another client's training sees."""

import gc
import random
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.federation.client import assignment, upload
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.training import LocalTraining, Task
from flower_ext.training.isolation import (
    ClientCrashed,
    deterministic_kernels,
    isolated,
    seeded,
)

CLIENTS, NORM = 8, 0.05


CHANGES = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "type": lambda: torch.set_default_dtype(torch.float64),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


def torch_settings():
    """Return the settings of PyTorch that `CHANGES` changes."""
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()


class Layers(torch.nn.Module):
    """A model that takes one of two layers, by a draw."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x) if self.training and self.draw() < 0.5 else self.other(x)

    def draw(self):
        return float(torch.rand(()))


class OfNumpy(Layers):
    """A model that draws from NumPy's global generator."""

    def draw(self):
        return np.random.uniform()  # noqa: NPY002


class OfPython(Layers):
    """A model that draws from Python's global generator."""

    def draw(self):
        return random.random()


def released_sum(before_data, model=Layers, *, count=16):
    """Return the sum that a round releases.

    Client 0 has ``count`` examples, and calls ``before_data`` first unless it is None.
    """

    def data(client):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(client))
        if client == 0 and before_data is not None:
            before_data()
        number = count if client == 0 else 16
        examples = Examples(x[:number], (x[:number, 0] > 0).long())
        return ClientData(train=examples, test=examples)

    plan = ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=NORM,
        noise_multiplier=1.0,
        rounds=1,
        delta=1e-5,
    )
    task = Task(model=model, data=data)
    local = LocalTraining(epochs=1, batch_size=4, learning_rate=1.0)
    strategy = FederatedStrategy(
        DPFedAvg(local=local), plan, seed=1, seeded_noise=True, evaluate_every=0
    )
    grid = InProcessGrid(DPFedAvg.client_app(task, allow_seeded_noise=True), CLIENTS)
    result = strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=1)
    return CLIENTS * np.concatenate([a.numpy().ravel() for a in result.arrays.values()])


def distance_in_norms(before_data, model=Layers):
    """Return how far client 0's call of ``before_data`` moves the released sum, in norms."""
    usual, changed = released_sum(None, model), released_sum(before_data, model)
    return np.linalg.norm(usual.astype(float) - changed) / NORM


class Noisy(torch.nn.Linear):
    """A model that only trains alone, so that each client's settings matter."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn_like(x))


def failing_after(change):
    """Return a function that calls ``change`` and then fails, as an odd record makes it."""

    def change_and_fail():
        change()
        raise ValueError("odd record")

    return change_and_fail


def test_an_interrupt_that_skips_the_end_of_isolation_prints_no_error(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    interrupted = isolated()
    interrupted.__enter__()
    del interrupted
    gc.collect()
    assert printed == []


@pytest.mark.parametrize("name", CHANGES)
def test_settings_a_client_leaves_move_the_sum_by_at_most_one_norm(name):
    assert distance_in_norms(failing_after(CHANGES[name]), Noisy) <= 1 + 1e-5


def test_the_sum_shows_a_client_that_is_not_isolated(monkeypatch):
    monkeypatch.setattr(upload, "isolated", nullcontext)
    monkeypatch.setattr(assignment, "isolated", nullcontext)
    monkeypatch.setattr("flower_ext.training.side_by_side.isolated", nullcontext)
    monkeypatch.setattr("flower_ext.training.isolation.isolated", nullcontext)
    try:
        assert distance_in_norms(failing_after(CHANGES["gradients"]), Noisy) > 2
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("model", [OfNumpy, OfPython])
def test_models_that_draw_from_shared_generators_are_refused(model):
    """Their draws would depend on the numbers of other clients' records."""
    with pytest.raises(FederationNotReady, match="changes while a model trains"):
        released_sum(None, model)


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_restores_settings(name):
    before = torch_settings()
    with isolated():
        CHANGES[name]()
        assert torch_settings() != before
    assert torch_settings() == before
    x = torch.ones(2, requires_grad=True)
    (3 * x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_one_clients_code_leaves_change_no_bit_of_the_others(name):
    changed = released_sum(failing_after(CHANGES[name]), Noisy)
    unchanged = released_sum(failing_after(lambda: None), Noisy)
    assert np.array_equal(changed, unchanged)


@pytest.mark.parametrize("name", CHANGES)
def test_settings_a_model_leaves_in_training_change_no_other_bit(name):
    def do_nothing():
        return None

    def failing_model(change):
        class Failing(Noisy):
            def forward(self, x):
                if x.shape[0] == 1:  # only the first client has a batch of one example
                    failing_after(change)()
                return super().forward(x)

        return Failing

    usual = released_sum(do_nothing, failing_model(do_nothing), count=1)
    changed = released_sum(do_nothing, failing_model(CHANGES[name]), count=1)
    assert np.array_equal(changed, usual)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, BaseException])
def test_a_crash_becomes_an_error_of_its_client(kind):
    def crash():
        raise kind("odd record")

    with pytest.raises(ClientCrashed, match=kind.__name__), isolated():
        crash()
    assert distance_in_norms(crash) <= 1 + 1e-5


def test_the_user_can_interrupt():
    with pytest.raises(KeyboardInterrupt), isolated():
        raise KeyboardInterrupt


@pytest.mark.parametrize("warns_only", [False, True])
def test_deterministic_kernels_leave_the_users_choice_as_it_was(warns_only):
    torch.use_deterministic_algorithms(True, warn_only=warns_only)
    try:
        with deterministic_kernels(torch.device("meta"), strict=not warns_only):
            pass
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns_only
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_seeded_block_changes_no_later_draw():
    expected = torch.manual_seed(1) and torch.rand(3)
    torch.manual_seed(1)
    with seeded(7, torch.device("cpu")):
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)
