"""A method that fails sends the received model where the protection hides failures."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flower_ext.data import ClientData
from flower_ext.errors import tellable
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.federation.client.client_method import LocalResult
from flower_ext.federation.client.hidden_errors import hidden_errors, log_hidden
from flower_ext.federation.client.upload import check_finite, result_hiding_failures
from flower_ext.privacy import NonFiniteUpdate
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    Protection,
    Unprotected,
)
from tests.support.worlds import client_data

RECEIVED = {"w": torch.zeros(2), "b": torch.zeros(1)}
MEMORY = {"w": torch.full((2,), 7.0)}
TRAINED = {"w": torch.ones(2), "b": torch.ones(1)}
SPOILED = {"w": torch.ones(2), "b": torch.tensor([torch.nan])}
UPDATES = ClipAndNoise(clipping_norm=1.0, noise_stddev=1.0)
UNITS = ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=1.0)
STEPS = ClipSteps(clipping_norm=1.0, gradient_clipping_norm=1.0, noise_stddev=1.0)


@dataclass
class Work:
    """The parts of `ClientWork` that a failure concerns."""

    method: SimpleNamespace
    data: ClientData = field(default_factory=lambda: client_data(1))
    received: dict = field(default_factory=lambda: RECEIVED)
    memory: dict = field(default_factory=lambda: MEMORY)
    protection: Protection = UPDATES


def training(start=RECEIVED, *, without_noise=True):
    return SimpleNamespace(job=SimpleNamespace(params=start), without_noise=without_noise)


def result_of(method, *trained, protection=UPDATES):
    """Run a method; each of its trainings ends as ``trained`` says, and none is left over."""
    results = []

    def whole():
        work = Work(SimpleNamespace(local_update=method), protection=protection)
        results.append((yield from result_hiding_failures(work)))
        yield None

    steps = whole()
    wanted = next(steps)
    for end in trained:
        assert wanted is not None, "a training was not asked for"
        wanted = steps.throw(end) if isinstance(end, Exception) else steps.send(end)
    assert wanted is None, "a training was asked for once too often"
    (result,) = results
    return result


def once(work, **options):
    """Train the model once."""
    return LocalResult(model=(yield training(**options)))


def lines(logged):
    return [record.getMessage() for record in logged.records]


def test_a_method_trains_as_often_as_it_asks_and_sends_the_last():
    def twice(work):
        first = yield training()
        second = yield training(first)
        return LocalResult(model=second)

    assert result_of(twice, TRAINED, RECEIVED).model is RECEIVED
    assert result_of(lambda work: LocalResult(model=TRAINED)).model is TRAINED
    assert result_of(once, TRAINED, protection=STEPS).model is TRAINED


@pytest.mark.parametrize("end", [ValueError("a record"), SPOILED], ids=["raises", "diverges"])
@pytest.mark.parametrize("protection", [UPDATES, UNITS, STEPS])
def test_a_failed_training_leaves_its_model_unchanged_and_is_logged_locally(
    end, protection, logged
):
    start = {"w": torch.full((2,), 5.0)}
    result = result_of(partial(once, start=start), end, protection=protection)
    assert result.model == start
    (line,) = lines(logged)
    assert ("a local training diverged" in line) is (end is SPOILED)
    assert "a record" not in line


def test_where_steps_are_noised_any_error_of_a_training_is_raised():
    noised = partial(once, without_noise=False)
    with pytest.raises(ValueError, match="a step"):
        result_of(noised, ValueError("a step"), protection=STEPS)
    with pytest.raises(NonFiniteUpdate, match="'b'"):
        result_of(noised, SPOILED, protection=STEPS)


@pytest.mark.parametrize("part", ["model", "memory"])
def test_a_result_that_is_not_finite_counts_as_a_failure(part, logged):
    def method(work):
        numbers = SPOILED if len(work.data.train) else TRAINED
        return LocalResult(**{"model": TRAINED, "memory": TRAINED, part: numbers})

    assert getattr(result_of(method), part) is TRAINED
    assert any("diverged" in line for line in lines(logged))
    with pytest.raises(NonFiniteUpdate, match="'b'"):
        result_of(method, protection=STEPS)


@pytest.mark.parametrize("protection", [UPDATES, UNITS])
def test_a_method_that_fails_is_called_again_without_examples(protection, logged):
    seen = []

    def method(work):
        seen.append(work.data)
        if len(seen) == 1:
            raise ValueError("a record")
        return LocalResult(model=TRAINED)

    assert result_of(method, protection=protection).model is TRAINED
    assert seen[1:] == [NO_DATA]
    assert len(seen[0].train) == 30
    assert any("a local training failed (ValueError)" in line for line in lines(logged))


def test_a_method_that_fails_again_sends_the_received_model_keeping_memory():
    def method(work):
        raise ValueError("a record")

    result = result_of(method)
    assert result.model is RECEIVED
    assert result.memory is MEMORY
    with pytest.raises(ValueError, match="a record"):  # a sum over units is no model
        result_of(method, protection=UNITS)


@pytest.mark.parametrize("protection", [UPDATES, UNITS, STEPS])
@pytest.mark.parametrize("always", [True, False])
def test_an_error_that_depends_on_no_data_is_raised_at_once(protection, always):
    seen = []

    def method(work):
        seen.append(work)
        if always or len(seen) == 2:
            raise tellable(ValueError("a setting"))
        raise ValueError("a record")

    text = "a setting" if always or protection is not STEPS else "a record"
    with pytest.raises(ValueError, match=text):
        result_of(method, protection=protection)
    assert len(seen) == (1 if always or protection is STEPS else 2)


def test_only_noise_on_the_whole_upload_hides_failures():
    assert UPDATES.hides_failures
    assert not STEPS.hides_failures
    assert not Unprotected().hides_failures


def test_the_first_parameter_that_is_not_finite_is_named():
    check_finite(None)
    check_finite(TRAINED)
    with pytest.raises(NonFiniteUpdate, match="'b'"):
        check_finite(SPOILED)


def test_one_line_of_code_leaves_one_traceback_in_the_log(logged):
    hidden_errors.clear()
    for number in range(3):
        try:
            raise ValueError(number)
        except ValueError as error:
            log_hidden(error)
    assert [record.exc_info is not None for record in logged.records] == [True, False, False]
