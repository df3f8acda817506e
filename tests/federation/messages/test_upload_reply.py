"""Updates that stay plain arrays are checked, counted and added up as records are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict

from flower_ext.data import ClientData, Examples
from flower_ext.federation import (
    ClientMethod,
    FederatedStrategy,
    InProcessGrid,
    LocalResult,
    Memory,
    Method,
)
from flower_ext.federation._flower_private import become_server_of, reply_to
from flower_ext.federation.messages import records
from flower_ext.federation.messages.replies import RefusedReply, read_update
from flower_ext.federation.messages.upload_reply import Update, UploadReply, payload_bytes
from flower_ext.federation.storage.memory import ClientMemory
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, ReleasePlan
from flower_ext.training import LocalTraining, Task
from tests.support.grids import grid
from tests.support.replies import requests_of
from tests.support.worlds import Net, task

CLIENTS = 8
MODEL = {name: value.numpy() for name, value in task().initial_params(0).items()}
METRICS = {"num-examples": 3.0, "update-norm": 0.5}


def named_update(work):
    """Send an update that the client's data name, whatever it is."""
    scale = work.data.train.features[0, 0]
    shapes = work.received.items()
    return LocalResult(update={name: scale * torch.ones_like(value) for name, value in shapes})


@dataclass(frozen=True, kw_only=True)
class Told(Method):
    """Adds up what clients say."""

    client = ClientMethod(
        name="named_update",
        local_update=named_update,
        local_model=lambda work: work.received,
        memory=Memory.NONE,
    )

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        return {"local": LocalTraining()}


def plans() -> dict[str, object]:
    sampling = FixedSizeSampling(CLIENTS, CLIENTS)
    noise = {"clipping_norm": 0.5, "noise_multiplier": 0.3, "rounds": 2, "delta": 1e-3}
    return {
        "no noise": NonPrivatePlan(sampling=sampling),
        "server noise": ReleasePlan(sampling=sampling, noise_placement="server", **noise),
        "client noise": ReleasePlan(sampling=sampling, noise_placement="client", **noise),
    }


def result(plan, values, *, workers, **grid):
    """The model after two rounds of clients that send ``values``, and the refusals."""

    def data(client):
        examples = Examples(torch.full((3, 6), values[client]), torch.zeros(3, dtype=torch.int64))
        return ClientData(train=examples, test=examples)

    strategy = FederatedStrategy(
        Told(), plan, seed=1, seeded_noise=plan.delta is not None, evaluate_every=0
    )
    app = Told.client_app(Task(model=Net, data=data, device="cpu"), allow_seeded_noise=True)
    clients = InProcessGrid(app, CLIENTS, workers=workers, **grid)
    try:
        run = strategy.start(clients, ArrayRecord(task().initial_params(0)), num_rounds=2)
        clients.workers.gather()
    finally:
        clients.workers.abandon()
    rows = {k: v for k, v in strategy.run.progress.row.items() if "seconds" not in k}
    return records.to_arrays(run.arrays), strategy.refusals, rows


ODD = {
    "none": {},
    "NaN here": {0: math.nan},
    "NaN elsewhere": {6: math.nan},
    "huge": {1: 1e20, 7: -math.inf},
    "large": {5: 1e4},
    "all": dict.fromkeys(range(8)),
}
DAILY = {
    *(("no noise", odd) for odd in ("none", "NaN here", "NaN elsewhere", "large")),
    *(("client noise", "huge"), ("server noise", "all")),
}


@pytest.mark.parametrize(
    ("plan", "odd"),
    grid(product(plans(), ODD), DAILY.__contains__),
)
def test_a_sum_and_its_refusals_do_not_depend_on_the_processes(plan, odd):
    values = [0.01 * (client + 1) for client in range(CLIENTS)]
    for client, value in ODD[odd].items():
        values[client] = math.nan if value is None else value
    if odd == "all":
        values[3] = 0.02
    one, why, rows = result(plans()[plan], values, workers=1)
    for workers in (2, 3):
        many, reasons, others = result(plans()[plan], values, workers=workers)
        assert reasons == why
        assert others == pytest.approx(rows, rel=1e-6)
        for name, array in one.items():
            assert many[name].tobytes() == array.tobytes()


def test_a_sums_bits_do_not_depend_on_the_cohorts_part_size():
    values = [0.1 * math.pi**-client for client in range(CLIENTS)]
    for plan in plans().values():
        whole, *_ = result(plan, values, workers=1)
        parted, *_ = result(plan, values, workers=1, memory_limit=3 * 4 * 500)
        assert all(parted[name].tobytes() == array.tobytes() for name, array in whole.items())


