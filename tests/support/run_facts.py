"""Runs as plans know them."""

from flower_ext.privacy.participations import Participations
from flower_ext.privacy.run_facts import MethodTraits, RunFacts

METHOD = MethodTraits(name="method")


def run_facts(uploads=None, *, rounds=0, **facts):
    """Facts of a run in which each unit had so many uploads, or that had so many rounds."""
    participations = Participations()
    participations.rounds = rounds
    participations.uploads.update(uploads or {})
    return RunFacts(**{"method": METHOD, "participations": participations, **facts})
