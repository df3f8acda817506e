"""The privacy that a run spends: its ledger, its budget, and its open release."""

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
    """The privacy that one run may spend and has spent.

    Runs on the same population may share a budget. The budget's account then records what
    these runs spend together (`run_guarantees.charge`).
    """

    ledger: Ledger | None
    """Records every release before it is made."""
    budget: Budget | None
    """Limit of the provable ε: a round that would exceed it is refused."""
    disclosures: Sequence[str]
    """One line for each thing that the run reveals about clients' data and that no ε covers."""
    process_id: str = field(default_factory=lambda: uuid4().hex, init=False)
    """Identifies this process in the population's account."""
    _reservation: Reservation = field(default_factory=Reservation, init=False)
    _release: ExitStack = field(default_factory=ExitStack, init=False)

    @property
    def limited(self) -> bool:
        """True if the run has a budget, at which it ends."""
        ledger = self.ledger
        return self.budget is not None or (ledger is not None and ledger.budget is not None)

    @property
    def account(self) -> Path | None:
        """Path of the account shared by all runs on a population; None if no such file exists."""
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
        # An ε at δ = 0 holds at every δ.
        if budget is not None and budget.ledger is None and delta not in (0, budget.delta):
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
        """Before the server asks any client, write the round's release, if any, to the ledger.

        If a repeated round would have new noise, ``identity`` is None, and the ledger counts both
        attempts. If a repeated round releases the same numbers again, ``identity`` identifies these
        numbers, and the ledger counts the two attempts as one release (see `Ledger.reserve`).
        """
        if release is not None and self.ledger is not None:
            entry = self.ledger.reserve(release, server_round=server_round, identity=identity)
            self._reservation = self._release.enter_context(entry)

    @contextmanager
    def closing(self) -> Iterator[Reservation]:
        """Close the reserved release after the block; if the block fails, discard the release."""
        with self._release:
            yield self._reservation
