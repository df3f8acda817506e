"""Optimizers other than SGD, and the methods that refuse them."""

import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.algorithms import DPDitto, Scaffold
from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import Job, LocalTraining, Task
from flower_ext.training.job import OPTIMIZERS
from tests.support.jobs import batches, train_many, train_one

OTHERS = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {},
    "RMSprop": {"weight_decay": 0.01},
    "Adagrad": {},
    "Rprop": {},
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def task() -> Task:
    return Task(model=model, data=lambda _: None, device="cpu")


def examples(seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        features=torch.randn(30, 4, generator=generator),
        targets=torch.randint(3, (30,), generator=generator),
    )


@pytest.mark.parametrize("name", OTHERS)
def test_training_matches_torchs_optimizer_alone_and_among_others(name):
    training = LocalTraining(
        epochs=3, batch_size=8, learning_rate=0.02, optimizer=name, **OTHERS[name]
    )
    loop_task, start = task(), task().initial_params(1)
    expected = []
    for seed in range(3):
        plain = model()
        plain.load_state_dict(start)
        optimizer = getattr(torch.optim, name)(plain.parameters(), lr=0.02, **OTHERS[name])
        for x, y in batches(examples(seed), training, torch.Generator().manual_seed(seed)):
            optimizer.zero_grad()
            cross_entropy(plain(x), y).backward()
            optimizer.step()
        expected.append(plain.state_dict())
    trained = train_one(
        loop_task, start, examples(0), training, generator=torch.Generator().manual_seed(0)
    )
    jobs = [
        Job(
            params=start,
            examples=examples(seed),
            training=training,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in range(3)
    ]
    for one, other in zip(
        [trained, *train_many(loop_task, jobs)], expected[:1] + expected, strict=True
    ):
        for key, value in other.items():
            torch.testing.assert_close(one[key], value, atol=1e-6, rtol=1e-5)
            assert not torch.equal(value, start[key])


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"SGD", "ASGD"}))  # ASGD has a decay λ
def test_a_weight_decay_of_zero_is_none_whatever_torchs_default(name):
    x, y = torch.zeros(8, 4), torch.arange(8) % 3
    training = LocalTraining(epochs=1, batch_size=8, learning_rate=0.1, optimizer=name)
    start = task().initial_params(1)
    end = train_one(task(), start, Examples(x, y), training, generator=torch.Generator())
    # Features of zero give the first layer's weights a gradient of zero, so only decay moves them.
    assert torch.equal(end["0.weight"], start["0.weight"])
    assert not torch.equal(end["0.bias"], start["0.bias"])


def test_an_optimizer_travels_to_the_clients():
    training = LocalTraining(optimizer="AdamW", weight_decay=0.2)
    content = RecordDict(dict(records.training_records({"local": training})))
    assert records.read_trainings(content) == {"local": training}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adamw"}, "optimizer='Adamw': expected one of .*AdamW"),
        ({"optimizer": "LBFGS"}, "optimizer='LBFGS'"),
        ({"optimizer": "AdamW", "momentum": 0.9}, "momentum=0.9: expected 0 with optimizer"),
        ({"optimizer": "AdamW", "tolerance": 0.1}, "tolerance=0.1: expected 0 with optimizer"),
        ({"weight_decay": 0.1}, "weight_decay=0.1: expected 0 with optimizer='SGD'"),
        (
            {"optimizer": "Rprop", "weight_decay": 0.1},
            "weight_decay=0.1: expected 0 with optimizer='Rprop'",
        ),
    ],
)
def test_options_that_an_optimizer_lacks_are_refused(options, message):
    with pytest.raises(InvalidValue, match=message):
        LocalTraining(**options)


def test_methods_whose_theorem_assumes_sgd_refuse_other_optimizers():
    plan, adamw = NonPrivatePlan(sampling=FullParticipation(3)), LocalTraining(optimizer="AdamW")
    with pytest.raises(InvalidValue, match="local.optimizer='AdamW': leave it out"):
        FederatedStrategy(Scaffold(local=adamw), plan)
    with pytest.raises(InvalidValue, match="personal_training.optimizer='AdamW': leave it out"):
        FederatedStrategy(DPDitto(global_weight=1.0, personal_training=adamw), plan)
