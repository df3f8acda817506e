"""A client's scores as its part of a noised secure sum."""

from __future__ import annotations

from logging import getLogger

import numpy as np
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data, tellable
from flower_ext.federation import records
from flower_ext.federation.client import sum_member
from flower_ext.federation.client.requests import Request
from flower_ext.federation.protection import NodePolicy
from flower_ext.privacy.protections import ClipToCells
from flower_ext.privacy.secure_scores import Bounds, scores_vector

log = getLogger("flwr")

OF_SCORES = "score-noise"
"""Names the noise that protects scores."""


def bounds_of(request: Request) -> Bounds:
    """Return the scores that the server asks for, with their bounds.

    Raises
    ------
    InvalidValue
        Its message names none, or not one bound of each kind for each.
    """
    with knowing_no_data():
        names, low, high = (list(request.scores.get(n, ())) for n in ("names", "low", "high"))
        if not len(names) == len(low) == len(high) > 0:
            raise InvalidValue(
                f"{len(names)} scores with {len(low)} and {len(high)} bounds: expected one of each"
            )
        return tuple(zip(map(str, names), map(float, low), map(float, high), strict=True))


def asks_training_loss(request: Request) -> bool:
    """Tell whether the loss on training examples is one of the scores."""
    return any(name == "training_loss" for name, *_ in bounds_of(request))


def masked_scores(
    scores: dict[str, float] | Exception,
    request: Request,
    context: Context,
    method: str,
    policy: NodePolicy,
) -> RecordDict:
    """Return a client's bounded, noised and masked scores.

    Where the evaluation failed on this client's data, its part is that of a client without test
    examples: an error instead would tell of a record.

    Raises
    ------
    PermissionError
        The node's owner asks for more noise.
    InvalidValue, ProtocolError
        The server's message is malformed or out of order, or asks for no protection that fits.
    """
    if isinstance(scores, Exception):
        if is_tellable(scores):
            raise scores
        log.warning("the evaluation fails here (%s): its part is empty", type(scores).__name__)
        log.debug("the evaluation fails here", exc_info=scores)
        scores = {}
    protection = request.protection
    with knowing_no_data():
        policy.check(protection)
        bounds = bounds_of(request)
        if not isinstance(protection, ClipToCells) or records.SECURE_SUM not in request.state:
            raise tellable(InvalidValue("scores: expected noise in cells and a secure sum"))
        noise = policy.noise({**request.facts, "number": request.facts["evaluation"]}, OF_SCORES)
        told = {n: np.asarray(array) for n, array in request.state[records.SECURE_SUM].items()}
    # Clipped again to the norm that the noise is for, whatever bounds the server names.
    cells = protection.released({"scores": scores_vector(scores, bounds)}, noise)
    whole = {name: np.asarray(array) for name, array in cells.items()}
    return RecordDict({records.UPDATE: sum_member.masked(whole, told, context, method)})
