"""One round of any query: open the sum, ask, read the answers, and release their mean.

A training and an evaluation under noise are both such rounds. They differ in the query, in the
mechanism and in what is done with the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Clients, Content, Requests
from flower_ext.federation.population import Cohort
from flower_ext.federation.spending import Spending
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy import Release
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded


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
        self.requests: Requests | None = None
        """The messages to the cohort; None before `ask`."""
        self.discard_reason = ""
        """The reason why the round released nothing; empty if it released a mean."""
        self.cohort = Cohort(partitions=(), units=(), population=0)
        """The clients that contribute; known after `open`."""

    def reserve(self, release: Release | None, identity: int | None) -> None:
        """Write the spend to the ledger, durably, before any client is asked."""
        self._spending.reserve(release, self.server_round, identity)

    def open(self, summation: Summation, opening: Opening) -> Cohort:
        """Open the sum; return the clients that contribute, or none if too few are left."""
        try:
            self._sum = summation.open(opening)
        except RoundDiscarded as reason:
            self.discard_reason = str(reason)
            self.cohort = replace(opening.cohort, partitions=())
        else:
            self.cohort = self._sum.cohort
        return self.cohort

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the records for one client only: those of the method and of the sum."""
        of_method = self.cohort.requests.get(partition, {})
        return {**of_method, **self._sum.request(partition)} if self._sum else of_method

    def ask(self, contents: Mapping[int, Content]) -> list[Message]:
        """Return the messages to the cohort."""
        self.requests = self._clients.request(self.kind, contents, self.server_round)
        return self.requests.messages

    def exposure(self, answered: int | None = None) -> tuple[int, int | None]:
        """Return `OpenSum.exposure`; 0 shares if the sum was never opened."""
        return (0, answered) if self._sum is None else self._sum.exposure(answered)

    @property
    def measures(self) -> Mapping[str, float]:
        """Numbers of the sum for the row of the round."""
        return {} if self._sum is None else self._sum.measures

    def close(
        self, replies: Iterable[Message], *, kept: bool = False, **notes: Any
    ) -> tuple[Aggregate | None, Updates]:
        """Read each reply and add its contribution when it arrives; release the mean of all.

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
        updates = Updates(kept=kept)
        with self._spending.closing() as release:
            try:
                if self._sum is None:
                    raise RoundDiscarded(self.discard_reason)
                self._add_each(replies, self._sum, updates)
                aggregate = self._sum.close()
            except RoundDiscarded as reason:
                self.discard_reason = str(reason)
                release.discard(self.discard_reason)
                return None, updates
            release.note(
                **{"cohort": len(self.cohort.partitions), **notes},
                answered=aggregate.answered,
                topped_up_stddev=aggregate.topped_up_stddev,
            )
        return aggregate, updates

    def _add_each(self, replies: Iterable[Message], summed: OpenSum, updates: Updates) -> None:
        assert self.requests is not None
        for partition, update in self.requests.accepted(replies, summed.read):
            summed.add(update)
            updates.add(partition, update)


class Updates:
    """The accepted updates of a round, by partition.

    Parameters
    ----------
    kept : bool
        True to keep the updates; else only their metrics stay.

    Attributes
    ----------
    metrics : Mapping[int, Mapping[str, float]]
        Metrics of the updates.
    each : Mapping[int, Update]
        The updates. Without ``kept``, reading one raises InvalidValue.
    """

    def __init__(self, *, kept: bool) -> None:
        self.metrics: dict[int, Mapping[str, float]] = {}
        self._kept: dict[int, records.Update] | None = {} if kept else None
        self.each = _NotKept(self.metrics) if self._kept is None else self._kept

    def add(self, partition: int, update: records.Update) -> None:
        """Note an update's metrics, and keep the update if the updates are kept."""
        self.metrics[partition] = update.metrics
        if self._kept is not None:
            self._kept[partition] = update


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
