"""Summaries of runs, as privacy plans receive them."""

from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.run_summary import MethodTraits, RunSummary

METHOD = MethodTraits(name="method")


def run_summary(uploads=None, *, rounds=0, **values):
    """Return the summary of a run with so many uploads of each unit, or with so many rounds."""
    participations = Participations()
    participations.rounds = rounds
    participations.uploads.update(uploads or {})
    return RunSummary(**{"method": METHOD, "participations": participations, **values})


def worst_case(rounds, cohort_size):
    """Return the participations of units in every round, in cohorts that all answer."""
    schedule = Participations()
    for _ in range(rounds):
        schedule.record(range(cohort_size), cohort_size)
    return schedule
