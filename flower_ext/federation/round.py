"""One round that releases a mean: open the sum, ask clients, read and add up their answers.

Training and evaluation under noise are both such rounds. They differ in the messages, in the
mechanism and in the use of the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation.exchange import Content, Requests
from flower_ext.federation.records import Update
from flower_ext.federation.spending import Spending
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded


class Round:
    """One round, whose sum is open: call `ask`, and then `close`.

    Reserve the spend before you create the round (`Spending.reserve`): a client that was asked may
    have uploaded, even if the server then fails.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        Type of the messages.
    summation : Summation
    opening : Opening
    spending : Spending
    """

    def __init__(
        self, kind: str, summation: Summation, opening: Opening, spending: Spending
    ) -> None:
        self.kind, self.server_round = kind, opening.server_round
        self._clients, self._spending = opening.clients, spending
        self._sum: OpenSum | None = None
        self.requests: Requests | None = None
        """The messages to the cohort; None before `ask`."""
        self.discard_reason = ""
        """The reason why the round released nothing; empty if it released a mean."""
        self.cohort = replace(opening.cohort, partitions=())
        """The clients that contribute, or none if too few are left. The cohort's units stay,
        because they were drawn and the round counts for them."""
        try:
            self._sum = summation.open(opening)
            self.cohort = self._sum.cohort
        except RoundDiscarded as reason:
            self.discard_reason = str(reason)

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the records that the method and the sum add to one client's message."""
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
        """Numbers of the sum, such as seconds, for the metrics of the round."""
        return {} if self._sum is None else self._sum.measures

    def close(
        self, replies: Iterable[Message], *, kept: bool = False, **notes: Any
    ) -> tuple[Aggregate | None, Mapping[int, Update]]:
        """Read each reply and add its contribution when it arrives; release the mean of all.

        Parameters
        ----------
        replies : Iterable[Message]
        kept : bool
            True to keep the arrays of each contribution.
        **notes
            Facts to keep with the release in the ledger.

        Returns
        -------
        Aggregate or None
            The released mean; None if the round is discarded. The privacy of a discarded round is
            spent.
        Mapping[int, Update]
            The accepted contributions by partition; without ``kept``, only their metrics.
        """
        updates: dict[int, Update] = {}
        # The reserved release closes with the block, discarded or not: it is spent either way.
        with self._spending.closing() as release:
            try:
                if self._sum is None:
                    raise RoundDiscarded(self.discard_reason)
                assert self.requests is not None
                for partition, update in self.requests.accepted(replies, self._sum.read):
                    self._sum.add(update)
                    # Keep no arrays: a thousand models do not fit into memory at a time.
                    updates[partition] = update if kept else Update(_NOT_KEPT, update.metrics)
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


class _NotKept(dict[str, np.ndarray]):
    """In place of the arrays of an update, which the server has added up and dropped."""

    def _refuse(self, *arguments: object) -> NoReturn:
        raise InvalidValue(
            "the server added the round's updates up as they arrived and did not keep them: set "
            "needs_each_update = True in a method whose step reads single updates"
        )

    __getitem__ = __iter__ = __len__ = keys = values = items = get = _refuse


_NOT_KEPT = _NotKept()
