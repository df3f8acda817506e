"""The guarantees of a run: what its method claims, what no guarantee covers, and the ε spent."""

from dataclasses import replace

from flower_ext.federation.method_state import State
from flower_ext.federation.server.run import Run
from flower_ext.privacy import BudgetExhausted, Guarantee, epsilon_text
from flower_ext.privacy.account_entries import WITHOUT_NOISE
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import claim_against
from flower_ext.privacy.mechanisms.noised_sum import QuerySum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.shared_ledger import Charge, note_claims, note_disclosure
from flower_ext.privacy.shared_ledger import charge as charge_account
from flower_ext.privacy.units import AdversaryView


def summary_of(run: Run) -> RunSummary:
    """Return the summary of the run so far, from which the plan computes the run's guarantees."""
    method, traits = run.method, run.method.traits
    weights = [training.proximal_weight for training in method.training.values()]
    if run.clients.roster.foreign:  # such clients may remember anything
        traits = replace(traits, keeps_memory=True)
    summary = RunSummary(
        method=traits,
        participations=run.participations,
        sums=run.summation.terms,
        num_examples=run.num_examples,
        training=method.training,
        proximal_weight=min(weights, default=0.0) + traits.added_proximal_weight,
        sent=run.model,
        secure_noise=not run.options.seeded_noise,
        secure_cohorts=not run.repeats,
        not_covered=not_covered(run),
    )
    return method.complete_summary(summary, run.state or State())


def claims_of(run: Run, summary: RunSummary) -> list[Guarantee]:
    """Return the guarantees that the run's method claims for a run with this summary."""
    if not summary.participations.rounds:  # without a training round, a paper claims nothing
        return [*run.mechanism.guarantees(summary)]
    return run.method.claims(summary, run.mechanism)


def guarantees_of(run: Run) -> list[Guarantee]:
    """Return the published and the provable guarantees of all rounds so far."""
    rounds, answered = run.participations.rounds, run.participations.answers
    if not (rounds or answered):
        return []
    summary = summary_of(run)
    units = run.plan.num_units(summary)
    claims = [replace(claim, units=units) for claim in claims_of(run, summary)]
    if not answered:
        return claims
    text = f"noised sums of {', '.join(answered)}: the published claim covers training rounds only"
    return [
        replace(claim, not_covered=(*claim.not_covered, text))
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
    if mechanism.release is not None:  # under other plans, ``spent`` has it already
        for claim in claims_of(run, summary):
            if claim.basis == "published":
                spent["epsilon_published"] = claim.epsilon
    return spent


def not_covered(run: Run) -> list[str]:
    """Return one line for each thing that this run reveals and that no guarantee covers."""
    texts, options = ["whether and when each client answered"], run.options
    noised = any(each.query.schedule == "in evaluations" for each in run.query_sums)
    if options.evaluate_every and not noised:
        texts.append(
            "scores and test-set sizes that clients report un-noised at evaluation "
            "(evaluate_every=0 turns this off)"
        )
    if options.evaluate_every and options.training_loss:
        texts.append(
            "losses on training records that clients report un-noised at evaluation "
            "(training_loss=False turns this off)"
        )
    if options.diagnostics:
        texts.append("norms of updates before clipping (diagnostics=False turns this off)")
    if run.clients.roster.foreign and run.mechanism.delta is not None:
        texts.append("whether the training of up to three clients failed in the rehearsal")
    return [*texts, *run.spending.disclosures, *run.method.disclosures(run.summation)]


def charge(
    run: Run, server_round: int, after: Participations, *, answered: QuerySum | None = None
) -> None:
    """Charge a round to the run's budget before the server asks any client.

    ``after`` counts the participations as if every client of the round had answered already. In a
    round that answers a query, ``answered`` is the query's mechanism; in a training round it is
    None. If the budget is for this run alone, only check the budget, and write nothing.
    """
    mechanism, budget = run.mechanism, run.spending.budget
    if budget is None:
        return
    summary = replace(summary_of(run), participations=after)
    epsilon = mechanism.spent(summary).get("epsilon_provable", float("inf"))
    if budget.ledger is None:
        if epsilon > budget.epsilon:
            what = f"{answered.query.name + ' after ' if answered else ''}round {server_round}"
            raise BudgetExhausted(
                f"{what} would bring the provable spend to ε = {epsilon_text(epsilon)}, "
                f"above the budget of {budget.epsilon:g}"
            )
        return
    query, number = "", after.rounds  # the account lists answers to a query as a separate run
    release = mechanism.release_in(number)
    if answered is not None:
        query, release = answered.query.name, answered.release
        number = after.answers[query]
    # The account lists what no ε covers, whatever becomes of this round.
    without_noise = [WITHOUT_NOISE] if mechanism.delta is None else []
    for disclosure in (*run.spending.disclosures, *without_noise):
        note_disclosure(budget.ledger, **run.identity, what=disclosure)
    if mechanism.delta is None:
        return
    provable = [claim for claim in claims_of(run, summary) if claim.basis == "provable"]
    claim = claim_against(AdversaryView.RELEASED_MODELS, provable)
    assert claim is not None  # every adversary sees the released models
    new = Charge(
        **run.identity,
        query=query,
        start=run.spending.process_id,
        training=number,
        repeatable=run.repeats,
        unit=claim.unit,
        population=run.population.sampling.population,
        relation=claim.relation if release is None else release.relation,
        epsilon=epsilon,
        delta=claim.delta if release is None else mechanism.delta,
        release=release,
        claims=provable,
    )
    charge_account(budget.ledger, new, budget)


def save_guarantees(run: Run, *, in_account: bool = True) -> None:
    """Write the guarantees so far to ``guarantee.json``, and to the population's account.

    If ``in_account`` is False, write only the file. The account needs the guarantees only when the
    run ends, because it already has each round's charge.
    """
    guarantees, budget = guarantees_of(run), run.spending.budget
    if in_account and guarantees and budget is not None and budget.ledger is not None:
        provable = [claim for claim in guarantees if claim.basis == "provable"]
        note_claims(budget.ledger, provable, **run.identity, start=run.spending.process_id)
    if run.directory is not None:
        run.directory.save_guarantees(guarantees)
