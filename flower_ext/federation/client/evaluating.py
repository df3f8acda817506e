"""Answer an evaluation: with scores in the clear, or with a masked vector for a noised sum."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_ext.data import ClientData, Examples
from flower_ext.errors import InvalidValue, is_tellable, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.failures import attempt_each
from flower_ext.federation.replies import LARGEST_VALUE
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import Params, evaluate_each
from flower_ext.training.isolation import isolated

log = getLogger("flwr")

OF_QUERY = "query-noise"
"""Purpose of the noise that protects a vector."""


def scores_of(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    *,
    also_training: bool,
) -> list[dict[str, float] | Exception]:
    """Return the scores of each client's model on the client's test examples, or its error.

    A client without test examples has no scores. With ``also_training``, the scores include the
    loss on the client's training examples.
    """
    scores = _scores(works, models, attempt_each(lambda work: work.data.test, works))
    if not also_training:
        return scores
    trained = _scores(works, models, attempt_each(lambda work: work.data.train, works))
    return attempt_each(
        lambda of, on: {**of, "training_loss": on["loss"]} if on else of, scores, trained
    )


def _scores(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    examples: Sequence[Examples | Exception],
) -> list[dict[str, float] | Exception]:
    rows = attempt_each(lambda *row: row, works, models, examples)
    scored = [row for row in rows if not isinstance(row, Exception) and len(row[2])]
    evaluated: Iterator[dict[str, float] | Exception] = iter(())
    if scored:
        (work, *_), *_ = scored  # all clients of a process share the task
        _, chosen, data = zip(*scored, strict=True)
        evaluated = iter(evaluate_each(work.task, chosen, data))
    return attempt_each(lambda row: next(evaluated) if len(row[2]) else {}, rows)


def scores_record(work: ClientWork, scores: dict[str, float]) -> RecordDict:
    """Return the reply with a client's finite scores and its number of test examples."""
    # A score may be undefined for these examples. The server would refuse a reply that contains it.
    finite = {n: v for n, v in scores.items() if abs(v) <= LARGEST_VALUE}
    if lacking := sorted(set(scores) - set(finite)):
        log.warning("the scores %s of a client are not finite, so they are left out", lacking)
    finite["num-examples"] = float(len(work.data.test))
    return RecordDict({records.METRICS: records.metrics_record(finite)})


@dataclass(frozen=True)
class WorkView:
    """One client's data, and the scores of the model that it would use (see `LocalView`)."""

    work: ClientWork
    model: Callable[[], Params | Exception]

    @property
    def data(self) -> ClientData:
        """The client's examples."""
        return self.work.data

    def scores(self, *, training: bool) -> Mapping[str, float]:
        """Return the model's scores by name; empty for a client without test examples."""
        if not len(self.data.test):
            return {}
        (scores,) = scores_of([self.work], [self.model()], also_training=training)
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


def masked_vector(query: VectorQuery, view: WorkView) -> RecordDict:
    """Return a client's answer to a query: its vector, bounded, noised and masked."""
    vector, work, protection = _vector(query, view), view.work, view.work.protection
    with knowing_no_data():
        work.policy.check(protection)
        if protection.cell is None or records.SECURE_SUM not in work.sums:
            raise InvalidValue.tellable(
                "a query in the server's message: expected a message with a secure sum and the "
                "protection ClipToCells"
            )
        entries = {**work.entries, "number": work.entries["query"]}
        noise = work.policy.noise(entries, f"{OF_QUERY} {query.name}")
    # `released` clips to the norm that the noise is for, whatever norm the query names.
    cells = protection.released({"vector": vector}, noise)
    sealed = work.seal(cells, work.policy.context, work.method.name)
    return RecordDict({records.UPDATE: records.to_record(sealed)})


def _vector(query: VectorQuery, view: WorkView) -> NDArray[np.float64]:
    """Return the client's vector, or zeros if the query fails on the client's data.

    An error, or a vector of another length, would reveal something about a record.
    """
    try:
        with isolated():
            vector = np.asarray(query.vector(view), dtype=np.float64)
    except Exception as error:  # unusual tensors may raise wherever they are read
        if is_tellable(error):
            raise
        log.warning(
            "query %s failed (%s), so this client adds zeros to the sum: check its data",
            query.name,
            type(error).__name__,
        )
        log.debug("query %s failed", query.name, exc_info=error)
        return np.zeros(query.size)
    if vector.shape != (query.size,) or not np.isfinite(vector).all():
        log.warning(
            "query %s: expected %d finite numbers, so this client adds zeros to the sum: check its "
            "data",
            query.name,
            query.size,
        )
        return np.zeros(query.size)
    return vector
