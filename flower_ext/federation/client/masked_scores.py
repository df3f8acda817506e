"""A client's scores as its part of a noised secure sum."""

from __future__ import annotations

from logging import getLogger

import numpy as np
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data, tellable
from flower_ext.federation import records
from flower_ext.federation.client.protecting import NodePolicy
from flower_ext.federation.client.requests import Request
from flower_ext.federation.sums import masked
from flower_ext.privacy.mechanisms.protections import ClipToCells
from flower_ext.privacy.mechanisms.secure_scores import Bounds, scores_vector

log = getLogger("flwr")

OF_SCORES = "score-noise"
"""Name of the noise that protects scores."""


def bounds_of(request: Request) -> Bounds:
    """Return the scores that the server asks for, with their bounds.

    Raises
    ------
    InvalidValue
        The server's message names no score, or does not give each score a low and a high bound.
    """
    with knowing_no_data():
        names, low, high = (list(request.scores.get(n, ())) for n in ("names", "low", "high"))
        if not len(names) == len(low) == len(high) > 0:
            raise InvalidValue(
                f"{len(names)} scores with {len(low)} low and {len(high)} high bounds: expected at "
                "least one score, and one bound of each kind per score"
            )
        return tuple(zip(map(str, names), map(float, low), map(float, high), strict=True))


def asks_training_loss(request: Request) -> bool:
    """Return True if the loss on training examples is one of the scores."""
    return any(name == "training_loss" for name, *_ in bounds_of(request))


def masked_scores(
    scores: dict[str, float] | Exception,
    request: Request,
    context: Context,
    method: str,
    policy: NodePolicy,
) -> RecordDict:
    """Return a client's bounded, noised and masked scores.

    If the evaluation failed on this client's data, the client sends the part of a client without
    test examples, because an error would reveal something about a record.

    Raises
    ------
    PermissionError
        The node's owner demands more noise.
    InvalidValue, ProtocolError
        The server's message is malformed or out of order, or its protection does not fit scores.
    """
    if isinstance(scores, Exception):
        if is_tellable(scores):
            raise scores
        log.warning(
            "an evaluation failed (%s), so this client adds no score to the sum: check its data",
            type(scores).__name__,
        )
        log.debug("an evaluation failed", exc_info=scores)
        scores = {}
    protection = request.protection
    with knowing_no_data():
        policy.check(protection)
        bounds = bounds_of(request)
        if not isinstance(protection, ClipToCells) or records.SECURE_SUM not in request.state:
            raise tellable(
                InvalidValue("scores: expected a protection by noise in cells, and a secure sum")
            )
        noise = policy.noise({**request.facts, "number": request.facts["evaluation"]}, OF_SCORES)
        of_sum = {n: np.asarray(array) for n, array in request.state[records.SECURE_SUM].items()}
    # `released` clips to the norm that the noise is for, whatever bounds the server names.
    cells = protection.released({"scores": scores_vector(scores, bounds)}, noise)
    whole = {name: np.asarray(array) for name, array in cells.items()}
    return RecordDict({records.UPDATE: masked.seal(whole, of_sum, context, method)})
