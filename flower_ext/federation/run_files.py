"""The files of a run: its directory, its checkpoints, and its guarantees."""

from __future__ import annotations

from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.claims import guarantees_of
from flower_ext.federation.method import State, groups_under
from flower_ext.federation.run import Run
from flower_ext.federation.state.folder import Packed
from flower_ext.privacy import Budget
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.runs import RunWriter

MODEL = "model"
"""Group of the shared model in a checkpoint."""
_WRAPPER = "wrapper."
"""Prefix, in a checkpoint, of the groups that a wrapper of the strategy keeps."""


def attach(run: Run, directory: RunWriter, *, limit: Budget | None = None) -> None:
    """Let a run that has not begun write its files and its ledger to ``directory``.

    Parameters
    ----------
    run : Run
    directory : RunWriter
    limit : Budget, optional
        Budget of the new ledger. A plan that makes no releases has no ledger: ``limit`` then
        becomes the budget of the run, unless the run has one already.

    Raises
    ------
    InvalidValue
        The run writes to another directory already, or has begun.
    """
    if (other := run.checkpoints.directory) is not None:
        raise InvalidValue(
            f"run={str(other.path)!r}: the strategy already writes to this directory; create "
            "the strategy without the option run="
        )
    if run.participations.rounds:
        raise InvalidValue(
            f"strategy={run.method.name}: expected a strategy that has not run yet; create a "
            "new one for a new run"
        )
    run.write_to(directory)
    spending = run.spending
    if run.mechanism.release is not None:
        spending.ledger = spending.ledger or directory.open_ledger(budget=limit)
    elif spending.budget is None:
        spending.budget = limit


def save(run: Run, server_round: int, model: records.Arrays) -> None:
    """Write a checkpoint after a round: everything that changes between two rounds."""
    values = {
        "round": server_round,
        "participations": run.participations.to_dict(),
        "num_examples": [*run.num_examples.items()],  # JSON has no integers as keys
        "client_metrics": [*run.client_metrics.items()],
        "remembered": [*run.remembered.items()],
        "refusals": run.clients.refusals,
        "mechanism": run.mechanism.state,
        "plan": _terms(run),
    }
    groups = {
        MODEL: model,
        **(run.state or State()).groups(),
        **run.summation.state(),
        **{_WRAPPER + name: group for name, group in run.companions.items()},
    }
    run.checkpoints.save(server_round, values, groups)


def restore(run: Run, kept: Packed) -> None:
    """Restore a checkpoint, except for the state of the sums.

    Raises
    ------
    InvalidValue
        The run began under another plan.
    """
    values = kept.values
    if values["plan"] != _terms(run):
        raise InvalidValue(
            f"plan={run.plan.describe()!r} of a resumed run: expected the plan with which it "
            f"began, {values['plan'][0]!r}, because the guarantee counts all rounds under one "
            "plan; begin a new run"
        )
    run.population.participations = Participations.from_dict(values["participations"])
    run.num_examples = dict(values["num_examples"])
    run.client_metrics = dict(values["client_metrics"])
    run.remembered = dict(values["remembered"])
    run.clients.refusals.extend(values["refusals"])
    run.summation.mechanism = run.mechanism.restored(values["mechanism"])
    run.state = State.of_groups(kept.arrays)
    run.companions = groups_under(_WRAPPER, kept.arrays)


def _terms(run: Run) -> list[Any]:
    """Return the plan's description and its `Release`; a resumed run must have the same ones."""
    release = run.mechanism.release
    return [run.plan.describe(), None if release is None else release.to_dict()]


def save_guarantees(run: Run, *, in_account: bool = True) -> None:
    """Write the guarantees after the rounds so far to ``guarantee.json``.

    If ``in_account`` is True, write them to the population's account, too. Each round charges
    the account anyway, so it needs the guarantees only when the run ends.
    """
    guarantees = guarantees_of(run)
    if in_account:
        run.spending.note(guarantees)
    if run.checkpoints.directory is not None:
        run.checkpoints.directory.save_guarantees(guarantees)
