"""Training users in parts gives the same sums in bounded memory."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.algorithms.uldp import (
    UldpNaive,
    silo_training,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd
from flower_ext.data import Examples, SiloData
from flower_ext.federation.sums.summation import SumMessage
from flower_ext.federation.sums.weighted import WEIGHTS
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.privacy import (
    FullParticipation,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.training import LocalTraining, Task
from tests.support.reference.comparing import close
from tests.support.silos import (
    COMMON,
    LOCAL,
    USERS,
    plan,
    silos,
)
from tests.support.strategies import strategy_of
from tests.support.uldp_runs import grouped, run, sum_of, without
from tests.support.worlds import CLASSES, FEATURES


def test_users_in_small_batches_are_the_same_users_in_large_ones(monkeypatch):
    def final(limit, prepared):
        monkeypatch.setattr(silo_training, "_PREPARED", prepared)
        strategy = strategy_of(UldpAvg, plan=plan(), weighting="by-records", local=LOCAL, **COMMON)
        return run(strategy, memory_limit=limit)

    one = final(2**30, 2048)
    for limit, prepared in ((1, 2048), (2**30, 3), (2**14, 7)):
        close(final(limit, prepared), one)


class Scaled(nn.Module):
    """A model with a buffer that no training changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.layer(x)


def silo_job(task, sizes=(5, 5, 1, 9, 40), training=LOCAL):
    """Return one silo with a user of each size, whose clipped updates have weight 1/2."""
    draw = torch.Generator().manual_seed(0)
    users = {
        user: Examples(torch.randn(size, 4, generator=draw), torch.arange(size) % 3)
        for user, size in enumerate(sizes)
    }
    params = task.initial_params(1)
    return silo_training.SiloJob(
        params=params,
        examples=users[0],
        training=training,
        generator=draw,
        users=users,
        seeds=list(users),
        total=silo_training.WeightedTotal(
            params,
            ClipAndNoise(of_units=True, clipping_norm=0.1, noise_stddev=1.0),
            [0.5] * len(sizes),
        ),
    )


@pytest.mark.parametrize("limit", [1, 2**30])
def test_buffers_stay_as_they_are_in_batches_and_alone(limit):
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job = silo_job(task)
    silo_training.add_users(task, [job], trained=lambda name: True, memory_limit=limit)
    total = job.total.value
    assert not total.value["scale"].any()
    assert total.value["layer.weight"].any()
    assert job.params["scale"] == 2.0


def test_a_silos_sum_stays_in_double_precision_until_it_is_noised():
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job = silo_job(task)
    silo_training.add_users(task, [job], trained=lambda name: True, memory_limit=2**30)
    assert {value.dtype for value in job.total.value.value.values()} == {torch.float64}


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(1, 5, 2)
        self.head = nn.Linear(15, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.features(x.unsqueeze(1))).flatten(1))


@pytest.mark.parametrize("model", [Scaled, Convolutional])
def test_no_user_moves_the_update_of_another_by_a_single_bit(model):
    """Unstable training would amplify the rounding of a batch that has one more user."""
    task = Task(model=model, data=lambda silo: silo, device="cpu")
    job = silo_job(
        task,
        sizes=[20, 20, 9, 9, 9, 12, 1],
        training=LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9),
    )

    def updates(users):
        smaller_job = replace(job, users={user: job.users[user] for user in users})
        updates_found = silo_training.users_updates(
            task, [smaller_job], trained=lambda name: True, memory_limit=2**30
        )
        return {
            user: {name: part[row].clone() for name, part in rows.items()}
            for _, members, rows in updates_found
            for row, user in enumerate(members)
        }

    everyone = updates(job.users)
    assert sorted(everyone) == list(job.users)
    for absent in job.users:
        for user, update in updates([u for u in job.users if u != absent]).items():
            torch.testing.assert_close(update, everyone[user], rtol=0, atol=0)


def updates_of(task, job):
    """Return each user's update before clipping."""
    updates = silo_training.users_updates(
        task, [job], trained=lambda name: True, memory_limit=2**30
    )
    return {
        user: {name: part[row].clone() for name, part in rows.items()}
        for _, members, rows in updates
        for row, user in enumerate(members)
    }


def picky(outputs, targets):
    """A loss that refuses a label."""
    if bool((targets == 7).any()):
        raise RuntimeError("no such label")
    return cross_entropy(outputs, targets)


def far(outputs, targets):
    """A loss that is infinite for a label."""
    scale = torch.where(targets == 7, math.inf, 1.0)
    return (cross_entropy(outputs, targets % 3, reduction="none") * scale).mean()


UNSTABLE = LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9)
RAISING = {
    "dense, a label out of range": (Scaled, cross_entropy, UNSTABLE, 7),
    "convolutional, a label out of range": (Convolutional, cross_entropy, UNSTABLE, 7),
    "a loss that refuses": (Scaled, picky, UNSTABLE, 7),
    "no minimiser": (Scaled, far, LocalTraining(tolerance=1e-6, proximal_weight=1.0), 7),
}


