"""Functions that wait for local trainings: one after another, or many at once."""

from dataclasses import replace

import pytest
import torch

from flower_ext.data import Examples
from flower_ext.federation import LocalResult
from flower_ext.training import Job, LocalTraining, Task, difference
from flower_ext.training.side_by_side import Training, completed, side_by_side

PLAIN = LocalTraining(epochs=1, batch_size=4, learning_rate=0.1)


def task() -> Task:
    return Task(model=lambda: torch.nn.Linear(3, 2), data=lambda partition: None)


def job(seed: int, *, broken: bool = False) -> Job:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(8, 2 if broken else 3, generator=generator)
    targets = torch.randint(2, (8,), generator=generator)
    return Job(
        params=task().initial_params(0),
        examples=Examples(features, targets),
        training=PLAIN,
        generator=generator,
    )


def run(job: Job):
    model = yield Training(task=task(), job=job, trained=lambda name: True)
    return (yield Training(task=task(), job=replace(job, params=model), trained=lambda name: True))


def test_an_error_concerns_one_run_and_others_end_as_alone():
    (alone,) = side_by_side([run(job(1))])
    first, failed, last = side_by_side([run(job(1)), run(job(2, broken=True)), run(job(3))])
    assert isinstance(failed, RuntimeError)
    assert isinstance(last, dict)
    for name, value in first.items():
        torch.testing.assert_close(value, alone[name])


def choosing_badly(job: Job):
    def trained(name):
        raise RuntimeError("a method's job mistake")

    return (yield Training(task=task(), job=job, trained=trained))


def yielding_a_number(job: Job):
    return (yield 3)


@pytest.mark.parametrize("method", [choosing_badly, yielding_a_number])
def test_a_mistake_of_one_method_in_what_it_yields_ends_no_other(method):
    (alone,) = side_by_side([run(job(1))])
    failed, other = side_by_side([method(job(2)), run(job(1))])
    assert isinstance(failed, Exception)
    for name, value in other.items():
        torch.testing.assert_close(value, alone[name])


def test_a_run_without_a_training_ends_before_the_next_one_is_made():
    steps = []

    def ending(number):
        value = yield from completed(number)
        steps.append(f"end {value}")
        return value

    def made():
        for number in range(3):
            steps.append(f"make {number}")
            yield ending(number)

    assert side_by_side(made()) == [0, 1, 2]
    assert steps == ["make 0", "end 0", "make 1", "end 1", "make 2", "end 2"]


def test_a_training_that_nobody_awaits_is_refused():
    waiting = Training(task=task(), job=job(1), trained=lambda name: True)
    with pytest.raises(ValueError, match=r"model = yield work\.train"):
        LocalResult(model=waiting)
    with pytest.raises(ValueError, match=r"model = yield work\.train"):
        Training(task=task(), job=replace(job(1), params=waiting), trained=lambda name: True)


def test_the_difference_of_other_parts_of_a_model_says_which_are_missing():
    whole = task().initial_params(0)
    with pytest.raises(ValueError, match=r"difference: the trained model has \['bias'\], which"):
        difference(whole, {"weight": whole["weight"]})
