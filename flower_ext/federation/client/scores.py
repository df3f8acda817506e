"""Score the model that each client would use on the client's own examples, without noise."""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger

from flwr.app import RecordDict

from flower_ext.data import Examples
from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.failures import attempt_each
from flower_ext.federation.replies import LARGEST_VALUE
from flower_ext.training import Params, evaluate_each

log = getLogger("flwr")


def scores_of(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    *,
    also_training: bool,
) -> list[dict[str, float] | Exception]:
    """Return each model's scores on its client's test examples, or the client's error.

    A client without test examples has no scores. With ``also_training``, the scores include the
    loss on the client's training examples.
    """
    tests = attempt_each(lambda work: work.data.test, works)
    scores = _scores(works, models, tests)
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
    scores: list[dict[str, float] | Exception] = [
        row if isinstance(row, Exception) else {} for row in rows
    ]
    scored = {
        n: row for n, row in enumerate(rows) if not isinstance(row, Exception) and len(row[2])
    }
    if scored:
        (work, *_), *_ = scored.values()  # all clients of a process share the task
        _, chosen, data = zip(*scored.values(), strict=True)
        evaluated = evaluate_each(work.task, chosen, data)
        for index, result in zip(scored, evaluated, strict=True):
            scores[index] = result
    return scores


def scores_record(work: ClientWork, scores: dict[str, float]) -> RecordDict:
    """Return the reply with a client's finite scores and its number of test examples."""
    # A score may be undefined for these examples. Because of it, the server would refuse the whole
    # reply.
    finite = {n: v for n, v in scores.items() if abs(v) <= LARGEST_VALUE}
    if lacking := sorted(set(scores) - set(finite)):
        log.warning("the scores %s of a client are not finite, so they are left out", lacking)
    finite["num-examples"] = float(len(work.data.test))
    return RecordDict({records.METRICS: records.metrics_record(finite)})
