"""The privacy that a run may spend and has spent: its budget and its ledger.

Runs on the same population may share a budget. The population's account then records what they have
spent together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from flower_ext.errors import InvalidValue
from flower_ext.privacy import Budget, BudgetExhausted, Guarantee, Ledger, Release, epsilon_text
from flower_ext.privacy.guarantee import claim_against
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.mechanisms.noised_sum import QuerySum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.shared_ledger import Charge, charge, note_claims, note_uncovered
from flower_ext.privacy.study_composition import WITHOUT_NOISE
from flower_ext.privacy.units import AdversaryView
from flower_ext.privacy.withdrawal import withdrawn


@dataclass(kw_only=True)
class Spending:
    """The privacy that one run may spend and has spent.

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
    identity: Mapping[str, str] = field(default_factory=dict, init=False)
    """Names of the run, its method and its directory in the population's account."""
    repeatable: bool = field(default=False, init=False)
    """True if a repeated round makes the same release as the first attempt."""
    start: str = field(default_factory=lambda: uuid4().hex, init=False)
    """Identifies this process in the population's account."""
    _reservation: Reservation = field(default_factory=Reservation)
    _release: ExitStack = field(default_factory=ExitStack)

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
        """Refuse a plan that does not fit the ledger or the budget.

        Raises
        ------
        InvalidValue
            The run has a ledger, but the plan makes no releases that a ledger could record. Or the
            δ of the plan does not fit the δ of the budget.
        """
        if self.budget is not None:
            _check_budget_fits(self.budget, mechanism.delta)
        if self.ledger is not None and mechanism.release is None:
            raise InvalidValue(
                f"ledger= with a {type(mechanism).__name__}: expected a ReleasePlan, whose "
                "releases a ledger records; to limit a run under another private plan, give "
                "budget= in place of ledger="
            )

    def charge(
        self,
        mechanism: RoundMechanism,
        server_round: int,
        run: RunSummary,
        claims: Sequence[Guarantee],
        *,
        answered: QuerySum | None = None,
    ) -> None:
        """Charge a round, or an evaluation; refuse one that brings the provable ε above the budget.

        If several runs share an account, the function writes the charge to the account. If the
        budget is for this run alone, it only checks the budget.

        Parameters
        ----------
        mechanism : RoundMechanism
        server_round : int
            Number of the round, for the message.
        run : RunSummary
            The run, including that round.
        claims : Sequence[Guarantee]
            The guarantees of such a run, which a shared account records.
        answered : QuerySum, optional
            The mechanism of the query whose answer the round releases; None for a training round.
            The account lists the answers to a query as a separate run.

        Raises
        ------
        BudgetExhausted
            The round would exceed the budget; the message says by how much.
        """
        if self.budget is None:
            return
        epsilon = mechanism.spent(run).get("epsilon_provable", float("inf"))
        if self.budget.ledger is None:
            if epsilon > self.budget.epsilon:
                what = f"{answered.query.name + ' after ' if answered else ''}round {server_round}"
                raise BudgetExhausted(
                    f"{what} would bring the provable spend to ε = {epsilon_text(epsilon)}, "
                    f"above the budget of {self.budget.epsilon:g}"
                )
            return
        name, number = "", run.participations.rounds
        release = mechanism.release_in(number)
        if answered is not None:
            name, release = answered.query.name, answered.release
            number = run.participations.answers[name]
        # The account lists what no ε covers, whatever becomes of this round.
        for exposure in self.exposed:
            note_uncovered(self.budget.ledger, **self.identity, what=exposure)
        if mechanism.delta is None:
            note_uncovered(self.budget.ledger, **self.identity, what=WITHOUT_NOISE)
            return
        provable = [claim for claim in claims if claim.basis == "provable"]
        claim = claim_against(AdversaryView.RELEASED_MODELS, provable)
        assert claim is not None  # every adversary sees the released models
        new = Charge(
            **self.identity,
            query=name,
            start=self.start,
            training=number,
            repeatable=self.repeatable,
            unit=claim.unit,
            relation=claim.relation if release is None else release.relation,
            epsilon=epsilon,
            delta=claim.delta if release is None else mechanism.delta,
            release=release,
            claims=provable,
        )
        charge(self.budget.ledger, new, self.budget)

    def note(self, guarantees: Sequence[Guarantee]) -> None:
        """Note the run's guarantees so far in the population's account, if the run has one."""
        if self.budget is not None and self.budget.ledger is not None and guarantees:
            provable = [claim for claim in guarantees if claim.basis == "provable"]
            note_claims(self.budget.ledger, provable, **self.identity, start=self.start)

    def reserve(self, release: Release | None, server_round: int, identity: int | None) -> None:
        """Write a release to the ledger, durably, before the server asks any client.

        Parameters
        ----------
        release : Release, optional
            The release. If it is None, the round releases no noised sum, and the function writes
            nothing.
        server_round : int
            Number of the round.
        identity : int, optional
            None if a repeated round has new noise. Otherwise a repeated round releases the same
            numbers bit for bit, and ``identity`` stands for everything that determines them: the
            ledger then counts the repetition once (see `Ledger.reserve`).
        """
        if release is not None and self.ledger is not None:
            entry = self.ledger.reserve(release, round=server_round, identity=identity)
            self._reservation = self._release.enter_context(entry)

    @contextmanager
    def closing(self) -> Iterator[Reservation]:
        """Close the reserved release after the block; if the block fails, discard the release."""
        with self._release:
            yield self._reservation


def _check_budget_fits(budget: Budget, delta: float | None) -> None:
    """Refuse a budget whose δ does not fit the plan's δ.

    If the budget is for one run alone, refuse it also under a plan that promises no privacy.
    """
    if budget.ledger is None and delta is None:
        raise InvalidValue(
            f"budget of epsilon={budget.epsilon!r}: expected budget=None, because the plan "
            "promises no privacy"
        )
    if budget.ledger is None and delta != budget.delta:
        raise InvalidValue(f"budget.delta={budget.delta!r}: expected the δ of the plan, {delta!r}")
    if delta is not None and delta > budget.delta:
        raise InvalidValue(
            f"budget.delta={budget.delta!r}: expected at least the δ of the plan, {delta!r}"
        )
