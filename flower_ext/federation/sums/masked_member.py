"""A client's end of a masked sum: its answers to the server, and its masked contribution.

`masked` has the server's end and a table of all messages. A client stores its secrets in its
`ClientVault` before a reply leaves. If another process has stored secrets since this process read
them, the vault raises an error, and no reply leaves. A client therefore never answers a message
twice, even if its process is restarted or a second process runs at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flwr.app import Context, Message, RecordDict

from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.records import Arrays, bytes_record, flattened, single_message
from flower_ext.federation.state.memory import OF_MASKED_SUM, ClientVault
from flower_ext.federation.sums.masked import BEGIN, DELIVERY, KEYS, SENT, UNMASK
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.secure.aggregation.aggregation_messages import Delivery, Keys, UnmaskRequest
from flower_ext.secure.aggregation.context import Invitation, RoundContext
from flower_ext.secure.aggregation.identities import Identities
from flower_ext.secure.aggregation.member import Member
from flower_ext.secure.messages import ProtocolMessage


def check_limits(context: RoundContext, node_config: Mapping[str, Any]) -> None:
    """Refuse, by a PermissionError, a sum that shows the server more than the node's owner permits.

    =============================  ===========================================================
    node config                    meaning
    =============================  ===========================================================
    ``least-sum-members``          least number of members whose vectors are in a sum
    ``least-sum-threshold-share``  least share of a member's neighbours that must help to
                                   unmask this member's vector
    ``sum-colluders``              number of other members that may collude with the server
    ``least-honest-answers``       least number of members that do not collude, this one
                                   included, in every sum that the server may unmask
                                   (`SumParameters.honest_answers`)
    =============================  ===========================================================
    """
    least_members = int(node_config.get("least-sum-members", 0))
    least_share = float(node_config.get("least-sum-threshold-share", 0.0))
    colluders = int(node_config.get("sum-colluders", 0))
    least_honest = int(node_config.get("least-honest-answers", 0))
    if context.least_answers < least_members:
        raise PermissionError(
            f"the server could unmask a sum of only {context.least_answers} members: the owner of "
            f"this node requires least-sum-members={least_members}"
        )
    if context.threshold < least_share * context.num_neighbors:
        raise PermissionError(
            f"{context.threshold} of {context.num_neighbors} neighbours may together unmask this "
            "client's vector: the owner of this node requires "
            f"least-sum-threshold-share={least_share:g}"
        )
    if least_honest > (honest := _honest_answers(context, colluders)):
        raise PermissionError(
            f"the server could unmask a sum of only {honest} honest members: the owner of this "
            f"node requires least-honest-answers={least_honest} with sum-colluders={colluders}"
        )


def identities_of(node_config: Mapping[str, Any]) -> Identities | None:
    """Return the node's signing key and the public keys of the members that its owner trusts.

    The node then takes part in signed sums only. Return None if the node config names no keys: the
    node then takes part in unsigned sums only.
    """
    key, members = (node_config.get(name) for name in ("sum-identity-key", "sum-members"))
    if (key is None) != (members is None):
        raise InvalidValue.tellable(
            "node config: expected both sum-identity-key and sum-members, or neither of them"
        )
    return None if key is None else Identities.read(str(key), str(members))


def _honest_answers(context: RoundContext, colluders: int) -> int:
    """Return the least number of honest members in a sum that the server can unmask.

    Return 0 if the server and ``colluders`` members could unmask a single member's vector.
    """
    if 2 * context.threshold <= context.num_neighbors + colluders:
        return 0
    return replace(context, colluders=colluders).honest_answers


def answer(message: Message, context: Context, method: str) -> Message:
    """Answer a message of the stage ``begin``, ``keys`` or ``question``; `masked` explains them."""
    # Read files outside the block below, because the server must not see an error in reading them.
    identities = identities_of(context.node_config)
    with knowing_no_data():
        content = records.to_arrays(message.content.array_records[records.SECURE_SUM])
        stage, data = single_message(content, BEGIN, KEYS, UNMASK)
        vault = _vault(context, method)
        member = _invited(vault, data) if stage == BEGIN else _stored(vault)
        reply: ProtocolMessage
        if stage == BEGIN:
            check_limits(member.context, context.node_config)
            reply = member.advertise(identities=identities)
        elif stage == KEYS:
            reply = member.share(Keys.from_bytes(data, member.context), identities=identities)
        else:
            reply = member.unmask(UnmaskRequest.from_bytes(data, member.context))
        vault.store(member.to_bytes())
    return Message(
        RecordDict({records.ANSWER: bytes_record(SENT, reply.to_bytes())}), reply_to=message
    )


def seal(
    update: NamedArrays,
    protection: Protection,
    sum_messages: Mapping[str, Arrays],
    context: Context,
    method: str,
) -> Arrays:
    """Return a protected update as it leaves the client: masked, if the server asks for masks.

    If the protection has a ``cell``, the update holds int64 integers, in steps of the plan's grid.
    The client then sends these integers modulo a power of two, in the order of the arrays' names.
    ``sum_messages`` has the arrays of the server's training message that concern sums, by their
    records' names. This function does not encrypt the client's part of a weighted sum: `HiddenSum`
    does so when it adds the noise.
    """
    arrays = records.arrays_of(update)
    if protection.cell is None:
        return arrays
    # The code below masks the update, so that the server sees only the sum of the cohort.
    message = sum_messages[records.SECURE_SUM]
    with knowing_no_data():
        vault = _vault(context, method)
        member = _stored(vault)
        vector = flattened(arrays)
        _, data = single_message(message, DELIVERY)
        delivery = Delivery.from_bytes(data, member.context)
        upload = member.mask(delivery, vector.astype(member.context.dtype))
        vault.store(member.to_bytes())
    return {SENT: records.to_bytes_array(upload.to_bytes())}


def _vault(context: Context, method: str) -> ClientVault:
    return ClientVault(context, method + OF_MASKED_SUM)


def _invited(vault: ClientVault, data: bytes) -> Member:
    invitation = Invitation.from_bytes(data)
    if (stored := vault.load()) is not None:
        with suppress(InvalidValue):  # secrets that cannot be read belong to no round
            if Member.from_bytes(stored).context == invitation.context:
                raise ProtocolError(
                    f"the server begins round {invitation.context.round_number}, which this client "
                    "has already begun: expected a new round"
                )
    return Member(invitation=invitation)


def _stored(vault: ClientVault) -> Member:
    if (stored := vault.load()) is None:
        raise ProtocolError(
            "this client has no keys of the round, because it got no invitation, or the SuperNode "
            "was restarted and lost them; to keep keys, name a state-folder in its node config"
        )
    return Member.from_bytes(stored)
