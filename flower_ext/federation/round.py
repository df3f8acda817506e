"""One round of any query: open the sum, ask, read the answers, and release their mean.

A training and an evaluation under noise are both such rounds. They differ in the query, in the
mechanism and in what is done with the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Clients, Content
from flower_ext.federation.population import Cohort
from flower_ext.federation.spending import Spending
from flower_ext.federation.stragglers import shortened
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy import Release
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded, RoundMechanism
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext.training import LocalTraining

_ROUNDING = 1.0001
"""Tolerance for rounding to the precision of uploads, which is single precision or wider."""


class Round:
    """One round. Call `open`, `ask` and `close`, in this order; call `reserve` before `ask`.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        Type of the messages.
    server_round : int
        Number of the messages' round.
    clients : Clients
    spending : Spending
    """

    def __init__(
        self, kind: str, server_round: int, *, clients: Clients, spending: Spending
    ) -> None:
        self.kind, self.server_round = kind, server_round
        self._clients, self._spending = clients, spending
        self._sum: OpenSum | None = None
        self.discard_reason = ""
        """The reason why the round released nothing; empty if it released a mean."""
        self.measures: Mapping[str, float] = {}
        """Numbers of the sum for the row of the round; known after `close`."""
        self.cohort = Cohort(asked=(), units=(), population=0)
        """The clients that contribute; known after `open`."""

    def reserve(self, release: Release | None, identity: int | None) -> None:
        """Write the spend to the ledger, durably, before any client is asked."""
        self._spending.reserve(release, self.server_round, identity)

    def open(self, summation: Summation, opening: Opening) -> Cohort:
        """Open the sum; return the clients that contribute, which are none if too few are left."""
        try:
            self._sum = summation.open(opening)
        except RoundDiscarded as reason:
            self.discard_reason = str(reason)
            self.cohort = replace(opening.cohort, asked=())
        else:
            self.cohort = self._sum.cohort
        return self.cohort

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the records for one client only: those of the method and of the sum."""
        of_method = self.cohort.requests.get(partition, {})
        return {**of_method, **self._sum.request(partition)} if self._sum else of_method

    def ask(self, contents: Mapping[int, Content]) -> list[Message]:
        """Return the messages to the cohort."""
        return self._clients.messages(self.kind, contents, self.server_round)

    def exposure(self, answered: int | None = None) -> tuple[int, int | None]:
        """Return `OpenSum.exposure`; nobody is exposed without a sum."""
        return (0, answered) if self._sum is None else self._sum.exposure(answered)

    def close(
        self, replies: Iterable[Message], *, kept: bool = False, **notes: Any
    ) -> tuple[Aggregate | None, Updates]:
        """Read the replies as they arrive, and release their mean.

        Parameters
        ----------
        replies : Iterable[Message]
        kept : bool
            True to keep each contribution for reading it again.
        **notes
            Facts to keep with the release in the ledger.

        Returns
        -------
        Aggregate or None
            The released mean; None if the round is discarded. A discarded round is spent.
        Updates
            The accepted contributions.
        """
        updates = Updates(self._accepted(replies), kept=kept)
        with self._spending.closing() as release:
            try:
                if self._sum is None:
                    raise RoundDiscarded(self.discard_reason)
                aggregate = self._sum.aggregate(updates)
            except RoundDiscarded as reason:
                self.discard_reason = str(reason)
                release.discard(self.discard_reason)
                return None, updates
            finally:
                self.measures = self._sum.measures if self._sum else {}
                updates.exhaust()  # a silent client is counted, too
            release.note(
                **{"cohort": len(self.cohort.asked), **notes},
                answered=aggregate.answered,
                topped_up_stddev=aggregate.topped_up_stddev,
            )
        return aggregate, updates

    def _accepted(self, replies: Iterable[Message]) -> Iterator[tuple[int, records.Update]]:
        if self._sum is None:
            return iter(())
        return self._clients.heard(
            self.kind, self.server_round, replies, self.cohort.asked, self._sum.read
        )


def in_round(trainings: Mapping[str, LocalTraining], number: int) -> dict[str, LocalTraining]:
    """Return the phases of training with the learning rates of training round ``number``."""
    return {phase: training.in_round(number) for phase, training in trainings.items()}


def training_contents(
    cohort: Cohort,
    shared: Content,
    trainings: Mapping[str, LocalTraining],
    *,
    slow: Mapping[int, float],
    request: Callable[[int], Mapping[str, ArrayRecord]],
) -> dict[int, Content]:
    """Return the content for each client of the cohort; equal requests share one object.

    Parameters
    ----------
    shared : Content
        Records for all clients.
    trainings : Mapping[str, LocalTraining]
        Phases of training in this round.
    slow : Mapping[int, float]
        By partition, the fraction of its epochs that a straggler completes.
    request : Callable[[int], Mapping[str, ArrayRecord]]
        Returns the records for one partition only.
    """
    whole = {**shared, **records.training_records(trainings)}
    contents: dict[int, Content] = dict.fromkeys(cohort.asked, whole)
    for partition, how_far in slow.items():
        less = {phase: shortened(training, how_far) for phase, training in trainings.items()}
        contents[partition] = {**shared, **records.training_records(less)}
    for partition, content in contents.items():
        if special := request(partition):
            contents[partition] = {**content, **special}
    return contents


