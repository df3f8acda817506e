"""A Flower mod with client-level privacy for ClientApps that do not use this package.

Put the mod first in the list, so that no other mod changes an upload after it::

    app = ClientApp(mods=[client_level_dp_mod()])

With the mod, a plain Flower ClientApp can take part in `DPFedAvg` under a `ReleasePlan` whose
clients add the noise. The server's message says how to clip and how much noise to add. The mod
applies the same `Protection` as the client side of this package. Under a plan with a `SecureSum`,
the mod also masks the noised update, so that the server sees only the sum of a cohort.

==============================  ==================================================================
the ClientApp returns           what leaves the client
==============================  ==================================================================
floating-point arrays           the clipped update with noise
integer and boolean arrays      the values that the client received: such arrays count batches or
                                examples, and Gaussian noise does not protect whole numbers
                                (`DPFedAvg` refuses a model with such arrays before round 1)
arrays in half precision        an error, because noise does not add up in half precision
arrays that were not received   nothing
metrics, other records          nothing: the guarantee does not cover them
an error, a missing array, NaN  an update of zeros with noise, as from a client that has learned
                                nothing; the node's own log has the reason
==============================  ==================================================================

In the last case an error reply would reveal something about a record, because a record may have
caused the error. The server therefore cannot see that a ClientApp fails during a run. If the model
does not improve, read the nodes' logs.

Before the first round the server rehearses: it asks up to three clients in turn, until one can
train. In a rehearsal the mod sends an update of zeros if training succeeded, and an error if it
failed. The guarantee does not cover this answer. A node with ``require-secure-sum=true``, or with a
``least-noise-multiplier`` above 0, does not train in a rehearsal, and always reports success.
"""

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation._flower_private import message_like
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.federation.client.hidden_errors import failed, log_hidden
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import ClientRequest, sum_of
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import check_addressee, identity
from flower_ext.federation.messages.for_mods import (
    FOR_MODS,
    asks_identity,
    entries_for_mods,
    is_rehearsal,
)
from flower_ext.federation.messages.model_checks import refuse_half_precision
from flower_ext.federation.messages.replies import moved_by
from flower_ext.federation.messages.round_entries import KIND, RoundEntries
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.sums.masked import MaskedMember
from flower_ext.federation.sums.summation import ClientSum
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByServer
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.training.isolation import isolated

_NAME = "client-level-mod"
"""Name under which the mod stores the secrets of a masked sum."""


def client_level_dp_mod(*, allow_seeded_noise: bool = False) -> Mod:
    """Return a mod that clips and noises the uploads of a ClientApp.

    The mod protects training messages. It passes all other messages, and their replies, through
    unchanged, but refuses them if the node's owner requires secure sums. It also passes a training
    message through if the plan lets the server add the noise and the node's owner allows that
    (``least-noise-multiplier``, see `NodePolicy`). It refuses a training message that asks for no
    protection, such as a message of one of Flower's own strategies.

    Parameters
    ----------
    allow_seeded_noise : bool
        True if the server may ask for reproducible noise. Use it in simulation only, because
        anybody who knows the seed can remove the noise.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            reply = _reply(message, NodePolicy(context, allow_seeded_noise), call_next)
        except Exception as error:
            return failed(mod, message, context, error)
        return call_next(message, context) if reply is None else reply

    return mod


def _reply(message: Message, policy: NodePolicy, call_next: ClientAppCallable) -> Message | None:
    """Return the mod's reply to a message; None if the message passes through."""
    if message.metadata.message_type.partition(".")[0] != "train":
        policy.require_secure_sum("an answer of this ClientApp", in_sum=False)
        return None
    if asks_identity(message):
        return Message(identity(policy.context.node_config), reply_to=message)
    if is_rehearsal(message):
        return _rehearsal_reply(message, policy.context, call_next)
    with knowing_no_data():
        sum_type, sum_message = sum_of(message.content, {MaskedMember.name: MaskedMember})
        client_sum = sum_type(sum_message, policy.context, _NAME)
        if client_sum.name and records.MODEL not in message.content:
            return _answer_for_sum(message, client_sum)
    return _protected_reply(message, policy, call_next, client_sum)


