"""Faults that an attack finds by a score of its own, and not by that of the mechanism."""

from dataclasses import replace

import numpy as np

from flower_ext.federation.storage.noise_stream import NoiseStream
from flower_ext.privacy import AdaptiveClipping, SpacedSampling
from flower_ext.privacy.mechanisms.adaptive_clipping import SIDE
from flower_ext.privacy.mechanisms.correlated_noise import PreparedNoise
from flower_ext.privacy.plans.release_mechanism import AdaptiveRelease
from flower_ext_audit.experiment import NEXT_NORM, Experiment, projected
from flower_ext_audit.linear import SIZE, axes
from flower_ext_audit.mechanisms import MECHANISMS
from flower_ext_audit.mechanisms.of_clients import of_correlated
from tests.support.planted_faults import change_noises


def side_unnoised(patch, experiment: Experiment) -> Experiment:
    """Leave the sides of updates without noise; the attack looks at them alone."""
    change_noises(patch, lambda add, arrays, size: {**add(arrays, size), SIDE: arrays[SIDE]})
    alone = {SIDE: -np.ones(1), NEXT_NORM: np.ones(1)}
    return replace(experiment, score=projected(alone))


def noise_of_the_next_norm(patch, experiment: Experiment) -> Experiment:
    """The server noises updates by the norm of the next round, which often is far smaller."""
    real = AdaptiveRelease.aggregate

    def collapsing(self, norm, fraction):
        return norm if fraction < self.quantile / 10 else norm / 1e6

    def aggregate(self, summed, *, noise, **options):
        released = real(self, summed, noise=noise, **options)
        _, following = self.after(released)
        value = {n: array for n, array in summed.value.items() if n != SIDE}
        late = noise.add_gaussian(value, following.noise_stddev)
        by = self.sampling.expected_cohort_size
        mean = {n: (a / by).astype(summed.like[n].dtype) for n, a in late.items()}
        return replace(released, value={**released.value, **mean})

    patch.setattr(AdaptiveClipping, "next_norm", collapsing)
    patch.setattr(AdaptiveRelease, "aggregate", aggregate)
    return replace(experiment, score=projected(axes(SIZE)))


def turns_not_apart(patch, experiment: Experiment) -> Experiment:
    """Ask the canary in every round, in which it pulls in one direction."""
    patch.setattr(SpacedSampling, "draw", lambda self, rng, so_far=None: [0])
    matrix = MECHANISMS["correlated-noise"].plan(1.0, experiment.rounds).mechanism().strategy
    moves = matrix.row_moves(experiment.rounds, rounds_apart=1, participations=experiment.rounds)
    return replace(experiment, score=of_correlated(moves), on_round=None)


def noise_of_a_round_repeated(patch, experiment: Experiment) -> Experiment:
    """Round 2 has the noise of round 1, as if the run had resumed without its newest state."""
    real, first = NoiseStream.at, []

    def at(self, number, like, source, *, repeats):
        noise = real(self, number, like, source, repeats=repeats)
        if number == 1:
            first[:] = [self._past.latest]
        return noise if number > 2 else PreparedNoise(first[0], is_secure=True)

    patch.setattr(NoiseStream, "at", at)
    return replace(experiment, score=projected(axes(SIZE), signs=(1.0, -1.0, 0.0)))
