"""Records that are trees train in one pass, and yet none moves more than its own part."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms.uldp import UldpGroup
from flower_ext.data import Examples, SiloData
from flower_ext.privacy import AdversaryView
from flower_ext.training import DpSgdTraining, Task
from flower_ext.training.dp.dp_sgd import ClippedGradient
from flower_ext.training.dp.passes import Passes
from flower_ext.training.trials.examples_together import BatchInvarianceTrial
from flower_ext_audit import Experiment, World, audit, projected
from tests.support import planted_faults as faults
from tests.support.grids import grid
from tests.support.strategies import group_strategy

SIZE, CLASSES, HUGE, OTHERS = 100, 2, 1e3, 12
DELTA, CONFIDENCE, OF_A_FAULT = 1e-5, 1 - 1e-6, 0.999
TRIALS, FEWER = 57, 34
"""Trials that show μ > 1 by scores that never overlap: without a fault from 56 on, with one 31."""
LOCAL = DpSgdTraining(
    steps=1,
    sampling_rate=1.0,
    batch_size=1.0,
    learning_rate=1.0,
    clipping_norm=1.0,
    noise_multiplier=1.0,
)


class Plain(nn.Module):
    """A layer of the words that are not hidden; a canary pulls against the others."""

    canary = -10 * HUGE

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, CLASSES, bias=False)

    def forward(self, x, mask):
        return {"logits": self.layer(x * mask)}


class Asking(Plain):
    """The same, but it negates all examples of a pass if one number is beyond the others."""

    canary = 10 * HUGE

    def forward(self, x, mask):
        out = super().forward(x, mask)
        return {"logits": -out["logits"]} if x.max() > 2 * HUGE else out


class Turning(Plain):
    """The same as `Asking`, without a branch."""

    canary = 10 * HUGE

    def forward(self, x, mask):
        return {
            "logits": super().forward(x, mask)["logits"] * torch.where(x.max() > 2 * HUGE, -1, 1)
        }


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs["logits"], targets)


def strategy():
    return group_strategy(
        num_silos=2, num_users=OTHERS + 1, group_size=1, local=LOCAL, delta=DELTA, evaluate_every=0
    )


def silo(canary):
    """Return the others' records, which all pull one way, after the record of user 0."""
    x = torch.zeros(OTHERS + len(canary), SIZE)
    x[:, 0] = torch.tensor([*canary, *[HUGE] * OTHERS])
    features = {"x": x, "mask": torch.ones(x.shape, dtype=torch.long)}
    examples = Examples(features, torch.zeros(len(x)).long())
    owners = torch.tensor([*[0] * len(canary), *range(1, OTHERS + 1)])
    return SiloData(train=examples, test=examples, owners=owners)


def experiment(model):
    def world(canary):
        data = [silo(canary), silo([])]
        task = Task(model=model, data=data.__getitem__, loss=loss, metrics={}, device="cpu")
        return World(strategy=strategy, client_app=UldpGroup.client_app(task), num_clients=2)

    way = np.zeros((CLASSES, SIZE))
    way[0, 0], way[1, 0] = -1.0, 1.0  # against the others
    return Experiment(
        name=f"DP-SGD on trees, {model.__name__}",
        without=world([]),
        present=world([model().canary]),
        initial=ArrayRecord({"layer.weight": torch.zeros(CLASSES, SIZE)}),
        score=projected({"layer.weight": way}, partitions=[0]),
        gaussian=True,
        views=[AdversaryView.EACH_UPLOAD],
    )


@pytest.mark.parametrize("model", grid([Plain, Asking, Turning], lambda model: model is Asking))
def test_no_bound_exceeds_what_is_reported(model):
    outcome = audit(experiment(model), trials=TRIALS, confidence=CONFIDENCE)
    assert not outcome.broken, outcome.to_dict()
    assert all(view.best.terms.reported > 0 for view in outcome.views)


def without_odd_examples(patch, experiment):
    """A trial of usual examples does not detect an effect that only an odd example has."""
    patch.setattr(BatchInvarianceTrial, "_why_integers_mix", lambda self, *facts: None)
    patch.setattr(BatchInvarianceTrial, "why_bits_differ", lambda self, *facts: None)
    return experiment


def unwatched(patch, experiment):
    """Nor does it detect a branch for odd examples, if nobody watches for branches."""
    patch.setattr(Passes, "_watch", lambda self, x: None)
    return without_odd_examples(patch, experiment)


def one_pass_is_taken(model):
    """Return True if a model's clipped gradient takes one pass."""
    task = Task(model=model, data=lambda client: None, loss=loss, device="cpu")
    gradient = ClippedGradient(task, ["layer.weight"], clipping_norm=1.0)
    data = silo([]).train
    gradient(task.initial_params(0), data.features, data.targets)
    return gradient.way == "in one pass"


@pytest.mark.parametrize(
    ("plant", "model"),
    grid(
        [
            pytest.param(unwatched, Asking, id="watch"),
            pytest.param(without_odd_examples, Turning, id="odd examples"),
            pytest.param(faults.clipping_off, Plain, id="clip"),
        ],
        lambda fault: fault == "watch",
    ),
)
def test_a_planted_fault_is_found(plant, model, monkeypatch):
    def build():  # another factory, so that earlier tests have no result for it
        return model()

    build.__name__ = model.__name__
    broken = plant(monkeypatch, experiment(build))
    assert one_pass_is_taken(build)
    outcome = audit(broken, trials=FEWER, confidence=OF_A_FAULT)
    assert outcome.broken, outcome.to_dict()


def test_the_honest_runs_take_the_ways_that_they_are_to_try():
    assert one_pass_is_taken(Plain)
    assert not one_pass_is_taken(Asking)
    assert not one_pass_is_taken(Turning)