def test_replies_of_a_worker_stay_readable_after_its_next_messages():
    strategy = FederatedStrategy(Told(), plans()["no noise"], seed=1, evaluate_every=0)
    values = [float(client) for client in range(CLIENTS)]

    def data(client):
        examples = Examples(torch.full((3, 6), values[client]), torch.zeros(3, dtype=torch.int64))
        return ClientData(train=examples, test=examples)

    grid = InProcessGrid(
        Told.client_app(Task(model=Net, data=data, device="cpu")), CLIENTS, workers=2
    )
    try:
        strategy.run.progress.begin()
        model = records.to_record(MODEL)
        replies = []
        for number in (1, 2):
            requests = strategy.configure_train(number, model, ArrayRecord(), grid)
            replies.append(list(grid.send_and_receive(requests)))
        for of_round in replies:
            sent = [records.to_arrays(r.content.array_records[records.UPDATE]) for r in of_round]
            assert [float(one["head.bias"][0]) for one in sent] == values
    finally:
        grid.workers.abandon()


def uploaded(metrics=METRICS):
    return Update(MODEL, metrics)


def test_a_reply_that_carries_arrays_is_the_reply_that_carries_records():
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    upload = uploaded()
    ours, flowers = UploadReply(question, upload), reply_to(question, upload.content())
    assert ours.has_content()
    assert not ours.has_error()
    size = payload_bytes([ours])
    facts = {k: v for k, v in vars(flowers.metadata).items() if k not in ("_created_at", "_ttl")}
    assert facts.items() <= vars(ours.metadata).items()
    assert ours.content == flowers.content
    assert size == payload_bytes([ours]) == payload_bytes([flowers])
    read = [read_update(reply, base=MODEL, trust_models=False) for reply in (ours, flowers)]
    for name, array in read[0].arrays.items():
        assert array.tobytes() == read[1].arrays[name].tobytes()
    assert read[0].metrics == read[1].metrics == METRICS


def test_changes_to_a_replys_content_are_read():
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    reply = UploadReply(question, uploaded())
    del reply.content[records.UPDATE]
    with pytest.raises(RefusedReply, match="no array record"):
        read_update(reply, base=MODEL, trust_models=False)
    relabelled = UploadReply(question, uploaded())
    relabelled.metadata.group_id = "4"
    requests = requests_of(question)
    assert list(requests.accepted([relabelled], lambda reply: reply)) == []
    assert "answers round 4" in requests.clients.refusals[0]


@pytest.mark.parametrize(
    "metrics",
    [{"num-examples": 1.5}, {"a": math.nan}, {"a": 1e16}, {"": 1.0}],
    ids=["part of an example", "NaN", "large", "nameless"],
)
def test_metrics_beside_arrays_are_refused_for_the_same_reasons(metrics):
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    upload, reasons = uploaded(metrics), []
    for reply in (UploadReply(question, upload), reply_to(question, upload.content())):
        with pytest.raises(RefusedReply) as refused:
            read_update(reply, base=MODEL, trust_models=False)
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "more": np.zeros(1, np.float32)},
        lambda m: {"head.bias": m["head.bias"]},
        lambda m: {**m, "head.bias": np.zeros(1, np.float32)},
        lambda m: {**m, "head.bias": m["head.bias"].astype(np.float64)},
        lambda m: {**m, "head.bias": np.full_like(m["head.bias"], math.nan)},
        lambda m: {**m, "head.bias": np.full_like(m["head.bias"], 1e16)},
    ],
    ids=["more", "less", "another shape", "another type", "NaN", "huge"],
)
def test_arrays_are_refused_for_the_same_reasons_as_array_records(change):
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    upload, reasons = Update(change(MODEL), METRICS), []
    for reply in (UploadReply(question, upload), reply_to(question, upload.content())):
        with pytest.raises(RefusedReply) as refused:
            read_update(reply, base=MODEL, trust_models=False)
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


def kept(work):
    """Send the trained model, and keep it."""
    trained = yield work.train("local", work.received)
    return LocalResult(model=trained, memory=trained)


class Kept(Told):
    """Averages models that clients keep."""

    client = ClientMethod(
        name="kept", local_update=kept, local_model=lambda work: work.memory or work.received
    )


def test_a_model_that_clients_keep_is_not_the_update_that_they_send():
    plan = NonPrivatePlan(sampling=FixedSizeSampling(CLIENTS, CLIENTS))
    strategy = FederatedStrategy(Kept(), plan, seed=1, evaluate_every=0)
    grid = InProcessGrid(Kept.client_app(task()), CLIENTS)
    run = strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    models = [
        ClientMemory(context, "kept", "").load(before=2) for context in grid.contexts.values()
    ]
    for name, array in records.to_arrays(run.arrays).items():
        mean = np.mean([model[name].numpy() for model in models], axis=0)
        np.testing.assert_allclose(array, mean, atol=1e-6)
        assert len({model[name].numpy().tobytes() for model in models}) == CLIENTS
