"""Named personalisation methods: runs resume, are accounted for, and keep clients apart."""

from functools import partial

import pytest
import torch

from flower_ext.algorithms import APFL, DPFedAvg, FedBN, FedPer, FedRep
from flower_ext.data import ClientData, Examples
from flower_ext.federation.messages import records
from flower_ext.privacy import AdversaryView, FullParticipation, PoissonSampling, ReleasePlan
from flower_ext.training import Task
from tests.support.dying_runs import Died, assert_same_model, play
from tests.support.grids import grid as grid_of
from tests.support.personalised import CLIENTS, SGD, Normed, run, uneven_task
from tests.support.travelling import Recorder

METHODS = {
    "FedPer": FedPer(local=SGD),
    "FedRep": FedRep(head=SGD, extractor=SGD),
    "FedBN": FedBN.for_model(Normed(), local=SGD),
    "APFL": APFL(weight_learning_rate=0.1, local=SGD),
}
RELEASE = partial(ReleasePlan, clipping_norm=0.5, rounds=3, delta=0.01)
# FedPer and FedRep keep parameters as FedBN does.
every = pytest.mark.parametrize("name", grid_of(METHODS, ("FedBN", "APFL").__contains__))


def task_of(name):
    return uneven_task(Normed) if name == "FedBN" else uneven_task()


@every
def test_a_private_run_spends_what_dp_fedavg_spends(name):
    plan = RELEASE.func.for_target(
        epsilon=4.0, sampling=PoissonSampling(CLIENTS, 0.5), clipping_norm=0.5, rounds=3, delta=0.01
    )
    *_, strategy, _ = run(METHODS[name], plan, task=task_of(name))
    *_, usual, _ = run(DPFedAvg(local=SGD), plan)
    provable = {one.view: one for one in strategy.guarantees() if one.basis == "provable"}
    assert 3.9 < provable[AdversaryView.RELEASED_MODELS].epsilon <= 4.0
    models = {one.view: one for one in usual.guarantees() if one.basis == "provable"}
    view = AdversaryView.RELEASED_MODELS
    assert provable[view].epsilon == models[view].epsilon
    assert strategy.refusals == []
    published = [one for one in strategy.guarantees() if one.basis == "published"]
    assert bool(published) == (name == "FedRep")  # CENTAUR's theorem is that of its paper


@every
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.dying_runs.task", lambda: task_of(name))
    method = METHODS[name]
    options = {"rounds": 4, "method": type(method)}
    options |= {"local": SGD} if name != "FedRep" else {"head": SGD, "extractor": SGD}
    options |= {"personal": method.personal} if name == "FedBN" else {}
    options |= {"weight_learning_rate": 0.1} if name == "APFL" else {}
    whole, _ = play(tmp_path / "whole", **options)
    with pytest.raises(Died):
        play(tmp_path / "parts", dies_in=3, **options)
    parts, _ = play(tmp_path / "parts", **options)
    assert_same_model(parts, whole)
    assert whole.client_metrics() == parts.client_metrics()
    assert whole.client_metrics()


def nan(data):
    return data.train.features * float("nan"), data.train.targets


def unknown_class(data):
    return data.train.features, data.train.targets + 1_000


@every
@pytest.mark.parametrize("spoil", [nan, unknown_class])
def test_odd_data_of_one_client_change_no_other_client(name, spoil):
    problem = task_of(name)

    def data(client):
        data = problem.data(client)
        return ClientData(train=Examples(*spoil(data)), test=data.test) if client == 1 else data

    spoiled = Task(model=problem.model, data=data, device="cpu")
    plan = RELEASE(sampling=FullParticipation(CLIENTS), noise_multiplier=1e-3)
    outcomes = []
    for one in (problem, spoiled):
        options = {"task": one, "grid": Recorder, "rounds": 1, "evaluate_every": 0}
        _, memories, strategy, grid = run(METHODS[name], plan, **options)
        assert strategy.refusals == []
        replies = {
            message.metadata.src_node_id: records.to_params(message.content["update"])
            for message in grid.received
            if "update" in message.content
        }
        assert len(replies) == CLIENTS
        outcomes.append((memories, replies))
    (memories, replies), (their_memories, their_replies) = outcomes
    changed = {node for node in replies if not equal(replies[node], their_replies[node])}
    assert len(changed) == 1
    others = set(range(CLIENTS)) - {1}
    for client in others:
        torch.testing.assert_close(memories[client], their_memories[client], rtol=0, atol=0)
    assert all(torch.isfinite(p).all() for p in their_memories[1].values())


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], p) for n, p in other.items())
