"""Scores, without noise, of the models that clients would use, on each client's own examples."""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger

from flwr.app import RecordDict

from flower_ext.data import Examples
from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.failures import each
from flower_ext.training import Params, Task, evaluate_each

log = getLogger("flwr")


def scores_of(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    *,
    also_training: bool,
) -> list[RecordDict | Exception]:
    """Return each model's scores on its client's test examples, or the client's error.

    With ``also_training``, the scores include the loss on the client's training examples.
    """
    every = plain_scores(works, models, also_training=also_training)
    return each(_record, works, every)


def plain_scores(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    *,
    also_training: bool,
) -> list[dict[str, float] | Exception]:
    """Return the scores as plain numbers by name; none for a client without test examples."""
    tests = each(lambda work: work.data.test, works)
    every = _scores(works, models, tests)
    if also_training:
        training = each(lambda work: work.data.train, works)
        trained = _scores(works, models, training)
        every = each(_with_training_loss, every, trained)
    return every


def _scores(
    works: Sequence[ClientWork | Exception],
    models: Sequence[Params | Exception],
    examples: Sequence[Examples | Exception],
) -> list[dict[str, float] | Exception]:
    """Return the scores from `evaluate_each`; none for a model without examples."""
    scores: list[dict[str, float] | Exception] = each(lambda *row: {}, works, models, examples)
    some: list[tuple[int, Params, Examples]] = []
    task: Task | None = None
    for index, (work, model, chosen_examples) in enumerate(
        zip(works, models, examples, strict=True)
    ):
        if isinstance(work, Exception) or isinstance(model, Exception):
            continue
        if not isinstance(chosen_examples, Exception) and len(chosen_examples):
            task = work.task
            some.append((index, model, chosen_examples))
    if task is not None:
        places, chosen, tests = zip(*some, strict=True)
        evaluated = evaluate_each(task, chosen, tests)
        for index, one in zip(places, evaluated, strict=True):
            scores[index] = one
    return scores


def _with_training_loss(scores: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    return {**scores, "training_loss": trained["loss"]} if trained else scores


def _record(work: ClientWork, scores: dict[str, float]) -> RecordDict:
    # A score may be undefined for these examples; the server would refuse the others with it.
    finite = {n: v for n, v in scores.items() if abs(v) <= records.LARGEST_VALUE}
    if lacking := sorted(set(scores) - set(finite)):
        log.warning("the scores %s of a client are not finite, so they are left out", lacking)
    finite["num-examples"] = float(len(work.data.test))
    return RecordDict({records.METRICS: records.metrics_record(finite)})
