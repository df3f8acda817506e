"""Arrays and metrics in messages are read exactly, or refused with the reason."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation import RefusedReply
from flower_ext.federation.messages import records
from flower_ext.federation.messages.model_checks import shared_arrays
from flower_ext.federation.messages.records import UnsentArray, bytes_record, single_message
from flower_ext.federation.messages.replies import read_metrics, read_update
from flower_ext.federation.messages.upload_reply import Update, payload_bytes
from flower_ext.training import LocalTraining, UnshareableModel
from tests.support.replies import reply, requests_of, training_message

BASE = {"w": np.ones((2, 3), np.float32), "b": np.array(0.5, np.float32)}


def update(**changes: np.ndarray) -> RecordDict:
    arrays = {"w": np.full((2, 3), 0.1, np.float32), "b": np.array(0.2, np.float32)} | changes
    return RecordDict({"update": ArrayRecord({n: Array(a) for n, a in arrays.items()})})


def read(content: RecordDict | Error, *, trust_models: bool = False) -> Update:
    return read_update(reply(content), base=BASE, trust_models=trust_models)


def test_tensors_survive_the_wire_bit_for_bit():
    params = {"a": torch.randn(3, 2), "b": torch.tensor(1.5), "c": torch.randn(0, 4)}
    back = records.to_params(records.to_record(params))
    torch.testing.assert_close(back, params, rtol=0, atol=0)
    assert list(back) == list(params)


def test_a_well_formed_update_is_read():
    np.testing.assert_array_equal(read(update()).arrays["b"], np.float32(0.2))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (Error(code=7, reason="invalid app"), "client failed: invalid app"),
        (
            Error(code=2, reason="record 17 of Mrs Smith"),
            "client failed; the reason is in its own log",
        ),
        (RecordDict(), "no array record 'update'"),
        (update(extra=np.zeros(1, np.float32)), "unexpected \\['extra'\\]"),
        (update(w=np.zeros((3, 2), np.float32)), "expected shape \\(2, 3\\)"),
        (update(w=np.zeros((2, 3), np.float64)), "type float64"),
        (update(b=np.array(np.nan, np.float32)), "NaN or infinite"),
        (update(b=np.array(-np.inf, np.float32)), "NaN or infinite"),
    ],
)
def test_malformed_updates_are_refused_with_the_reason(content, reason):
    with pytest.raises(RefusedReply, match=reason):
        read(content)


def test_an_array_whose_bytes_differ_from_its_header_is_refused():
    content = update()
    honest = content.array_records["update"]["w"]
    short = Array(np.zeros(2, np.float32))
    for data in (b"", b"garbage", short.data):
        forged = Array(dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=data)
        record = ArrayRecord({"w": forged, "b": content.array_records["update"]["b"]})
        with pytest.raises(RefusedReply, match="cannot be read|other data"):
            read(RecordDict({"update": record}))


def test_a_pickled_object_is_refused_not_executed():
    import io
    import pickle

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("executed",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    assert pickle  # the payload is one
    honest = update().array_records["update"]["w"]
    forged = Array(
        dtype=honest.dtype, shape=honest.shape, stype=honest.stype, data=buffer.getvalue()
    )
    content = RecordDict(
        {"update": ArrayRecord({"w": forged, "b": update().array_records["update"]["b"]})}
    )
    with pytest.raises(RefusedReply, match="cannot be read"):
        read(content)


def test_whole_models_are_read_as_differences_only_where_the_server_bounds():
    model = RecordDict({"arrays": update().array_records["update"]})
    with pytest.raises(RefusedReply, match="no array record 'update'"):
        read(model)
    got = read(model, trust_models=True).arrays
    np.testing.assert_allclose(got["w"], 0.1 - BASE["w"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metrics_that_are_not_finite_numbers_are_refused(value):
    content = RecordDict({"metrics": MetricRecord({"accuracy": value})})
    with pytest.raises(RefusedReply, match="expected a finite number"):
        read_metrics(reply(content))


def test_lists_of_numbers_are_left_out_of_metrics():
    """Flower's strategies average them; a reply is not lost for them."""
    metrics = MetricRecord({"losses": [1.0, float("nan")], "accuracy": 0.5})
    assert read_metrics(reply(RecordDict({"metrics": metrics}))) == {"accuracy": 0.5}