@pytest.mark.parametrize(
    "raising",
    [
        pytest.param((2,), id="one", marks=pytest.mark.full),
        pytest.param((0, 2, 6), id="some"),
        pytest.param(tuple(range(7)), id="all"),
    ],
)
@pytest.mark.parametrize("kind", RAISING)
def test_a_user_whose_training_raises_moves_no_other_users_update(kind, raising, caplog):
    model, loss, training, label = RAISING[kind]
    task = Task(model=model, data=lambda silo: silo, loss=loss, device="cpu")
    job = silo_job(task, sizes=[20, 20, 9, 9, 9, 12, 1], training=training)
    others = {user: examples for user, examples in job.users.items() if user not in raising}
    spoiled = {
        user: Examples(examples.features, torch.full_like(examples.targets, label))
        for user, examples in job.users.items()
        if user in raising
    }
    theirs = updates_of(task, replace(job, users=others))
    ours = updates_of(task, replace(job, users={u: (others | spoiled)[u] for u in job.users}))
    assert sorted(ours) == list(job.users)
    for user, update in ours.items():
        for name, part in update.items():
            assert torch.equal(part, theirs[user][name]) if user in theirs else not part.any()
    (messages,) = [r for r in caplog.records if "count as zero" in r.message]
    assert messages.levelname == ("ERROR" if len(raising) == 7 else "WARNING")
    assert f"for {len(raising)} of 7 users" in messages.message


def test_a_user_whose_training_raises_is_encrypted_as_zero():
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job, clipped = silo_job(task), {}
    job.users[1].targets[0] = 7
    silo = SimpleNamespace(
        counted=tuple(job.users),
        settings=SimpleNamespace(users=USERS),
        open_sum=lambda number, weights: SimpleNamespace(add=clipped.update),
    )
    message = SumMessage(WEIGHTS)
    total = HiddenSum(silo, message, training_round=1, users=USERS, bound=0.1, like={})
    hidden = replace(job, total=total)
    silo_training.add_users(task, [hidden], trained=lambda name: True, memory_limit=2**30)
    assert sorted(clipped) == list(job.users)
    assert [user for user, update in clipped.items() if not update.any()] == [1]


def with_a_wrong_label(data, user=3):
    """Return data with a wrong label: one record of ``user`` in each silo that has some."""
    silos_with_it = []
    for examples in data:
        targets = examples.train.targets.clone()
        targets[np.flatnonzero(examples.owners == user)[:1]] = CLASSES + 5
        train = Examples(examples.train.features, targets)
        silos_with_it.append(SiloData(train=train, test=examples.test, owners=examples.owners))
    return silos_with_it


@pytest.mark.parametrize("method", [UldpAvg, UldpSgd])
def test_one_wrong_label_moves_the_sum_by_at_most_the_clipping_norm(method):
    sampling, bound = FullParticipation(USERS), 0.01
    ours = sum_of(method, with_a_wrong_label(silos()), sampling, "equal", bound)
    theirs = sum_of(method, without(3, silos()), sampling, "equal", bound)
    assert np.linalg.norm(ours - theirs) <= 1e-6 * bound
    assert np.linalg.norm(ours - sum_of(method, silos(), sampling, "equal", bound)) <= bound * 1.001


def test_one_wrong_label_does_not_keep_a_silo_of_group_from_answering():
    strategy = grouped(2)
    run(strategy, with_a_wrong_label(silos()), rounds=1)
    assert strategy.refusals == []


@pytest.mark.parametrize("wrong", ["label", "diverging"])
def test_a_silo_of_naive_that_fails_moves_nothing_and_adds_its_noise(wrong):
    data = silos()
    if wrong == "label":
        data[1] = with_a_wrong_label(data)[1]
    else:
        data[1] = replace(
            data[1], train=Examples(data[1].train.features * 1e38, data[1].train.targets)
        )
    nothing = torch.zeros(0, dtype=torch.long)
    empty = Examples(torch.zeros(0, FEATURES), nothing)
    without_it = [data[0], replace(data[1], train=empty, owners=nothing), data[2]]
    strategies = [strategy_of(UldpNaive, plan=plan(), local=LOCAL, **COMMON) for _ in range(2)]
    close(run(strategies[0], data), run(strategies[1], without_it))
    assert strategies[0].refusals == []


def test_no_more_models_exist_at_a_time_than_one_batch_has(monkeypatch):
    sizes = []

    def watched(*args, **options):
        for group, rows in averaging_groups(*args, **options):
            sizes.append(len(group))
            yield group, rows

    averaging_groups = silo_training.train_groups
    monkeypatch.setattr(silo_training, "train_groups", watched)
    run(strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON), rounds=1, memory_limit=2**14)
    users = sum(len(torch.unique(one.owners)) for one in silos())
    assert sum(sizes) == users
    assert max(sizes) < users / 2
