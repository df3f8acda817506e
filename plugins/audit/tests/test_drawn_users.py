"""Tests of what the server learns of a user from many sums, if silos draw users by a shared key."""

import numpy as np
from flwr.app import RecordDict

from flower_ext.federation._flower_private import SimulatedContext
from flower_ext.federation.client import user_draws
from flower_ext.federation.client.user_draws import draw_users, draws_vault
from flower_ext.privacy import PoissonSampling, SecureNoise, privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.randomness import keyed_generator
from flower_ext.privacy.units import NeighboringRelation
from flower_ext_audit import BoundTerms, by_rates
from tests.support.silos import task

KEY = bytes(range(32))
ROUNDS, NOISE, TRIALS, DELTA = 64, 2.0, 4000, 0.01
FEW = PoissonSampling(TRIALS, 0.2)


def sums_of_canaries(present):
    """Return what a server sees of each user over all rounds, whose sums hold that user alone."""
    context = SimulatedContext(
        run_id=1, node_id=0, node_config={"partition-id": 0}, state=RecordDict(), run_config={}
    )
    vault, total = draws_vault(context, "uldp_avg"), np.zeros(TRIALS)
    for number in range(1, ROUNDS + 1):
        total[draw_users(task(draw_key=KEY), vault, ("study", 1), number, FEW)] += float(present)
    return SecureNoise().add_gaussian({"sum": total}, NOISE * ROUNDS**0.5)["sum"]


def bound_and_reported(confidence):
    """Return the lower bound on ε that canaries show, and the ε that the accountant reports."""
    release = Release(
        sampling=FEW, noise_multiplier=NOISE, relation=NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    reported = privacy_loss_of({release: ROUNDS}, delta=DELTA).epsilon
    terms = BoundTerms(delta=DELTA, confidence=confidence, reported=reported)
    return by_rates(sums_of_canaries(False), sums_of_canaries(True), terms).epsilon, reported


def test_what_many_rounds_show_of_a_user_stays_below_epsilon():
    bound, reported = bound_and_reported(1 - 1e-6)
    assert bound < reported


def test_a_draw_that_does_not_depend_on_the_round_exceeds_epsilon(monkeypatch):
    def forgetful(key, *path):
        return keyed_generator(key, *path[:-1])

    monkeypatch.setattr(user_draws, "keyed_generator", forgetful)
    bound, reported = bound_and_reported(0.99)
    assert bound > reported, (bound, reported)
