"""Client-level privacy for ClientApps that know nothing of this package: a Flower mod.

The mod goes first in the list, so that nothing acts on an upload after it::

    app = ClientApp(mods=[client_level_dp_mod()])

With it, a plain Flower ClientApp takes part in `DPFedAvg` under a `ReleasePlan` that leaves noise
to the clients. The server's message says how to clip and how much noise to add; the mod does what
the client side of this package does, by the same `Protection`.

==============================  ==================================================================
the ClientApp returns           what leaves the client
==============================  ==================================================================
floating-point arrays           the clipped update with noise
integer and boolean arrays      the received values: they count batches or examples, and no
                                Gaussian noise covers a whole number
arrays that were not received   nothing
metrics, other records          nothing: the guarantee does not cover them
an error, a missing array, NaN  noise on an update of zeros, as a client sends that has learned
                                nothing; the node's own log has the reason
==============================  ==================================================================

An error reply in the last case would tell the server of a record, since a record may have caused
it. So the server cannot see that a ClientApp is broken: where the model does not improve, read the
nodes' logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation._flower_private import message_like
from flower_ext.federation.client.unmoved import log_unmoved
from flower_ext.federation.cohort import asks_identity, check_addressee, identity
from flower_ext.federation.failures import failed, hidden_errors
from flower_ext.federation.protection import OF_UPLOADS, NodePolicy, check_facts
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.protections import ClipUpdate, ProtectedByServer, Protection
from flower_ext.privacy.updates import l2_norm


def client_level_dp_mod(*, allow_seeded_noise: bool = False) -> Mod:
    """Return a mod that bounds and noises what a ClientApp sends in training.

    Messages of other types pass as they are. So does training where the plan lets the server add
    the noise, if the node's owner allows that (``least-noise-multiplier``, see `NodePolicy`). A
    message that asks for no protection, as Flower's own strategies send it, is refused.

    Parameters
    ----------
    allow_seeded_noise : bool
        Whether the server may ask for reproducible noise: in simulation only, because anybody who
        knows the seed can take the noise off again.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        if asks_identity(message):
            return Message(identity(context.node_config), reply_to=message)
        try:
            with knowing_no_data():
                facts, protection, noise = _asked(message, context, allow_seeded_noise)
                received = records.to_arrays(message.content.array_records[records.MODEL])
        except Exception as error:  # the server may read it: nothing of the client was looked at
            return failed(mod, message, context, error)
        if not isinstance(protection, ClipUpdate):
            return call_next(message, context)
        still = {name: np.zeros_like(array) for name, array in received.items()}
        try:
            update = _update(call_next(_without_facts(message), context), received)
            norm = l2_norm(update)
        except Exception as error:  # whatever a model or a loss makes of a record
            log_unmoved(error)
            update, norm = {name: still[name] for name in _floating(still)}, 0.0
        with hidden_errors(context):
            sent = {**still, **protection.released(update, noise)}
        content = RecordDict({records.UPDATE: records.to_record(sent)})
        if facts.get("diagnostics"):
            content[records.METRICS] = records.metrics_record({"update-norm": norm})
        return Message(content, reply_to=message)

    return mod


def _asked(
    message: Message, context: Context, allow_seeded_noise: bool
) -> tuple[Mapping[str, Any], Protection, NoiseSource]:
    """Return what a training message asks for, if the owner of the node allows it.

    Raises
    ------
    ValueError, TypeError
        The message asks for nothing, or for what a mod cannot do.
    PermissionError
        The owner of the node asks for more noise, or for secure noise.
    """
    check_addressee(message, context)
    facts = dict(message.content.config_records.get(records.ROUND, {}))
    protection = check_facts(facts) if facts else None
    if type(protection) not in (ClipUpdate, ProtectedByServer):
        found = "none" if protection is None else type(protection).__name__
        raise InvalidValue(
            f"client_level_dp_mod: the server asks for the protection {found!r}, expected that of "
            "a ReleasePlan: run DPFedAvg(plan=ReleasePlan(...)) on the server, or take the mod off"
        )
    assert protection is not None
    policy = NodePolicy(context, allow_seeded_noise)
    policy.check(protection)
    return facts, protection, policy.noise(facts, OF_UPLOADS)


def _without_facts(message: Message) -> Message:
    """Return the message as Flower's own strategies send it: the model, and the user's settings."""
    kept = (records.MODEL, records.CONFIG)
    content = RecordDict({n: message.content[n] for n in kept if n in message.content})
    return message_like(message, content)


def _update(reply: Message, received: records.Arrays) -> records.Arrays:
    """Return how far a ClientApp moved each floating-point array that it received.

    Raises
    ------
    ValueError
        The reply has not all arrays in their shapes and types.
    """
    returned = _model_in(reply)
    for name, base in received.items():
        if name not in returned:
            raise InvalidValue(f"the ClientApp returned no {name!r}")
        own = returned[name]
        if own.shape != base.shape or own.dtype != base.dtype:
            raise InvalidValue(
                f"{name!r} came back as {own.dtype}{own.shape}: expected {base.dtype}{base.shape}"
            )
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses what is not finite
        return {name: np.asarray(returned[name] - received[name]) for name in _floating(received)}


def _floating(arrays: records.Arrays) -> list[str]:
    return [name for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)]


def _model_in(reply: Message) -> records.Arrays:
    """Return the model that a ClientApp returned.

    Raises
    ------
    ValueError
        It returned an error, none, or several.
    """
    if reply.has_error():
        raise InvalidValue(f"the ClientApp answered with an error: {reply.error.reason}")
    found = reply.content.array_records
    if len(found) != 1 and records.MODEL not in found:
        raise InvalidValue(
            f"the ClientApp returned the array records {sorted(found)}: expected {records.MODEL!r}"
        )
    record = found[records.MODEL] if records.MODEL in found else next(iter(found.values()))
    return records.to_arrays(record)
