"""Record-level protection for ClientApps that do not use this package.

The module has a Flower mod for output perturbation, and a loss term for objective perturbation::

    app = ClientApp(mods=[output_perturbation_mod(OutputPerturbation(...))])

    term = objective_perturbation_term(dict(model.named_parameters()), ObjectivePerturbation(...))
    loss = criterion(model(x), y) + term(dict(model.named_parameters()))   # the same term all round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_ext.federation import records
from flower_ext.federation.failures import hidden_errors
from flower_ext.federation.roster import is_rehearsal
from flower_ext.privacy import NoiseSource, ObjectivePerturbation, OutputPerturbation, SecureNoise
from flower_ext.training import Linear


def output_perturbation_mod(
    perturbation: OutputPerturbation, noise: Callable[[], NoiseSource] = SecureNoise
) -> Mod:
    """Return a mod that clips and noises all arrays of a training reply, as one vector.

    Metrics in the reply stay unchanged, and no guarantee covers them.

    Parameters
    ----------
    perturbation : OutputPerturbation
    noise : Callable[[], NoiseSource]
        Returns the source of noise for one reply.

    Raises
    ------
    ClientFailed
        The app raised an exception, or a reply has an array that is not floating-point or not
        finite. Flower would send the message and type of any other exception to the server; the
        node's own log has them.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        with hidden_errors(context):
            return perturbed(message, context, call_next)

    def perturbed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if is_rehearsal(message):  # the server asks if training succeeds, and not for its result
            return Message(
                RecordDict({records.MODEL: message.content[records.MODEL]}), reply_to=message
            )
        if message.metadata.message_type.partition(".")[0] != "train" or not reply.has_content():
            return reply
        sent = {
            (key, name): array
            for key, record in reply.content.array_records.items()
            for name, array in records.to_arrays(record).items()
        }
        if not sent:
            return reply
        noised = perturbation.apply({_label(*where): a for where, a in sent.items()}, noise())
        released: dict[str, dict[str, np.ndarray]] = {}
        for key, name in sent:
            released.setdefault(key, {})[name] = noised[_label(key, name)]
        for key, arrays in released.items():
            reply.content[key] = records.to_record(arrays)
        return reply

    return mod


def _label(record: str, array: str) -> str:
    """Return a name for an array that is unique among the arrays of all records."""
    return f"{record.replace('/', '%2F')}/{array}"


def objective_perturbation_term(
    params: Mapping[str, torch.Tensor],
    perturbation: ObjectivePerturbation,
    noise: NoiseSource | None = None,
) -> Linear:
    """Return the loss term ⟨n, w⟩ with fresh noise n.

    Draw one term in each round, and add it to the loss of every mini-batch of that round.
    """
    arrays = {name: p.detach().cpu().numpy() for name, p in params.items()}
    direction = {
        name: torch.from_numpy(part).to(params[name])
        for name, part in perturbation.direction(arrays, noise or SecureNoise()).items()
    }
    return Linear(direction=direction)
