"""Facts of runs, as privacy plans receive them."""

from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.run_facts import MethodTraits, RunFacts

METHOD = MethodTraits(name="method")


def run_facts(uploads=None, *, rounds=0, **facts):
    """Return facts of a run with so many uploads of each unit, or with so many rounds."""
    participations = Participations()
    participations.rounds = rounds
    participations.uploads.update(uploads or {})
    return RunFacts(**{"method": METHOD, "participations": participations, **facts})


def worst_case(rounds, cohort_size):
    """Return the participations of units in every round, in cohorts that all answer."""
    schedule = Participations()
    for _ in range(rounds):
        schedule.record(range(cohort_size), cohort_size)
    return schedule