def with_remembered(
    contents: Mapping[int, Content],
    remembered: Mapping[int, int],
    facts: Callable[[int], ConfigRecord],
) -> dict[int, Content]:
    """Tell each client which of its rounds the server used last.

    Clients with the same content and number share one object.

    Parameters
    ----------
    remembered : Mapping[int, int]
        Last used round by partition; 0 for a partition that is not named.
    facts : Callable[[int], ConfigRecord]
        Returns the facts of this round for clients with that last used round.
    """
    shared: dict[tuple[int, int], Content] = {}
    for partition, content in contents.items():
        last = remembered.get(partition, 0)
        if (id(content), last) not in shared:
            shared[id(content), last] = {**content, records.ROUND: facts(last)}
    return {p: shared[id(c), remembered.get(p, 0)] for p, c in contents.items()}


def read_update(
    reply: Message,
    mechanism: RoundMechanism,
    protection: Protection | None,
    cohort: Cohort,
    base: records.Arrays,
    clients: Clients,
) -> records.Update:
    """Return a client's update. Refuse one that is larger than an honest client's can be.

    The server cannot clip uploads that clients have noised without changing the noise, so it
    refuses them. `Protection.largest_upload` says what this check protects.

    Parameters
    ----------
    protection : Protection, optional
        Protection that the server asked for.
    base : Arrays
        Names, shapes and dtypes of the model.
    clients : Clients
        Knows the partition that sent a reply, and the model that it received.

    Raises
    ------
    RefusedReply
        The update does not fit the model, or is too large.
    """
    update = records.read_update(reply, base=base, trust_models=not mechanism.client_protects)
    num_examples = update.metrics.get("num-examples", 0 if mechanism.weighs_examples else 1)
    if not num_examples >= 1:
        raise records.RefusedReply(f"num-examples={num_examples!r}: expected at least 1")
    if protection is None or not mechanism.client_protects:
        return update
    partition = clients.partition_of(reply)
    limit = protection.largest_upload(
        sum(array.size for array in base.values()), norms=cohort.norms.get(partition, 1.0)
    )
    if math.isinf(limit):
        return update
    if protection.bounds_models:
        received = clients.sent(reply)
        norm = l2_norm({name: received[name] + step for name, step in update.arrays.items()})
    else:
        norm = l2_norm(update.arrays)
    if norm > limit * _ROUNDING:
        raise records.RefusedReply(
            f"norm {norm:.4g}: expected at most {limit:.4g}, the largest norm of an honest upload "
            "(largest_upload of the protection); the client changed the update after it was "
            "protected, or runs another version of the method"
        )
    return update


class Updates:
    """The updates of a round with their partitions, for one pass, as they arrive.

    Parameters
    ----------
    accepted : Iterator[tuple[int, Update]]
    kept : bool
        True to keep each update for reading it again afterwards.

    Attributes
    ----------
    metrics : Mapping[int, Mapping[str, float]]
        Metrics of the arrived updates, by partition.
    each : Mapping[int, Update]
        Arrived updates by partition. Without ``kept``, reading an update raises InvalidValue.
    """

    def __init__(self, accepted: Iterator[tuple[int, records.Update]], *, kept: bool) -> None:
        self._accepted = accepted
        self.metrics: dict[int, Mapping[str, float]] = {}
        self._kept: dict[int, records.Update] | None = {} if kept else None

    def __iter__(self) -> Iterator[tuple[int, records.Update]]:
        for partition, update in self._accepted:
            self.metrics[partition] = update.metrics
            if self._kept is not None:
                self._kept[partition] = update
            yield partition, update

    @property
    def each(self) -> Mapping[int, records.Update]:
        """Arrived updates by partition; see the class."""
        return _NotKept(self.metrics) if self._kept is None else self._kept

    def exhaust(self) -> None:
        """Wait for the remaining updates, so that they are counted."""
        for _ in self:
            pass


class _NotKept(Mapping[int, records.Update]):
    """Partitions of updates that were not kept."""

    def __init__(self, partitions: Collection[int]) -> None:
        self._partitions = partitions

    def __getitem__(self, partition: int) -> records.Update:
        raise InvalidValue(
            "the server added the round's updates up as they arrived and did not keep them: set "
            "needs_each_update = True in a method whose step reads single updates"
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)


def norm_columns(every: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return mean and spread of the updates' norms before clipping; empty if none is reported."""
    norms = [metrics["update-norm"] for metrics in every if "update-norm" in metrics]
    if not norms:
        return {}
    return {"update_norm_mean": float(np.mean(norms)), "update_norm_std": float(np.std(norms))}
