"""A method never trains or scores a part of a model as if it were the whole."""

import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms import Apple, DP2FedSAM, DPFedAvg, PFedMe, Scaffold
from flower_ext.federation import (
    ClientMethod,
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    LocalResult,
    Memory,
)
from flower_ext.privacy import FullParticipation, NonPrivatePlan, ReleasePlan
from flower_ext.training import LocalTraining
from tests.support.strategies import strategy_of
from tests.support.worlds import task

CLIENTS = 3
LOCAL = LocalTraining(epochs=1, batch_size=8, learning_rate=0.1)
NONE = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
NOISED = ReleasePlan(
    sampling=FullParticipation(CLIENTS),
    clipping_norm=1.0,
    noise_multiplier=1.0,
    rounds=2,
    delta=1e-3,
)


def run(strategy):
    grid = InProcessGrid(strategy.method.client_app(task()), CLIENTS)
    return strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)


@pytest.mark.parametrize("plan", [NONE, NOISED])
def test_a_method_without_personal_parts_says_that_it_takes_none(plan):
    """This holds under every plan; otherwise training would use a head of no client."""
    strategy = FederatedStrategy(DPFedAvg(local=LOCAL, personal=("head",)), plan)
    with pytest.raises(FederationNotReady, match=r"head\.weight.*leave out personal="):
        run(strategy)


@pytest.mark.parametrize("method", [Apple, PFedMe, Scaffold])
def test_so_does_a_method_with_custom_training(method):
    with pytest.raises(FederationNotReady, match=r"head\.weight.*leave out personal="):
        run(strategy_of(method, plan=NONE, personal=("head",)))


def test_a_method_with_a_custom_head_works_as_before():
    strategy = FederatedStrategy(DP2FedSAM(head=LOCAL, extractor=LOCAL), NOISED)
    run(strategy)
    assert strategy.refusals == []


class Forgetful(DPFedAvg):
    """A method that trains the whole model, but would evaluate only its shared part."""

    @staticmethod
    def trained(work):
        model = yield work.train("local", {**work.initial_params(), **work.received})
        return LocalResult(model={name: model[name] for name in work.received})

    client = ClientMethod(
        name="forgetful",
        local_update=trained,
        local_model=lambda work: work.received,
        memory=Memory.NONE,
    )
    any_client_app = False


def test_a_model_that_lacks_its_head_is_not_scored():
    strategy = FederatedStrategy(Forgetful(local=LOCAL, personal=("head",)), NONE)
    run(strategy)
    assert strategy.run.client_metrics == {}
    assert all("head.weight" in refusal for refusal in strategy.refusals)
    assert len(strategy.refusals) == 2 * CLIENTS
