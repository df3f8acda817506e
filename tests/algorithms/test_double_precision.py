"""Methods of personal models train a model of double precision as one of single precision."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import Apple, FedALA, FedAMP, FedDyn, PFedMe, Scaffold
from flower_ext.data import ClientData
from flower_ext.federation import InProcessGrid
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import Task
from tests.support.strategies import strategy_of
from tests.support.worlds import Net, client_data


@pytest.mark.parametrize("method", [Apple, FedALA, FedAMP, FedDyn, PFedMe, Scaffold])
def test_a_model_of_double_precision_trains_as_one_of_single_precision(method):
    def final(dtype):
        def build() -> nn.Module:
            return Net().to(dtype)

        def data(client):
            examples = [
                part.__class__(part.features.to(dtype), part.targets)
                for part in (client_data(client).train, client_data(client).test)
            ]
            return ClientData(train=examples[0], test=examples[1])

        task = Task(model=build, data=data, device="cpu")
        plan = NonPrivatePlan(sampling=FullParticipation(3))
        grid = InProcessGrid(method.client_app(task), num_clients=3)
        start = {n: p.to(dtype) for n, p in Task(model=Net, data=data).initial_params(0).items()}
        strategy = strategy_of(method, plan=plan, evaluate_every=0)
        result = strategy.start(grid, ArrayRecord(start), num_rounds=2)
        return start, result.arrays.to_torch_state_dict()

    (start, single), (_, double) = final(torch.float32), final(torch.float64)
    for name, value in double.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value.float(), single[name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(single[name], start[name])
