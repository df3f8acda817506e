"""Answer an evaluation: with scores in the clear, or with a masked vector for a noised sum."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import getLogger

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_ext.data import ClientData, Examples
from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data
from flower_ext.federation.client.assignment import Assignment
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.client.hidden_errors import log_once
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.messages import records
from flower_ext.federation.messages.replies import LARGEST_VALUE
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import Params, evaluate
from flower_ext.training.isolation import isolated
from flower_ext.training.side_by_side import Steps, check_whole, completed, side_by_side

log = getLogger("flwr")

OF_QUERY = "query-noise"
"""Purpose of the noise that protects the vector of a query."""


def used_model(work: ClientWork) -> Steps[Params]:
    """Return the whole model that this client uses for predictions."""
    model = yield from completed(work.method.local_model(work))
    check_whole(model, work.task)
    return model


def scores_of(work: ClientWork, *, training: bool) -> Steps[dict[str, float]]:
    """Return the scores of the client's model on its test examples, if there are any, by name.

    With ``training``, the result includes the loss on the client's training examples.
    """
    model = yield from used_model(work)
    scores = _scores(work, model, work.data.test)
    if training and (trained := _scores(work, model, work.data.train)):
        scores["training_loss"] = trained["loss"]
    return scores


def _scores(work: ClientWork, model: Params, examples: Examples) -> dict[str, float]:
    return evaluate(work.task, model, examples) if len(examples) else {}


def evaluation_of(assignment: Assignment) -> Steps[RecordDict]:
    """Return the reply with a client's finite scores and its number of test examples."""
    work, with_training = assignment.work, assignment.request.round.training_loss
    scores = yield from scores_of(work, training=with_training)
    # A score may be undefined for these examples. The server would refuse a reply that contains it.
    finite = {n: v for n, v in scores.items() if abs(v) <= LARGEST_VALUE}
    if lacking := sorted(set(scores) - set(finite)):
        log.warning("the scores %s of a client are not finite, so they are left out", lacking)
    finite["num-examples"] = float(len(work.data.test))
    return RecordDict({records.METRICS: records.metrics_record(finite)})


@dataclass(frozen=True)
class WorkView:
    """One client's data, and the scores of the model that it uses for predictions (`LocalView`)."""

    work: ClientWork

    @property
    def data(self) -> ClientData:
        """The client's examples."""
        return self.work.data

    def scores(self, *, training: bool) -> Mapping[str, float]:
        """Return the model's scores by name; empty for a client without test examples."""
        if not len(self.data.test):
            return {}
        (scores,) = side_by_side([scores_of(self.work, training=training)])
        if isinstance(scores, Exception):
            raise scores
        return scores


def query_of(request: ClientRequest, kinds: Mapping[str, type[VectorQuery]]) -> VectorQuery:
    """Return the query that the server asks; refuse a kind that this ClientApp does not answer."""
    name = str(request.query["name"])
    with knowing_no_data():
        if name not in kinds:
            raise InvalidValue(
                f"the server asks the query {name!r}, but this ClientApp answers only "
                f"{sorted(kinds)}: give the query's class to client_app(queries=…)"
            )
        try:
            return kinds[name](**json.loads(str(request.query["fields"])))
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidValue(f"query {name!r} in the server's message: {error}") from error


def masked_vector(query: VectorQuery, assignment: Assignment) -> RecordDict:
    """Return a client's answer to a query: its vector, bounded, noised and masked."""
    request, policy = assignment.request, assignment.policy
    protection = request.round.protection
    with knowing_no_data():
        policy.check(protection, protection.noise_multiplier)
        if protection.cell is None or not assignment.sum.is_secure:
            raise InvalidValue.tellable(
                "the server's message has a query without a secure sum, or without a protection "
                "with a cell: expected both, as the server's FederatedStrategy sends them"
            )
        # `RoundEntries` refuses the number 0, which stands for a message without this entry.
        of_query = replace(request.round, number=request.round.query or 0)
        noise = policy.noise(of_query, f"{OF_QUERY} {query.name}")
    vector = _vector(query, WorkView(assignment.work))
    # `released` clips to the protection's norm, for which the noise is calibrated, and not to the
    # norm in the query.
    cells = protection.released({"vector": vector}, noise)
    sent = assignment.sum.seal(cells, protection)
    return RecordDict({records.UPDATE: records.to_record(sent)})


def _vector(query: VectorQuery, view: WorkView) -> NDArray[np.float64]:
    """Return the client's vector, or zeros if the query fails on the client's data.

    An error, or a vector of another length, would reveal something about a record.
    """
    try:
        with isolated():
            vector = np.asarray(query.vector(view), dtype=np.float64)
        if vector.shape != (size := (query.size,)) or not np.isfinite(vector).all():
            raise InvalidValue(
                f"the query's vector has shape {vector.shape}, or holds NaN or infinite values: "
                f"expected finite numbers of shape {size}"
            )
        return vector
    except Exception as error:  # unusual tensors may raise wherever they are read
        if is_tellable(error):
            raise
        log_once(
            f"query {query.name} failed (%s), so this client adds zeros to the sum: check its "
            "data, or the query if no client can answer it",
            error,
        )
        return np.zeros(query.size)
