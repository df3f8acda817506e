"""The privacy that a run may spend and has spent: its budget and its ledger.

Runs on the same population may share a budget. The population's account then records what they have
spent together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from flower_ext.errors import InvalidValue
from flower_ext.privacy import Budget, Ledger, Release
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.withdrawal import withdrawn


@dataclass(kw_only=True)
class Spending:
    """The privacy that one run may spend and has spent; `claims.charge` charges its budget.

    Parameters
    ----------
    ledger : Ledger, optional
        Records every release before it is made.
    budget : Budget, optional
        Limit of the provable ε: a round that would exceed it is refused.
    exposed : Sequence[str]
        One line for each thing that the run reveals about clients' data and that no ε covers. The
        population's account records these lines.
    """

    ledger: Ledger | None
    budget: Budget | None
    exposed: Sequence[str]
    start: str = field(default_factory=lambda: uuid4().hex, init=False)
    """Identifies this process in the population's account."""
    _reservation: Reservation = field(default_factory=Reservation, init=False)
    _release: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def limited(self) -> bool:
        """True if the run has a budget, at which it ends."""
        return self.budget is not None or (
            self.ledger is not None and self.ledger.budget is not None
        )

    @property
    def account(self) -> Path | None:
        """Path of the account shared by all runs on a population; None before the first charge."""
        path = None if self.budget is None else self.budget.ledger
        return path if path is not None and path.is_file() else None

    @property
    def withdrawn(self) -> frozenset[int]:
        """Numbers of the units that withdrew, as the population's account has them now."""
        return frozenset() if self.account is None else withdrawn(Ledger.read(self.account))

    def check_plan(self, mechanism: RoundMechanism) -> None:
        """Refuse a plan that does not fit the budget, or that makes no releases for the ledger."""
        budget, delta = self.budget, mechanism.delta
        if budget is not None and budget.ledger is None and delta is None:
            raise InvalidValue(
                f"budget of epsilon={budget.epsilon!r}: expected budget=None, because the plan "
                "promises no privacy"
            )
        if budget is not None and budget.ledger is None and delta != budget.delta:
            raise InvalidValue(
                f"budget.delta={budget.delta!r}: expected the δ of the plan, {delta!r}"
            )
        if budget is not None and delta is not None and delta > budget.delta:
            raise InvalidValue(
                f"budget.delta={budget.delta!r}: expected at least the δ of the plan, {delta!r}"
            )
        if self.ledger is not None and mechanism.release is None:
            raise InvalidValue(
                f"ledger= with a {type(mechanism).__name__}: expected a ReleasePlan, whose "
                "releases a ledger records; to limit a run under another private plan, give "
                "budget= in place of ledger="
            )

    def reserve(self, release: Release | None, server_round: int, identity: int | None) -> None:
        """Write a release, if the round makes one, to the ledger before the server asks any client.

        ``identity`` is None if a repeated round has new noise. Otherwise a repeated round releases
        the same numbers, and ``identity`` stands for everything that determines them: the ledger
        then counts the repetition once (see `Ledger.reserve`).
        """
        if release is not None and self.ledger is not None:
            entry = self.ledger.reserve(release, round=server_round, identity=identity)
            self._reservation = self._release.enter_context(entry)

    @contextmanager
    def closing(self) -> Iterator[Reservation]:
        """Close the reserved release after the block; if the block fails, discard the release."""
        with self._release:
            yield self._reservation
