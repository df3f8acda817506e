"""Updates that stay rows of arrays are checked, counted and added up as records are."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict

from flower_ext.data import ClientData, Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    FederatedStrategy,
    InProcessGrid,
    LocalResult,
    Method,
    records,
    uploads,
)
from flower_ext.federation._flower_private import become_server_of, reply_to
from flower_ext.federation.state.memory import ClientMemory
from flower_ext.federation.uploads import Rows, UploadReply, payload_bytes
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, ReleasePlan
from flower_ext.privacy.mechanisms.bounds import BoundedSum, sum_clipped
from flower_ext.privacy.mechanisms.updates import Row, Summed, layout_of, total
from flower_ext.training import LocalTraining, Task, clone
from flower_ext.training.params import FlatParams
from tests.support.worlds import Net, task

CLIENTS = 8
MODEL = {name: value.numpy() for name, value in task().initial_params(0).items()}
METRICS = {"num-examples": 3.0, "update-norm": 0.5}


def told(work):
    """Send an update that the client's data name, whatever it is."""
    scale = work.data.train.features[0, 0]
    shapes = work.received.items()
    return LocalResult(update={name: scale * torch.ones_like(value) for name, value in shapes})


@dataclass(frozen=True, kw_only=True)
class Told(Method):
    """Adds up what clients say."""

    client = ClientMethod(
        name="told", local_update=told, local_model=lambda work: work.received, keeps_memory=False
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
        own = Examples(torch.full((3, 6), values[client]), torch.zeros(3, dtype=torch.int64))
        return ClientData(train=own, test=own)

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


@pytest.mark.parametrize("plan", plans().values(), ids=plans())
@pytest.mark.parametrize(
    "odd",
    [{}, {0: math.nan}, {6: math.nan}, {1: 1e20, 7: -math.inf}, {5: 1e4}, dict.fromkeys(range(8))],
    ids=["none", "NaN here", "NaN elsewhere", "huge", "large", "all"],
)
def test_a_sum_and_its_refusals_are_those_of_one_process_however_many_add_it_up(plan, odd):
    values = [0.01 * (client + 1) for client in range(CLIENTS)]
    for client, value in odd.items():
        values[client] = math.nan if value is None else value
    if len(odd) == CLIENTS:
        values[3] = 0.02
    one, why, rows = result(plan, values, workers=1)
    for workers in (2, 3):
        many, reasons, others = result(plan, values, workers=workers)
        assert reasons == why
        assert others == pytest.approx(rows, rel=1e-6)
        for name, array in one.items():
            np.testing.assert_allclose(many[name], array, rtol=1e-5, atol=1e-6)
            by_clients = isinstance(plan, ReleasePlan) and not plan.noised_by_server
            if by_clients:  # their uploads are whole multiples of one grid
                assert many[name].tobytes() == array.tobytes()


def test_a_sum_has_the_same_bits_whatever_part_of_a_cohort_runs_at_a_time():
    values = [0.1 * math.pi**-client for client in range(CLIENTS)]
    for plan in plans().values():
        whole, *_ = result(plan, values, workers=1)
        parted, *_ = result(plan, values, workers=1, memory_limit=3 * 4 * 500)
        assert all(parted[name].tobytes() == array.tobytes() for name, array in whole.items())


def test_what_stays_in_another_process_can_be_read_after_its_next_messages():
    strategy = FederatedStrategy(Told(), plans()["no noise"], seed=1, evaluate_every=0)
    values = [float(client) for client in range(CLIENTS)]

    def data(client):
        own = Examples(torch.full((3, 6), values[client]), torch.zeros(3, dtype=torch.int64))
        return ClientData(train=own, test=own)

    grid = InProcessGrid(
        Told.client_app(Task(model=Net, data=data, device="cpu")), CLIENTS, workers=2
    )
    try:
        strategy.run.progress.begin()
        model = records.to_record(MODEL)
        replies = []
        for number in (1, 2):
            asked = strategy.configure_train(number, model, ArrayRecord(), grid)
            assert asked.plan is strategy.run.mechanism
            replies.append(list(grid.send_and_receive(asked)))
        for of_round in replies:
            sent = [records.to_arrays(r.content.array_records[records.UPDATE]) for r in of_round]
            assert [float(one["head.bias"][0]) for one in sent] == values
    finally:
        grid.workers.abandon()


def taken(update=None, metrics=METRICS):
    like = {name: torch.from_numpy(value) for name, value in MODEL.items()}
    return Rows(like, 1).take(like if update is None else update, metrics)


def test_a_reply_that_carries_a_row_is_the_reply_that_carries_records():
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    upload = taken()
    ours, flowers = UploadReply(question, upload), reply_to(question, upload.content())
    assert ours.has_content()
    assert not ours.has_error()
    size = payload_bytes([ours])
    facts = {k: v for k, v in vars(flowers.metadata).items() if k not in ("_created_at", "_ttl")}
    assert facts.items() <= vars(ours.metadata).items()
    assert ours.content == flowers.content
    assert size == payload_bytes([ours]) == payload_bytes([flowers])
    read = [records.read_update(reply, base=MODEL, trust_models=False) for reply in (ours, flowers)]
    for name, array in read[0].arrays.items():
        assert array.tobytes() == read[1].arrays[name].tobytes()
    assert read[0].metrics == read[1].metrics == METRICS


def test_what_somebody_changes_in_a_reply_is_what_is_read_of_it():
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    reply = UploadReply(question, taken())
    del reply.content[records.UPDATE]
    with pytest.raises(records.RefusedReply, match="no array record"):
        records.read_update(reply, base=MODEL, trust_models=False)
    relabelled = UploadReply(question, taken())
    relabelled.metadata.group_id = "4"
    heard = records.accept(
        [relabelled],
        asked={0: 7},
        server_round=3,
        read=lambda reply: reply,
        refuse=(reasons := []).append,
        questions={7: question},
    )
    assert list(heard) == []
    assert "answers round 4" in reasons[0]


@pytest.mark.parametrize(
    "metrics",
    [{"num-examples": 1.5}, {"a": math.nan}, {"a": 1e16}, {"": 1.0}],
    ids=["part of an example", "NaN", "large", "nameless"],
)
def test_metrics_beside_a_row_are_refused_as_those_of_records(metrics):
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train.a", group_id="3")
    upload, said = taken(metrics=metrics), []
    for reply in (UploadReply(question, upload), reply_to(question, upload.content())):
        with pytest.raises(records.RefusedReply) as refused:
            records.read_update(reply, base=MODEL, trust_models=False)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "more": torch.zeros(1)},
        lambda m: {"head.bias": m["head.bias"]},
        lambda m: {**m, "head.bias": torch.zeros(1)},
        lambda m: {**m, "head.bias": m["head.bias"].double()},
        lambda m: {**m, "head.bias": m["head.bias"].clone().requires_grad_()},
    ],
    ids=["more", "less", "another shape", "another type", "a gradient"],
)
def test_an_update_that_is_not_as_the_model_stays_records(change):
    assert taken(change({name: torch.from_numpy(value) for name, value in MODEL.items()})) is None