def _rehearsal_reply(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return an update of zeros; raise the error of a training that failed.

    A rehearsal adds no noise, so its outcome reveals something about the client's data. If the
    node's owner requires secure sums or a least noise, the ClientApp does not train.
    """
    with isolated():
        received = records.to_arrays(message.content.array_records[records.MODEL])
        limits = context.node_config
        least_noise = float(limits.get("least-noise-multiplier", 0.0))
        if least_noise == 0 and not limits.get("require-secure-sum"):
            l2_norm(_update(call_next(_without_entries(message), context), received))
    return Message(Update(_zeros(received), {}).content(), reply_to=message)


def _answer_for_sum(message: Message, client_sum: ClientSum) -> Message:
    """Answer a message of a masked sum's protocol, which asks for no training."""
    check_addressee(message, client_sum.context)
    answer = client_sum.answer(lambda: NO_DATA, may_simulate=False)
    record = records.bytes_record(client_sum.message.step, answer)
    return Message(RecordDict({records.ANSWER: record}), reply_to=message)


def _protected_reply(
    message: Message, policy: NodePolicy, call_next: ClientAppCallable, client_sum: ClientSum
) -> Message | None:
    """Train, and return the protected update; None if the server adds the noise."""
    with knowing_no_data():
        of_round, noise = _requested(message, policy, type(client_sum))
        protection = of_round.protection
        client_sum.check(protection)
        received = records.to_arrays(message.content.array_records[records.MODEL])
        refuse_half_precision(received)
    if isinstance(protection, ProtectedByServer):
        return None
    still = _zeros(received)
    try:
        with isolated():
            update = _update(call_next(_without_entries(message), policy.context), received)
        norm = l2_norm(update)
    except Exception as error:  # a record may have caused any error
        log_hidden(error)
        update, norm = {name: still[name] for name in _floating(still)}, 0.0
    released = {**still, **protection.released(update, noise)}
    sent = client_sum.seal(released, protection)
    metrics = {"update-norm": norm} if of_round.diagnostics else {}
    return Message(Update(sent, metrics).content(), reply_to=message)


def _requested(
    message: Message, policy: NodePolicy, sum_type: type[ClientSum]
) -> tuple[RoundEntries, NoiseSource]:
    """Return the round's entries, whose protection the mod can apply, and the source of noise."""
    check_addressee(message, policy.context)
    entries = entries_for_mods(message)
    of_round = RoundEntries.of(entries) if entries else RoundEntries(number=1, seed=0)
    protection = of_round.protection
    if not isinstance(protection, ClipAndNoise | ProtectedByServer) or protection.of_units:
        kind = entries.get(KIND, "none")
        raise InvalidValue(
            f"client_level_dp_mod: the server asks for the protection {kind!r}: expected a "
            "protection that a ReleasePlan asks for. Run FederatedStrategy(DPFedAvg(), "
            "ReleasePlan(...)) on the server, or remove the mod. If the server does run that "
            "strategy, another mod has removed the settings of the protection from the message: "
            "put client_level_dp_mod first in ClientApp(mods=...)"
        )
    return of_round, policy.admit(ClientRequest(round=of_round, sum_type=sum_type))


def _without_entries(message: Message) -> Message:
    """Return the message with nothing but the model and the user's config, as Flower sends it."""
    config = message.content.config_records.get(records.CONFIG, ConfigRecord())
    settings = {name: value for name, value in config.items() if not name.startswith(FOR_MODS)}
    content = RecordDict({records.MODEL: message.content[records.MODEL]})
    content[records.CONFIG] = ConfigRecord(settings)
    return message_like(message, content)


def _update(reply: Message, received: records.Arrays) -> records.Arrays:
    """Return by how much the ClientApp changed each floating-point array that it received."""
    if reply.has_error():
        raise InvalidValue(f"the ClientApp answered with an error: {reply.error.reason}")
    arrays = reply.content.array_records
    if len(arrays) != 1 and records.MODEL not in arrays:
        raise InvalidValue(
            f"the ClientApp returned the array records {sorted(arrays)}: expected {records.MODEL!r}"
        )
    model = arrays[records.MODEL] if records.MODEL in arrays else next(iter(arrays.values()))
    return moved_by(model, {name: received[name] for name in _floating(received)})


def _zeros(arrays: records.Arrays) -> records.Arrays:
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def _floating(arrays: records.Arrays) -> list[str]:
    return [name for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)]