def test_a_number_of_examples_is_no_list():
    with pytest.raises(RefusedReply, match="num-examples.*expected a finite number"):
        read_metrics(reply(RecordDict({"metrics": MetricRecord({"num-examples": [3]})})))


@pytest.mark.parametrize("name", ["bn.running_mean", "bn.num_batches_tracked"])
def test_running_statistics_may_not_be_shared(name):
    with pytest.raises(UnshareableModel, match="GroupNorm in layer 'bn'"):
        shared_arrays(ArrayRecord({name: Array(np.zeros(2, np.float32))}))


def test_half_precision_may_not_be_shared_beside_other_types_either():
    kinds = {"wide": np.float64, "single": np.float32, "half": np.float16}
    model = ArrayRecord({name: Array(np.zeros(2, kind)) for name, kind in kinds.items()})
    with pytest.raises(UnshareableModel, match="'half' has dtype float16.*float32 or float64"):
        shared_arrays(model)
    del model["half"]
    assert list(shared_arrays(model)) == ["wide", "single"]


def test_integer_arrays_may_not_be_shared():
    with pytest.raises(UnshareableModel, match="'count' has dtype int64"):
        shared_arrays(ArrayRecord({"count": Array(np.zeros(2, np.int64))}))


def test_training_settings_survive_the_wire():
    trainings = {"head": LocalTraining(steps=3), "extractor": LocalTraining(sam_radius=0.1)}
    assert (
        records.read_trainings(RecordDict(dict(records.training_records(trainings)))) == trainings
    )


def test_payload_counts_array_bytes():
    one, other = reply(update()), reply(update())
    expected = sum(len(a.data) for a in one.content.array_records["update"].values())
    assert payload_bytes([one, other, one]) == 3 * expected > 3 * 7 * 4


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 5), (64, 32, 5, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_an_unsent_array_is_counted_and_serialised_like_flowers_arrays(shape, dtype):
    values = np.ones(shape, dtype=dtype)
    unsent, sent = UnsentArray(values), Array(values)
    assert unsent.data == sent.data
    assert (unsent.deflate(), unsent.object_id) == (sent.deflate(), sent.object_id)
    assert set(unsent.children) == set(sent.children)
    assert (unsent.dtype, unsent.shape, unsent.stype) == (sent.dtype, sent.shape, sent.stype)
    record = ArrayRecord()
    record["a"] = unsent
    message = reply(update())
    message.content = RecordDict({"update": record})
    assert payload_bytes([message]) == len(sent.data)
    unsent.numpy()[...] = 2  # a receiver's changes to its copy do not reach the original
    assert np.array_equal(unsent.numpy(), values)


def test_bytes_travel_as_an_array_of_one_name_only():
    sent = records.to_arrays(bytes_record("key", b"\0\x01\xff"))
    assert single_message(sent, "seed", "key") == ("key", b"\0\x01\xff")
    for wrong in ({}, {"seed": sent["key"]}, {**sent, "seed": sent["key"]}):
        with pytest.raises(InvalidValue, match=r"bytes \(uint8\) with a name in \('key',\)"):
            single_message(wrong, "key")
    for wrong, named in (
        (np.zeros(3, np.int8), r"int8\(3,\)"),
        (sent["key"][None], r"uint8\(1, 3\)"),
    ):
        with pytest.raises(InvalidValue, match=f"{{'key': '{named}'}}"):
            single_message({"key": wrong}, "key")


@pytest.mark.parametrize(
    "error", [OverflowError, MemoryError, RecursionError, IndexError, KeyError]
)
def test_whatever_error_a_reply_provokes_refuses_that_reply_alone(error):
    requests = requests_of(training_message(1), training_message(2))
    replies = [Message(update(), reply_to=message) for message in requests.messages]

    def read(one):
        if one.metadata.src_node_id == 1:
            raise error("of its bytes")
        return "read"

    assert list(requests.accepted(replies, read)) == [(1, "read")]
    (reason,) = requests.clients.refusals
    assert f"node 1: the reply cannot be read: {error.__name__}" in reason
