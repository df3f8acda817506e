"""Faults to plant in the real code, grouped by the mechanisms to which they apply."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from flower_ext.algorithms.uldp import averaging
from flower_ext.federation.server.round import Round
from flower_ext.federation.server.run import StrategyOptions
from flower_ext.privacy import (
    PoissonSampling,
    SecureNoise,
    SecureScores,
    SeededNoise,
    SpacedSampling,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.mechanisms import adaptive_clipping, noise, protections
from flower_ext.privacy.mechanisms.adaptive_clipping import SIDE
from flower_ext.privacy.mechanisms.bounds import BoundedSum, ClippedSum, clip
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.quantization import in_cells
from flower_ext.privacy.mechanisms.updates import RunningSum, in_float64, l2_norm
from flower_ext.secure.aggregation import mask_streams, member
from flower_ext.training.dp.dp_sgd import ClippedGradient

if TYPE_CHECKING:  # tests of the core plant faults without the plug-in that audits
    from flower_ext_audit import Experiment

ENORMOUS = 1e9
NOISES = ("add_gaussian", "add_discrete_gaussian")
"""The methods of `NoiseSource` that return arrays with noise: name a new kind of noise here.

Their first argument holds the arrays, and their second is the size of the noise, such as a standard
deviation.
"""


def change_noises(patch, changed):
    """Let ``changed(add, arrays, size)`` return the arrays with noise, for each of `NOISES`.

    ``add(arrays, size)`` is the real method.
    """

    def changing(real):
        def noised(self, arrays, size, **options):
            return changed(partial(real, self, **options), arrays, size)

        return noised

    for name in NOISES:
        patch.setattr(NoiseSource, name, changing(getattr(NoiseSource, name)))


def _not_clipped(update, clipping_norm):
    return BoundedSum(value=dict(update), bound=clipping_norm, count=1)


def _rows_not_clipped(rows, clipping_norm, weights=None):
    """Sum rows without clipping them, and claim the bound."""
    summed = {
        name: sum(w * row for w, row in zip(weights, array, strict=True)).double()
        for name, array in rows.items()
    }
    return BoundedSum(value=summed, bound=clipping_norm, count=len(weights))


def _cells_not_clipped(update, clipping_norm, cell):
    """Round an update to cells without clipping it, and claim the bound."""
    value = {
        name: np.rint(np.asarray(array, dtype=np.float64) / cell).astype(np.int64)
        for name, array in update.items()
    }
    return BoundedSum(value=value, bound=clipping_norm, cell=cell, count=1)


def _rows_in_cells_not_clipped(rows, clipping_norm, cell, weights):
    summed = _rows_not_clipped(rows, clipping_norm, weights).value
    return replace(_cells_not_clipped(summed, clipping_norm, cell), count=len(weights))


def _scores_not_clipped(self, client):
    """Return a vector of scores that are not clipped."""
    scores = client.scores(training=False)
    if not scores:
        return np.zeros(self.size)
    centred = [(scores[n] - (low + high) / 2) / (high - low) for n, low, high in self.bounds]
    return np.asarray([1.0, *centred])


def clipping_off(patch, experiment: Experiment) -> Experiment:
    """Remove clipping from every place that clips."""
    patch.setattr("flower_ext.privacy.mechanisms.protections.clip", _not_clipped)
    patch.setattr(adaptive_clipping, "clip", _not_clipped)
    patch.setattr(adaptive_clipping, "clip_each_row", lambda rows, norm: in_float64(rows))
    patch.setattr("flower_ext.privacy.mechanisms.protections.in_cells", _cells_not_clipped)
    patch.setattr(SecureScores, "vector", _scores_not_clipped)
    patch.setattr(ClippedSum, "add", RunningSum.add)
    patch.setattr(protections, "sum_clipped_rows", _rows_not_clipped)
    patch.setattr(protections, "sum_rows_in_cells", _rows_in_cells_not_clipped)
    made = ClippedGradient.__init__
    patch.setattr(
        ClippedGradient,
        "__init__",
        lambda self, task, names, *, clipping_norm, **more: made(
            self, task, names, clipping_norm=ENORMOUS, **more
        ),
    )
    return experiment


def arrays_clipped_apart(patch, experiment: Experiment) -> Experiment:
    """Clip each array of an update or of a gradient by itself to the whole norm."""
    rows_clipped, added = protections.sum_clipped_rows, ClippedGradient._add

    def each(clipped, update):
        parts = {name: clipped({name: array}) for name, array in update.items()}
        (bounded, *_), values = parts.values(), {n: p.value[n] for n, p in parts.items()}
        return replace(bounded, value=values)

    def clip_each(update, norm):
        return each(lambda part: clip(part, norm), update)

    def add_upload(self, upload):
        RunningSum.add(self, clip_each(upload, self.bound).value)

    def rows_each(rows, norm, weights):
        return each(lambda part: rows_clipped(part, norm, weights), rows)

    def add_each(self, summed, parts, passes):
        for name, part in parts.items():
            added(self, summed, {name: part}, passes)

    patch.setattr("flower_ext.privacy.mechanisms.protections.clip", clip_each)
    patch.setattr(ClippedSum, "add", add_upload)
    patch.setattr(protections, "sum_clipped_rows", rows_each)
    patch.setattr(ClippedGradient, "_add", add_each)
    return experiment


def rows_clipped_together(patch, experiment: Experiment) -> Experiment:
    """A silo clips and rounds the sum over its users, and not each user's weighted update."""

    def together(rows, clipping_norm, cell, weights):
        summed = _rows_not_clipped(rows, clipping_norm, weights).value
        return replace(in_cells(summed, clipping_norm, cell), count=len(weights))

    patch.setattr(protections, "sum_rows_in_cells", together)
    return experiment


