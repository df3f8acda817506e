"""The guarantees of a run: what its method claims, what no guarantee covers, and what was spent."""

from __future__ import annotations

from dataclasses import replace

from flower_ext.federation.method import State
from flower_ext.federation.run import Run
from flower_ext.privacy import Guarantee
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.noised_sum import QuerySum
from flower_ext.privacy.run_summary import RunSummary

_ROUNDS_ALONE = "the published claim covers training rounds only"


def summary_of(run: Run) -> RunSummary:
    """Return the facts of the run so far from which a plan computes its guarantees."""
    method, roster = run.method, run.clients.roster
    weights = [training.proximal_weight for training in method.training.values()]
    traits = method.traits
    if roster is not None and roster.foreign:  # such clients may remember anything
        traits = replace(traits, keeps_memory=True)
    summary = RunSummary(
        method=traits,
        participations=run.participations,
        num_examples=run.num_examples,
        training=method.training,
        proximal_weight=min(weights, default=0.0) + method.added_proximal_weight,
        sent=run.model,
        secure_noise=not run.seeded_noise,
        secure_cohorts=not run.repeats,
        not_covered=not_covered(run),
    )
    return method.complete_summary(summary, run.state or State())


def claims_of(run: Run, summary: RunSummary) -> list[Guarantee]:
    """Return the guarantees that the run's method claims for a run with this summary."""
    return run.method.claims(run.plan, summary, run.state or State(), run.summation)


def guarantees_of(run: Run) -> list[Guarantee]:
    """Return the published and the provable guarantees of all rounds so far."""
    if not run.participations.rounds:
        return []
    summary = summary_of(run)
    units = run.plan.num_units(summary)
    claims = [replace(claim, units=units) for claim in claims_of(run, summary)]
    if not (answered := run.participations.answers):
        return claims
    beside = f"noised sums of {', '.join(answered)}: {_ROUNDS_ALONE}"
    return [
        replace(claim, not_covered=(*claim.not_covered, beside))
        if claim.basis == "published"
        else claim
        for claim in claims
    ]


def spent_by(run: Run) -> dict[str, float]:
    """Return the ε spent so far, its δ and related numbers, for the log and the report."""
    summary, mechanism = summary_of(run), run.mechanism
    spent = mechanism.spent(summary)
    if spent and mechanism.delta is not None:
        spent["delta"] = mechanism.delta
        if units := run.plan.num_units(summary):
            spent["privacy_units"] = units
    if mechanism.release is not None:  # other plans have it in `spent` already
        for claim in claims_of(run, summary):
            if claim.basis == "published":
                spent["epsilon_published"] = claim.epsilon
    return spent


def not_covered(run: Run) -> list[str]:
    """Return one line for each thing that leaves the clients in this run without a guarantee."""
    exposed = ["whether and when each client answered"]
    noised = any(sums.query.schedule == "in evaluations" for sums in run.query_sums)
    if run.evaluate_every and not noised:
        exposed.append(
            "scores and test-set sizes that clients report un-noised at evaluation "
            "(evaluate_every=0 turns this off)"
        )
    if run.evaluate_every and run.training_loss:
        exposed.append(
            "losses on training records that clients report un-noised at evaluation "
            "(training_loss=False turns this off)"
        )
    if run.diagnostics:
        exposed.append("norms of updates before clipping (diagnostics=False turns this off)")
    return [*exposed, *run.spending.exposed, *run.method.disclosures(run.summation)]


def check_training(run: Run) -> None:
    """Refuse local training that the plan does not cover; every round calls this check.

    Raises
    ------
    InvalidValue
        A setting does not fit; the message names it, and the value that the plan expects.
    """
    run.mechanism.check_training(summary_of(run))


def charge(
    run: Run, server_round: int, after: Participations, *, answered: QuerySum | None = None
) -> None:
    """Charge a round to the run's budget before the server asks any client.

    Parameters
    ----------
    run : Run
    server_round : int
        Number of the round, for the message.
    after : Participations
        Participations of all units once every asked client has answered.
    answered : QuerySum, optional
        The mechanism of the query whose answer the round releases; None for a training round.

    Raises
    ------
    BudgetExhausted
        The provable ε would exceed the budget; the message says by how much.
    """
    budget = run.spending.budget
    if budget is None:
        return
    summary = replace(summary_of(run), participations=after)
    claims = [] if budget.ledger is None else claims_of(run, summary)
    run.spending.charge(run.mechanism, server_round, summary, claims, answered=answered)
