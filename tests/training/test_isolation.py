"""One client's code changes nothing in the process that another client's training sees."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.federation.client import preparing, upload
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.training import LocalTraining, Task
from flower_ext.training.isolation import (
    ClientCrashed,
    _settings,
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
    """Its draws come from NumPy's global generator."""

    def draw(self):
        return np.random.uniform()  # noqa: NPY002


class OfPython(Layers):
    """Its draws come from Python's global generator."""

    def draw(self):
        return random.random()


def released(odd, model=Layers, *, count=16):
    """Return the released sum; the first client, if ``odd``, does something before its data."""

    def data(client):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(client))
        if client == 0 and odd is not None:
            odd()
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


def moved(odd, model=Layers, **changes):
    usual, other = released(None, model), released(odd, model, **changes)
    return np.linalg.norm(usual.astype(float) - other) / NORM


class Noisy(torch.nn.Linear):
    """A model that only trains alone, so that each client's settings matter."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn_like(x))


def raising(change):
    def odd():
        change()
        raise ValueError("odd record")

    return odd


@pytest.mark.parametrize("name", CHANGES)
def test_settings_a_client_leaves_move_the_sum_by_at_most_one_norm(name):
    assert moved(raising(CHANGES[name]), Noisy) <= 1 + 1e-5


def test_the_sum_shows_a_client_that_is_not_isolated(monkeypatch):
    monkeypatch.setattr(upload, "isolated", nullcontext)
    monkeypatch.setattr(preparing, "isolated", nullcontext)
    monkeypatch.setattr("flower_ext.training.side_by_side.isolated", nullcontext)
    monkeypatch.setattr("flower_ext.training.isolation.isolated", nullcontext)
    try:
        assert moved(raising(CHANGES["gradients"]), Noisy) > 2
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("model", [OfNumpy, OfPython])
def test_models_that_draw_from_shared_generators_are_refused(model):
    """Their draws would depend on the numbers of other clients' records."""
    with pytest.raises(FederationNotReady, match="changes while a model trains"):
        released(None, model)


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_restores_settings(name):
    before = _settings()
    with isolated():
        CHANGES[name]()
        assert _settings() != before
    assert _settings() == before
    x = torch.ones(2, requires_grad=True)
    (3 * x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_one_clients_code_leaves_change_no_bit_of_the_others(name):
    def left():
        CHANGES[name]()
        raise ValueError("odd record")

    def nothing():
        raise ValueError("odd record")

    assert np.array_equal(released(left, Noisy), released(nothing, Noisy))


@pytest.mark.parametrize("name", CHANGES)
def test_settings_a_model_leaves_in_training_change_no_other_bit(name):
    def mark():
        return None

    def model_that(acts):
        class Odd(Noisy):
            def forward(self, x):
                if x.shape[0] == 1:  # only the first client has a batch of one example
                    acts()
                    raise ValueError("odd record")
                return super().forward(x)

        return Odd

    usual = released(mark, model_that(mark), count=1)
    assert np.array_equal(released(mark, model_that(CHANGES[name]), count=1), usual)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, BaseException])
def test_a_crash_becomes_an_error_of_its_client(kind):
    def odd():
        raise kind("odd record")

    with pytest.raises(ClientCrashed, match=kind.__name__), isolated():
        odd()
    assert moved(odd) <= 1 + 1e-5


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