def test_rows_that_fill_more_than_a_block_stay_apart(monkeypatch):
    monkeypatch.setattr(uploads, "_BLOCK", 2 * 4 * sum(array.size for array in MODEL.values()) + 1)
    rows = Rows({name: torch.from_numpy(value) for name, value in MODEL.items()}, 5)
    sent = [{n: torch.full(a.shape, float(k)) for n, a in MODEL.items()} for k in range(5)]
    taken = [rows.take(update, METRICS) for update in sent]
    for number, upload in enumerate(taken):
        assert all((array == number).all() for array in upload.arrays.values())


def trained_apart_from(received):
    """A trained model in one tensor, as compiled training returns it."""
    numbers = torch.cat([value.flatten() for value in received.values()])
    moved = numbers + torch.randn(len(numbers), generator=torch.Generator().manual_seed(0))
    return FlatParams(moved, layout_of(received))


@pytest.mark.parametrize("spare", [True, False], ids=["spare", "still read"])
def test_a_difference_takes_the_place_of_a_model_that_nobody_reads_any_more(spare):
    received = {name: torch.from_numpy(value) for name, value in MODEL.items()}
    model = trained_apart_from(received)
    before = clone(model)
    rows = Rows(received, 2)
    upload = rows.take(rows.difference(model, received, spare=spare), {})
    for name, array in upload.arrays.items():
        assert array.tobytes() == (before[name] - received[name]).numpy().tobytes()
        assert np.shares_memory(array, model[name].numpy()) == spare
        assert torch.equal(model[name], before[name]) != spare
        assert torch.equal(received[name], torch.from_numpy(MODEL[name]))


