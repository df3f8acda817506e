"""The server learns that a client has no examples only if clients report their sizes."""

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import (
    APFL,
    Apple,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    FedALA,
    FedAMP,
    FedDyn,
    FedPer,
    FedRep,
    PFedMe,
    Scaffold,
)
from flower_ext.data import ClientData
from flower_ext.federation import InProcessGrid
from flower_ext.privacy import FullParticipation, NonPrivatePlan, ReleasePlan
from tests.support.strategies import strategy_of
from tests.support.worlds import client_data, task

OF_A_SUM = [APFL, DPFedAvg, DP2FedSAM, DPDitto, FedALA, FedDyn, FedPer, FedRep, PFedMe]
WITH_HEADS = (DP2FedSAM, FedPer, FedRep)
CLIENTS = 4


def run(method, plan):
    def data(client):
        client_examples = client_data(client)
        last = client == plan.sampling.population - 1
        return (
            ClientData(train=client_examples.train.subset([]), test=client_examples.test)
            if last
            else client_examples
        )

    few_examples = replace(task(), data=data)
    strategy = strategy_of(
        method, plan=plan, seed=1, personal=["head"] if method in WITH_HEADS else []
    )
    grid = InProcessGrid(method.client_app(few_examples), plan.sampling.population)
    result = strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    return strategy, result.arrays.to_torch_state_dict()


def release(clients, noise_multiplier):
    return ReleasePlan(
        sampling=FullParticipation(clients),
        clipping_norm=1.0,
        noise_multiplier=noise_multiplier,
        rounds=2,
        delta=1e-3,
    )


@pytest.mark.parametrize("method", OF_A_SUM)
def test_under_client_noise_it_answers_like_any_other(method):
    strategy, _ = run(method, release(CLIENTS, 1.0))
    assert strategy.refusals == []


@pytest.mark.parametrize("method", OF_A_SUM)
def test_all_that_it_adds_is_noise(method):
    _, moved = run(method, release(1, 1e-6))
    for name, value in moved.items():
        torch.testing.assert_close(value, task().initial_params(0)[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", [*OF_A_SUM, Apple, FedAMP, Scaffold])
def test_where_clients_send_sizes_it_leaves_itself_out(method):
    strategy, _ = run(method, NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    assert len(strategy.refusals) == 2
    assert all("num-examples=0.0: expected at least 1" in refusal for refusal in strategy.refusals)
