"""Privacy that a run may spend, and has spent: budget, ledger, the account of a population."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from flower_ext.errors import InvalidValue
from flower_ext.privacy import Budget, BudgetExhausted, Guarantee, Ledger, PrivacyPlan, Release
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.run_facts import RunFacts
from flower_ext.privacy.shared_ledger import Charge, charge, note_uncovered


@dataclass(kw_only=True)
class Spending:
    """The spending of one run.

    Parameters
    ----------
    ledger : Ledger, optional
        Holds every release, before it is made.
    budget : Budget, optional
        Refuses a round that would exceed it.
    exposed : Sequence[str]
        What else shows anything of the clients' data: named in a population's account.
    """

    ledger: Ledger | None
    budget: Budget | None
    exposed: Sequence[str]
    _reservation: Reservation = field(default_factory=Reservation)
    _release: ExitStack = field(default_factory=ExitStack)

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Refuse a plan without a release that a ledger could hold, or of another δ.

        Raises
        ------
        ValueError
            Names what does not fit.
        """
        if self.budget is not None:
            _check_budget_fits(self.budget, plan.delta)
        if self.ledger is not None and plan.release is None:
            raise InvalidValue(
                f"ledger with a {type(plan).__name__}: it records the releases of a "
                "ReleasePlan alone; budget= stops a run under any plan that promises privacy"
            )

    def check(
        self,
        plan: PrivacyPlan,
        server_round: int,
        run: RunFacts,
        claims: Callable[[RunFacts], list[Guarantee]],
        *,
        repeatable: bool,
        run_id: str,
        method: str,
        name: str,
    ) -> None:
        """Refuse a round with which the provable ε would exceed the budget.

        Parameters
        ----------
        run : RunFacts
            The run as it is with that round.
        repeatable : bool
            The round, done again, is the same release.
        run_id, method, name : str
            Name the run in the population's account.

        Raises
        ------
        BudgetExhausted
            Says by how much.
        """
        if self.budget is None:
            return
        epsilon = plan.spent(run).get("epsilon_provable", float("inf"))
        if self.budget.ledger is None:
            if epsilon > self.budget.epsilon:
                raise BudgetExhausted(
                    f"round {server_round} would bring the provable spend to ε = {epsilon:.4g}, "
                    f"above the budget of {self.budget.epsilon:g}"
                )
            return
        who = {"run": run_id, "method": method, "name": name}
        for shown in self.exposed:
            note_uncovered(self.budget.ledger, **who, what=shown)
        release, delta = plan.release, plan.delta
        if delta is None:
            note_uncovered(self.budget.ledger, **who, what="training without noise")
            return
        claim = next(each for each in claims(run) if each.basis == "provable")
        new = Charge(
            **who,
            training=run.participations.rounds,
            repeatable=repeatable,
            unit=claim.unit,
            relation=claim.relation if release is None else release.relation,
            epsilon=epsilon,
            delta=claim.delta if release is None else delta,
            release=release,
        )
        charge(self.budget.ledger, new, self.budget)

    def reserve(self, release: Release | None, server_round: int, identity: int | None) -> None:
        """Make a release's line in the ledger durable, before anybody is asked.

        Parameters
        ----------
        release : Release, optional
            None where a round releases no noised sum: nothing is written.
        identity : int, optional
            Names a release that is the same one when it is done again.
        """
        if release is not None and self.ledger is not None:
            entry = self.ledger.reserve(release, round=server_round, identity=identity)
            self._reservation = self._release.enter_context(entry)

    @contextmanager
    def closing(self) -> Iterator[Reservation]:
        """Close the reserved release after the block; an error in it discards the release."""
        with self._release:
            yield self._reservation


def _check_budget_fits(budget: Budget, delta: float | None) -> None:
    """Refuse a δ that the plan does not promise, and a budget that nothing can be held to."""
    if budget.ledger is None and delta != budget.delta:
        raise InvalidValue(
            f"budget.delta={budget.delta!r}: expected that of the plan, "
            f"{'which promises no privacy' if delta is None else delta!r}"
        )
    if delta is not None and delta > budget.delta:
        raise InvalidValue(
            f"budget.delta={budget.delta!r}: expected at least that of the plan, {delta!r}"
        )
