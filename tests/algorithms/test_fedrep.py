"""FedRep equals a plain loop over models, and CENTAUR bit for bit."""

import pytest
import torch

from flower_ext.algorithms import Centaur, FedRep
from flower_ext.federation import InProcessGrid
from flower_ext.training import LocalTraining
from tests.support.personalised import (
    CLIENTS,
    ROUNDS,
    SEED,
    SGD,
    OneByOne,
    assert_close,
    run,
    uneven_task,
)
from tests.support.reference.personalised import federated, head_first

HEAD = LocalTraining(epochs=3, batch_size=8, learning_rate=0.3)


@pytest.mark.parametrize("grid", [InProcessGrid, OneByOne])
def test_it_equals_the_plain_loop(grid):
    shared, memories, strategy, _ = run(FedRep(head=HEAD, extractor=SGD), grid=grid)
    expected, models, _ = federated(
        head_first,
        uneven_task(),
        seed=SEED,
        clients=CLIENTS,
        rounds=ROUNDS,
        is_personal=lambda name: name.startswith("head"),
        head=HEAD,
        extractor=SGD,
    )
    assert strategy.refusals == []
    assert_close(shared, expected)
    for client, memory in memories.items():
        assert_close(
            memory, {f"head.{n}": p.detach() for n, p in models[client].head.named_parameters()}
        )


def test_it_is_centaur_by_another_name():
    one, heads, *_ = run(FedRep(head=HEAD, extractor=SGD))
    other, same_heads, *_ = run(Centaur(head=HEAD, extractor=SGD))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    for client, head in heads.items():
        assert all(torch.equal(head[name], p) for name, p in same_heads[client].items())
