"""One round as clients see it: the content for each of a cohort, and numbers of the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Content
from flower_ext.federation.population import Cohort
from flower_ext.federation.stragglers import shortened
from flower_ext.privacy import PrivacyPlan
from flower_ext.privacy.updates import Row, l2_norm
from flower_ext.training import LocalTraining

_ROUNDING = 1.01
"""Room for rounding to the precision in which uploads travel, half precision at the worst."""


def in_round(trainings: Mapping[str, LocalTraining], number: int) -> dict[str, LocalTraining]:
    """Phases of training with the learning rates of training round ``number``."""
    return {phase: training.in_round(number) for phase, training in trainings.items()}


def training_contents(
    cohort: Cohort,
    shared: Content,
    trainings: Mapping[str, LocalTraining],
    *,
    slow: Mapping[int, float],
    own: Callable[[int], Mapping[str, ArrayRecord]],
) -> dict[int, Content]:
    """The content for each client that is asked; those who are asked the same share one object.

    Parameters
    ----------
    shared : Content
        Records that all are sent.
    trainings : Mapping[str, LocalTraining]
        Phases of training in this round.
    slow : Mapping[int, float]
        By partition, the share of its epochs that a straggler completes.
    own : Callable[[int], Mapping[str, ArrayRecord]]
        Records for one partition alone.
    """
    whole = {**shared, **records.training_records(trainings)}
    contents: dict[int, Content] = dict.fromkeys(cohort.asked, whole)
    for partition, how_far in slow.items():
        less = {phase: shortened(training, how_far) for phase, training in trainings.items()}
        contents[partition] = {**shared, **records.training_records(less)}
    for partition, content in contents.items():
        if alone := own(partition):
            contents[partition] = {**content, **alone}
    return contents


def with_remembered(
    contents: Mapping[int, Content],
    remembered: Mapping[int, int],
    facts: Callable[[int], ConfigRecord],
) -> dict[int, Content]:
    """Tell each which of its rounds was used last; those told the same share a content.

    Parameters
    ----------
    remembered : Mapping[int, int]
        By partition; 0 where not named.
    facts : Callable[[int], ConfigRecord]
        The facts of this round for a client that is told that number.
    """
    told: dict[tuple[int, int], Content] = {}
    for partition, content in contents.items():
        last = remembered.get(partition, 0)
        if (id(content), last) not in told:
            told[id(content), last] = {**content, records.ROUND: facts(last)}
    return {p: told[id(c), remembered.get(p, 0)] for p, c in contents.items()}


def read_update(
    reply: Message,
    plan: PrivacyPlan,
    cohort: Cohort,
    base: records.Arrays,
    sent: Callable[[Message], tuple[int, records.Arrays]],
) -> records.Update:
    """A client's update, no larger than bound and noise of an honest client explain.

    What clients noise cannot be clipped without changing the noise. See
    `NoisedSum.largest_upload` for what this protects.

    Parameters
    ----------
    base : Arrays
        Names, shapes and dtypes of the model.
    sent : Callable[[Message], tuple[int, Arrays]]
        Whose reply it is, and the model that was sent there.

    Raises
    ------
    RefusedReply
        It is none of this model, or too large.
    """
    update = records.read_update(reply, base=base, trust_models=not plan.client_protects)
    told = update.metrics.get("num-examples", 0 if plan.weighs_examples else 1)
    if not told >= 1:
        raise records.RefusedReply(f"num-examples={told!r}: expected at least 1")
    if not plan.client_protects:
        return update
    partition, received = sent(reply)
    limit = plan.largest_upload(
        cohort_size=len(cohort.asked),
        numbers=sum(array.size for array in update.arrays.values()),
        norms=cohort.norms.get(partition, 1.0),
    )
    if math.isinf(limit):
        return update
    if plan.bounds_models:
        norm = l2_norm({name: received[name] + step for name, step in update.arrays.items()})
    else:
        norm = update.arrays.norm if isinstance(update.arrays, Row) else l2_norm(update.arrays)
    if norm > limit * _ROUNDING:
        raise records.RefusedReply(
            f"norm {norm:.4g}: expected at most {limit:.4g}, which bound and noise of an honest "
            "upload stay below (largest_upload of the plan); the client changed it after it was "
            "protected, or runs another version of the method"
        )
    return update


class Updates:
    """The updates of a round with their partitions, once and as they come.

    Parameters
    ----------
    heard : Iterator[tuple[int, Update]]
    kept : bool
        Whether each is still there afterwards.

    Attributes
    ----------
    told : Mapping[int, Mapping[str, float]]
        Metrics of those that came, by partition.
    each : Mapping[int, Update]
        The same partitions with their updates, which only those who keep them can read.
    """

    def __init__(self, heard: Iterator[tuple[int, records.Update]], *, kept: bool) -> None:
        self._heard = heard
        self.told: dict[int, Mapping[str, float]] = {}
        self._kept: dict[int, records.Update] | None = {} if kept else None

    def __iter__(self) -> Iterator[tuple[int, records.Update]]:
        for partition, update in self._heard:
            self.told[partition] = update.metrics
            if self._kept is not None:
                self._kept[partition] = update
            yield partition, update

    @property
    def each(self) -> Mapping[int, records.Update]:
        """See above."""
        return _NotKept(self.told) if self._kept is None else self._kept

    def hear_out(self) -> None:
        """Wait for those that nobody took, so that they are counted."""
        for _ in self:
            pass


class _NotKept(Mapping[int, records.Update]):
    """Partitions whose updates are gone."""

    def __init__(self, partitions: Collection[int]) -> None:
        self._partitions = partitions

    def __getitem__(self, partition: int) -> records.Update:
        raise InvalidValue(
            "the round's updates were added up as they came and not kept: a method whose "
            "next_model needs each of them says needs_each_update = True"
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)


def norm_columns(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean and spread of the updates' norms before clipping, where clients report them."""
    norms = [metrics["update-norm"] for metrics in told if "update-norm" in metrics]
    if not norms:
        return {}
    return {"update_norm_mean": float(np.mean(norms)), "update_norm_std": float(np.std(norms))}
