"""A sum's two ends: how an update leaves a client, and a sum of one's own in whole runs."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.federation import ClientSum, FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.federation.client.requests import sum_of
from flower_ext.federation.messages import records
from flower_ext.federation.messages.records import to_bytes_array
from flower_ext.federation.messages.replies import read_answer
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.sums.masked import MASKED_SUM, MaskedMember
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.federation.sums.summation import SumMessage
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, Protection
from tests.support.protected_updates import CLIENTS, initial, private_plan, task

CELLS = ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16)
CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def test_in_a_plain_sum_an_update_leaves_as_it_is():
    update = {"w": torch.tensor([1.5, -2.0]), "b": np.float32(0.5)}
    sealed = ClientSum(SumMessage(), CONTEXT, "m").seal(update, Protection())
    assert {name: array.tolist() for name, array in sealed.items()} == {"w": [1.5, -2.0], "b": 0.5}
    assert all(type(array) is np.ndarray for array in sealed.values())


@pytest.mark.parametrize(
    ("end", "protection", "error"),
    [
        (ClientSum, CELLS, "a share of a sum's noise without a secure sum"),
        (MaskedMember, CELLS, "this client has no keys of the round"),
        (MaskedMember, Protection(), "expected ClipAndNoise with a cell"),
    ],
)
def test_a_share_of_the_noise_leaves_masked_or_not_at_all(end, protection, error):
    update = {"w": np.ones(2, dtype=np.int64)}
    with pytest.raises((InvalidValue, ProtocolError), match=error):
        end(SumMessage(), CONTEXT, "m").seal(update, protection)


def test_a_message_for_several_sums_or_an_unknown_one_is_refused():
    known = {MASKED_SUM: MaskedMember}
    record = records.bytes_record("begin", b"1")
    other = records.SUM + "other"
    assert sum_of(RecordDict({MASKED_SUM: record}), known)[0] is MaskedMember
    assert sum_of(RecordDict(), known) == (ClientSum, SumMessage())
    for names in ([other], [MASKED_SUM, other]):
        with pytest.raises(InvalidValue, match=r"client_app\(sums=…\)"):
            sum_of(RecordDict(dict.fromkeys(names, record)), known)


class Replacing(ClientSum):
    """A client's end with the name of the masked sum's."""

    name = MASKED_SUM


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ClientSum, r"name='' of a ClientSum: expected 'sum\.', then a word"),
        (Replacing, "of Replacing: expected a name that MaskedMember does not have"),
        (PlainSum, "PlainSum'>: expected a subclass of ClientSum"),
        (MaskedMember(SumMessage(), CONTEXT, "m"), "expected a subclass of ClientSum"),
    ],
)
def test_each_sum_has_its_name_in_messages(end, error):
    with pytest.raises(InvalidValue, match=error):
        DPFedAvg.client_app(task(), sums=[end])


FLIPPED_SUM = records.SUM + "flipped"


class FlippedClient(ClientSum):
    """A client's end that changes the signs that the server names."""

    name = FLIPPED_SUM

    def seal(self, update, protection):
        _, sign = self.message.of("sign")
        flipped = {n: -a if sign == b"-" else a for n, a in records.arrays_of(update).items()}
        return {**flipped, "sign": to_bytes_array(sign)}


class FlippedSum(PlainSum):
    """A plain sum in which every other contribution arrives with its signs changed."""

    def open(self, opening):
        plain = super().open(opening)
        read_plain = plain.read

        def request(partition):
            return {FLIPPED_SUM: records.bytes_record("sign", b"-" if partition % 2 else b"+")}

        def read(reply):
            arrays = dict(read_answer(reply, records.UPDATE))
            sign = arrays.pop("sign").tobytes()
            arrays = {n: -a if sign == b"-" else a for n, a in arrays.items()}
            reply.content = Update(arrays, {}).content()
            return read_plain(reply)

        plain.request, plain.read = request, read
        return plain


def model_after(sums, **options):
    app = DPFedAvg.client_app(task(), allow_seeded_noise=True, sums=sums)
    strategy = FederatedStrategy(
        DPFedAvg(), private_plan(), seed=1, seeded_noise=True, evaluate_every=0, **options
    )
    result = strategy.start(InProcessGrid(app, CLIENTS), initial(), num_rounds=2)
    return records.to_arrays(result.arrays)


def test_both_ends_of_a_sum_are_exchangeable():
    expected = model_after([])
    model = model_after([FlippedClient], sum=FlippedSum)
    assert not np.array_equal(expected["weight"], records.to_arrays(initial())["weight"])
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)


class TextClient(FlippedClient):
    """A faulty end, which sends no arrays."""

    def seal(self, update, protection):
        return {"weight": "text"}


def test_an_upload_without_arrays_is_refused():
    with pytest.raises(FederationNotReady, match="no client ever sent a usable reply"):
        model_after([TextClient], sum=FlippedSum)


def test_a_client_without_its_end_of_a_sum_says_what_to_change():
    with pytest.raises(FederationNotReady, match=r"client_app\(sums=…\)"):
        model_after([], sum=FlippedSum)
