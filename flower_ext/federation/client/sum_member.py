"""A client's part of a secure sum: it agrees on keys, masks its upload, and helps to unmask a sum.

The client stores its secrets in its `ClientVault` before a reply leaves, and the vault refuses to
store if another process did so meanwhile. A client therefore never answers twice, whether its
process is killed and started again or runs a second time beside the first.

The first message of a round has its `RoundContext` and this client's neighbours. Every later one
begins with the digest of the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.state.memory import ClientVault
from flower_ext.secure.aggregation import Delivery, Keys, Member, RoundContext, UnmaskRequest

INDEX, NEIGHBOURS = "index", "neighbours"
BEGIN, KEYS, DELIVERY, QUESTION = "begin", "keys", "delivery", "question"
SENT = "message"
"""Names of the arrays in the record `records.SECURE_SUM`, and of the one in an answer."""


def answer(message: Message, context: Context, method: str) -> Message:
    """Answer a stage other than the training: advertise keys, share secrets, or help to unmask.

    Raises
    ------
    ProtocolError, InvalidValue
        The server's message is malformed or out of order.
    """
    with knowing_no_data():
        asked = records.to_arrays(message.content.array_records[records.SECURE_SUM])
        vault = _vault(context, method)
        if BEGIN in asked:
            member = _new(vault, asked)
            told = member.advertise().to_bytes()
        else:
            member = _stored(vault)
            if KEYS in asked:
                keys = Keys.from_bytes(_bytes(asked, KEYS), member.context)
                told = member.share(keys).to_bytes()
            elif QUESTION in asked:
                question = UnmaskRequest.from_bytes(_bytes(asked, QUESTION), member.context)
                told = member.unmask(question).to_bytes()
            else:
                raise ProtocolError(
                    f"stage {sorted(asked)}: expected {BEGIN}, {KEYS} or {QUESTION}"
                )
        vault.store(member.to_bytes())
    return Message(RecordDict({records.ANSWER: _sent(told)}), reply_to=message)


def masked(
    cells: Mapping[str, np.ndarray], asked: Mapping[str, Any], context: Context, method: str
) -> Any:
    """Return the record of a masked upload.

    Parameters
    ----------
    cells : Mapping[str, ndarray]
        The noised update as int64. It is sent modulo a power of two, in the order of its names.
    asked : Mapping[str, array]
        The record of the secure sum in the server's training message.

    Raises
    ------
    ProtocolError, InvalidValue
        The server's message is malformed or out of order, or this upload was masked before.
    """
    with knowing_no_data():
        vault = _vault(context, method)
        member = _stored(vault)
        vector = np.concatenate([cells[name].reshape(-1) for name in sorted(cells)])
        delivery = Delivery.from_bytes(_bytes(asked, DELIVERY), member.context)
        upload = member.mask(delivery, vector.astype(member.context.dtype)).to_bytes()
        vault.store(member.to_bytes())
    return _sent(upload)


def _vault(context: Context, method: str) -> ClientVault:
    return ClientVault(context, f"{method}-sum")


def _bytes(asked: Mapping[str, Any], name: str) -> bytes:
    array = np.asarray(_array(asked, name))
    if array.dtype != np.uint8:
        raise InvalidValue(f"{name!r} in the server's message is {array.dtype}: expected bytes")
    return array.tobytes()


def _array(asked: Mapping[str, Any], name: str) -> Any:
    if name not in asked:
        raise InvalidValue(f"the server's message has no {name!r}: expected one")
    return asked[name]


def _new(vault: ClientVault, asked: Mapping[str, Any]) -> Member:
    begun = RoundContext.from_bytes(_bytes(asked, BEGIN))
    if (stored := vault.load()) is not None and _is_of(stored, begun):
        raise ProtocolError(
            f"round {begun.round_number}: this client has begun it before; expected a new round"
        )
    neighbours = np.asarray(_array(asked, NEIGHBOURS))
    return Member(begun, int(_array(asked, INDEX)), [int(other) for other in neighbours])


def _is_of(stored: bytes, begun: RoundContext) -> bool:
    try:
        return Member.from_bytes(stored).context == begun
    except InvalidValue:
        return False


def _stored(vault: ClientVault) -> Member:
    if (stored := vault.load()) is None:
        raise ProtocolError(
            "this client has begun no round; if the SuperNode was restarted, name a state-folder "
            "in its node config"
        )
    return Member.from_bytes(stored)


def _sent(data: bytes) -> Any:
    return records.to_record({SENT: records.to_bytes_array(data)})
