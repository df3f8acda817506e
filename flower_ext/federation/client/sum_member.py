"""A client's part of a secure sum: it agrees on keys, masks its upload, and helps to unmask a sum.

The client stores its secrets in its `ClientVault` before a reply leaves. A process that is killed
and started again therefore never answers twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.state.memory import ClientVault
from flower_ext.secure.aggregation import Delivery, Keys, Member, Question, RoundContext

CONTEXT, INDEX = "context", "index"
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
        vault, here = _vault(context, method), _round(asked)
        if BEGIN in asked:
            member = _new(vault, here, int(asked[INDEX]))
            told = member.advertise().to_bytes()
        else:
            member = _stored(vault, here)
            if KEYS in asked:
                told = member.share(Keys.from_bytes(asked[KEYS].tobytes(), here)).to_bytes()
            elif QUESTION in asked:
                question = Question.from_bytes(asked[QUESTION].tobytes(), here)
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
        told = {name: np.asarray(array) for name, array in asked.items()}
        vault, here = _vault(context, method), _round(told)
        member = _stored(vault, here)
        vector = np.concatenate([cells[name].reshape(-1) for name in sorted(cells)])
        delivery = Delivery.from_bytes(told[DELIVERY].tobytes(), here)
        upload = member.mask(delivery, vector.astype(here.dtype)).to_bytes()
        vault.store(member.to_bytes())
    return _sent(upload)


def _vault(context: Context, method: str) -> ClientVault:
    return ClientVault(context, f"{method}-sum")


def _round(asked: Mapping[str, np.ndarray]) -> RoundContext:
    if CONTEXT not in asked:
        raise InvalidValue(f"the server's message has no {CONTEXT!r}: expected the round's context")
    return RoundContext.from_bytes(asked[CONTEXT].tobytes())


def _new(vault: ClientVault, here: RoundContext, index: int) -> Member:
    if (stored := vault.load()) is not None and _is_of(stored, here):
        raise ProtocolError(
            f"round {here.round_number}: this client has begun it before; expected a new round"
        )
    return Member(here, index)


def _is_of(stored: bytes, here: RoundContext) -> bool:
    try:
        Member.from_bytes(stored, here)
    except InvalidValue:
        return False
    return True


def _stored(vault: ClientVault, here: RoundContext) -> Member:
    if (stored := vault.load()) is None:
        raise ProtocolError(
            f"round {here.round_number}: this client has not begun it; if the SuperNode was "
            "restarted, name a state-folder in its node config"
        )
    return Member.from_bytes(stored, here)


def _sent(data: bytes) -> Any:
    return records.to_record({SENT: records.to_bytes_array(data)})