def test_a_tensor_that_a_method_puts_into_a_trained_model_is_what_leaves():
    received = {name: torch.from_numpy(value) for name, value in MODEL.items()}
    model = trained_apart_from(received)
    model["head.bias"] = received["head.bias"] + 2.0
    rows = Rows(received, 1)
    upload = rows.take(rows.difference(model, received, spare=True), {})
    np.testing.assert_allclose(upload.arrays["head.bias"], 2.0, rtol=1e-6)
    assert torch.equal(model["head.bias"], received["head.bias"] + 2.0)


@pytest.mark.parametrize("spare", [True, False], ids=["spare", "still read"])
def test_a_model_is_compared_with_what_its_own_client_received(spare):
    received = {name: torch.from_numpy(value) for name, value in MODEL.items()}
    model, rows = trained_apart_from(received), Rows(received, 2)
    other = {name: value + 1.0 for name, value in received.items()}
    expected = {name: model[name] - other[name] for name in other}
    upload = rows.take(rows.difference(model, other, spare=spare), {})
    for name, array in upload.arrays.items():
        assert array.tobytes() == expected[name].numpy().tobytes()
    less = {"head.bias": received["head.bias"]}
    with pytest.raises(InvalidValue, match=r"'extractor.bias'.*not in the received part"):
        rows.difference(model, less, spare=spare)


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


def test_sums_of_some_updates_count_as_all_of_them_and_keep_to_the_bound():
    rng = np.random.default_rng(0)
    like = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.float32)}
    layout = layout_of(like)
    rows = [Row(rng.standard_normal(7).astype(np.float32), layout) for _ in range(5)]
    plain = [dict(row) for row in rows]
    value, count = total(plain, like=like)
    assert total(rows, like=like)[0]["a"].tobytes() == value["a"].tobytes()
    part = Summed(value=total(rows[:2], like=like)[0], count=2)
    again, number = total([part, *rows[2:]], like=like)
    assert count == number == 5
    np.testing.assert_allclose(again["a"], value["a"], rtol=1e-12)
    clipped = sum_clipped(plain, 1.0, like=like)
    half = sum_clipped(rows[:2], 1.0, like=like)
    whole = sum_clipped([half, *rows[2:]], 1.0, like=like)
    assert (whole.count, whole.bound) == (5, 1.0)
    np.testing.assert_allclose(whole.value["a"], clipped.value["a"], rtol=1e-12)
    with pytest.raises(ValueError, match=r"bound=2.0: expected <= 1.0"):
        sum_clipped([BoundedSum(value=half.value, count=2, bound=2.0)], 1.0, like=like)
    with pytest.raises(TypeError, match="Summed"):
        sum_clipped([part], 1.0, like=like)  # nothing says how far one unit moves it
    assert pickle.loads(pickle.dumps(rows[0]))["a"].tobytes() == rows[0]["a"].tobytes()