def updates_clipped_late(patch, experiment: Experiment) -> Experiment:
    """Let each update of a sum keep up to 1.3 clipping norms."""
    patch.setattr("flower_ext.privacy.mechanisms.bounds._MARGIN", 1.3)
    return experiment


def less_noise_on(part: str, factor: float):
    """Divide the standard deviation of the noise on arrays whose names hold ``part``."""

    def plant(patch, experiment: Experiment) -> Experiment:
        drawn = NoiseSource.gaussian

        def gaussian(self, like, stddev):
            return {
                name: array / (factor if part in name else 1.0)
                for name, array in drawn(self, like, stddev).items()
            }

        def noised(add, arrays, size):
            usual, less = add(arrays, size), add(arrays, size / factor)
            return {name: (less if part in name else usual)[name] for name in arrays}

        patch.setattr(NoiseSource, "gaussian", gaussian)
        change_noises(patch, noised)
        return experiment

    return plant


def server_noise_reused(patch, experiment: Experiment) -> Experiment:
    """The server draws its noise of every two rounds from one stream."""
    keys: dict[tuple[str | int, ...], int] = {}

    class Reused(SecureNoise):
        def __init__(self, key: int) -> None:
            self.key = key

        def _generator(self):
            return seeded_generator(self.key)

    def noise_of(self, purpose, number, *more):
        path = (purpose, (number + 1) // 2)
        if self.seeded_noise:
            return SeededNoise(self.seed, *path)
        return Reused(keys.setdefault(path, int(secure_generator().integers(2**62))))

    patch.setattr(StrategyOptions, "noise", noise_of)
    return experiment


def one_stream_for_all_arrays(patch, experiment: Experiment) -> Experiment:
    """Begin the stream of the noise anew for each array."""
    noised = noise._noised

    def again(name, array, stddev, grid, rng):
        return noised(name, array, stddev, grid, deepcopy(rng))

    patch.setattr(noise, "_noised", again)
    return experiment


def empty_round_discarded(patch, experiment: Experiment) -> Experiment:
    """Discard a round that asks no client."""
    close = Round.close

    def discarding(self, replies, **options):
        if not self.cohort.partitions:
            self.discard_reason = "nobody was drawn"
        return close(self, replies, **options)

    patch.setattr(Round, "close", discarding)
    return experiment


def cohort_kept(patch, experiment: Experiment) -> Experiment:
    """Use a cohort in four rounds."""
    draw, calls, kept = PoissonSampling.draw, count(), []

    def drawn(self, rng, past):
        if next(calls) % 4 == 0:
            kept[:] = draw(self, rng, past)
        return [*kept]

    patch.setattr(PoissonSampling, "draw", drawn)
    return experiment


def everybody_drawn(patch, experiment: Experiment) -> Experiment:
    """Let all users take part in all rounds."""
    patch.setattr(PoissonSampling, "draw", lambda self, rng, past=None: [*range(self.population)])
    return experiment


def empty_cohort_redrawn(patch, experiment: Experiment) -> Experiment:
    """Draw again until somebody takes part."""
    draw = PoissonSampling.draw

    def drawn(self, rng, past):
        while not (units := draw(self, rng, past)):
            pass
        return units

    patch.setattr(PoissonSampling, "draw", drawn)
    return experiment


def less_noise(factor):
    """Divide the standard deviation of the noise by ``factor``."""

    def plant(patch, experiment: Experiment) -> Experiment:
        gamma = NoiseSource.gamma_direction
        change_noises(patch, lambda add, arrays, size: add(arrays, size / factor))
        patch.setattr(
            NoiseSource,
            "gamma_direction",
            lambda self, d, scale: gamma(self, d, scale / factor),
        )
        return experiment

    return plant


def noise_reused(patch, experiment: Experiment) -> Experiment:
    """Use the noise generators of the first round in every round."""
    state = {"key": 0, "drawn": 0}

    def begin(number):
        if number == 1:
            state["key"] = int(secure_generator().integers(2**62))
        state["drawn"] = 0
        experiment.on_round(number)

    def generator(self):
        state["drawn"] += 1
        return seeded_generator(state["key"], state["drawn"])

    patch.setattr(SecureNoise, "_generator", generator)
    return replace(experiment, on_round=begin)


def part_unnoised(patch, experiment: Experiment) -> Experiment:
    """Leave the first number of every array without noise."""

    def noised(add, arrays, size):
        released = add(arrays, size)
        if size > 0:
            for name, array in released.items():
                array[..., :1] = arrays[name][..., :1]
        return released

    change_noises(patch, noised)
    return experiment


def count_unnoised(patch, experiment: Experiment) -> Experiment:
    """The count of clients with test examples has no noise, and the attack looks at it alone."""

    def score(seen, view):
        return sum(means.get("scored_clients", 0.0) for means in seen.scores)

    return replace(part_unnoised(patch, experiment), score=score)


def one_participation_counted(patch, experiment: Experiment) -> Experiment:
    """Scale the noise, and account, for clients that take part once."""
    limits = {"rounds_apart": 2, "participations": 1}
    patch.setattr(SpacedSampling, "limits", property(lambda self: limits))
    return experiment


def zero_updates_within_the_norm(patch, experiment: Experiment) -> Experiment:
    """Count a zero update as within the norm, as Andrew et al. do."""
    real = adaptive_clipping.with_side

    def counted(update, adaptive_norm, weight):
        vector = real(update, adaptive_norm, weight)
        return vector if l2_norm(update) else {**vector, SIDE: vector[SIDE] + weight / 2}

    patch.setattr(adaptive_clipping, "with_side", counted)
    patch.setattr(protections, "with_side", counted)
    return experiment


def sides_unweighted(patch, experiment: Experiment) -> Experiment:
    """Every silo counts a user's side as a whole one."""
    real = protections.sum_clipped_rows

    def summed(rows, norm, weights):
        total = real(rows, norm, weights)
        return replace(total, value={**total.value, SIDE: rows[SIDE].sum(0)})

    patch.setattr(protections, "sum_clipped_rows", summed)
    return experiment


def weights_of_two(patch, experiment: Experiment) -> Experiment:
    """Let the weights of each user sum to 2."""
    real = averaging.user_weights
    patch.setattr(averaging, "user_weights", lambda *source: 2 * real(*source))
    patch.setattr(averaging, "check_weights", lambda *_: None)
    return experiment


def silent_noise(clients: int):
    """Of the three clients of a secure sum, so many add no noise."""

    def plant(patch, experiment: Experiment) -> Experiment:
        discrete, calls = NoiseSource.add_discrete_gaussian, count()

        def noised(self, cells, stddev):
            return cells if next(calls) % 3 < clients else discrete(self, cells, stddev)

        patch.setattr(NoiseSource, "add_discrete_gaussian", noised)
        return experiment

    return plant


def pair_masks_left_out(patch, experiment: Experiment) -> Experiment:
    """Clients of a secure sum add their own mask alone: the sum is right all the same."""
    silo_masks = []

    def self_mask_key(*facts):
        silo_masks.append(mask_streams.self_mask_key(*facts))
        return silo_masks[-1]

    def apply_mask(key, values, *, subtract=False):
        if key in silo_masks:
            mask_streams.apply_mask(key, values, subtract=subtract)

    patch.setattr(member, "self_mask_key", self_mask_key)
    patch.setattr(member, "apply_mask", apply_mask)
    return experiment
