"""Protections that a client applies to its upload before sending it: one class per mechanism.

An object holds the mechanism's parameters and applies the mechanism to arrays of any library. The
module `federation.messages.round_entries` writes the parameters into messages. The local training
applies the protections that act during training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flower_ext.checks import Checked, Count, CountOrZero, Flag, Positive, Scale
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.adaptive_clipping import rows_with_sides, with_side
from flower_ext.privacy.mechanisms.bounds import BoundedSum, UnitSum, clip, sum_clipped_rows
from flower_ext.privacy.mechanisms.discrete_gaussian import continuous_stddev
from flower_ext.privacy.mechanisms.noise import NoiseSource, largest_noised_norm
from flower_ext.privacy.mechanisms.quantization import in_cells, sum_rows_in_cells
from flower_ext.privacy.mechanisms.updates import (
    NamedArrays,
    check_arrays,
    in_float64,
    in_precision_of,
    split_into,
)


class Protection:
    """A mechanism that a client applies to its upload; by default it does nothing."""

    bounds_models: ClassVar[bool] = False
    """True if the client bounds and noises its whole model instead of its update."""
    bounds_uploads: ClassVar[bool] = True
    """True if the whole upload is bounded. No bit of the upload may then depend on other clients,
    even if several clients train in one batch."""
    num_examples: int | None = None
    """Number of training examples that a client must have; None if any number will do."""
    hides_failures: ClassVar[bool] = True
    """True if a client whose training fails may send the received model, which noise hides."""
    of_units: bool = False
    """True if the upload must be a sum over units, in which each unit's contribution is clipped."""
    cell: float | None = None
    """Step of a secure sum's grid; None if uploads are not masked, even if they lie on a grid."""

    @property
    def hides_missing_data(self) -> bool:
        """True if a client that cannot load its data sends an upload that looks like any other."""
        # A client that bounds its model reports its number of examples, unless the plan fixes this
        # number. Without its data, the client does not know the number.
        return self.hides_failures and (not self.bounds_models or self.num_examples is not None)

    @property
    def noise_multiplier(self) -> float | None:
        """Standard deviation of the client's own Gaussian noise, in L2 clipping norms.

        It is 0 without noise. It is None for noise that is not Gaussian or a norm that is not L2,
        because the least noise that the owner of a node requires is stated in L2 clipping norms.
        """
        return 0.0

    def released(self, upload: NamedArrays, noise: NoiseSource) -> NamedArrays:
        """Return the protected upload: an update, or a whole model if `bounds_models` is True."""
        return upload

    def released_sum(self, total: UnitSum, noise: NoiseSource) -> NamedArrays:
        """Return a sum over units with this client's noise; by default, refuse every such sum."""
        raise _unfit_bound(_bound_text(total.bound, total.cell), _UNBOUNDED)

    def largest_upload(self, numbers: int, *, norms: float = 1.0) -> float:
        """Return an L2 norm that an honest upload exceeds with probability `IMPROBABLE` at most.

        The server may refuse larger uploads. A hostile client then moves the sum no further than
        the noise of an honest client might. This check does not bound a client's contribution by
        the clipping norm; only a server that adds the noise itself can bound it so. No reported δ
        counts the probability that the server refuses an honest upload.

        The upload has ``numbers`` elements. Its norm before noise is at most ``norms`` times the
        clipping norm; ``norms`` may be above 1 if the upload is a sum over units.
        """
        return math.inf


@dataclass(frozen=True, kw_only=True)
class _Noised(Checked, Protection):
    """Clip the upload, or the part of each privacy unit, and add Gaussian noise to the upload."""

    clipping_norm: Positive
    noise_stddev: Positive

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of this client's own noise, in clipping norms."""
        return self.noise_stddev / self.clipping_norm

    def largest_upload(self, numbers: int, *, norms: float = 1.0) -> float:
        """Return the largest norm of an honest upload after its noise."""
        return largest_noised_norm(norms * self.clipping_norm, self.noise_stddev, numbers)


@dataclass(frozen=True, kw_only=True)
class ClipAndNoise(_Noised):
    """Clip an update, or each unit's contribution to it, and add a share of the sum's noise.

    Parameters
    ----------
    clipping_norm : float
        Norm bound: C, or C' of `adaptive_clipping` if ``adaptive_norm`` is given.
    noise_stddev : float
        Standard deviation of this client's share of the noise.
    cell : float, optional
        Step of a public grid, a power of two. If it is given, the upload is for a secure sum: it
        counts such steps in whole numbers, and its noise is discrete (see `quantization`).
    of_units : bool
        True if the upload is a sum over units. `sum_units` then clips each unit's contribution, and
        nothing clips the sum.
    noise_grid : float, optional
        Step of the grid to which an upload without ``cell`` is rounded; it must be the same for all
        clients of a round. By default `noise_grid` of ``noise_stddev``.
    adaptive_norm, side_weight : float, optional
        C and κ of `adaptive_clipping`. If they are given, the upload includes κ·side, a number that
        says whether the update is longer than C.

    Raises
    ------
    InvalidValue
        A number is not above 0, only one of ``adaptive_norm`` and ``side_weight`` is given, or both
        of ``cell`` and ``noise_grid`` are given.
    """

    cell: Positive | None = None
    of_units: Flag = False
    noise_grid: Positive | None = None
    adaptive_norm: Positive | None = None
    side_weight: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in (("adaptive_norm", "side_weight"), ("side_weight", "adaptive_norm")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                raise InvalidValue(f"{name}=None: expected a number, because {other} needs it")
        if self.cell is not None and self.noise_grid is not None:
            raise InvalidValue(
                f"noise_grid={self.noise_grid}: expected None, because cell sets the grid"
            )

    @property
    def noise_multiplier(self) -> float:
        """Stddev of this client's noise, in clipping norms.

        For discrete noise, it is the stddev of the continuous Gaussian that the noise replaces.
        """
        if self.cell is None:
            return super().noise_multiplier
        continuous = continuous_stddev(self.noise_stddev / self.cell) * self.cell
        return continuous / self.clipping_norm

    def released(self, upload: NamedArrays, noise: NoiseSource) -> NamedArrays:
        """Return the clipped update with noise; if ``cell`` is given, as int64 numbers of cells."""
        if self.of_units:  # clipping the whole sum would not bound how far one unit moves it
            raise _unfit_bound(_UNBOUNDED, _bound_text(self.clipping_norm, self.cell))
        sided = upload if self._side is None else with_side(upload, *self._side)
        norm, cell = self.clipping_norm, self.cell
        bounded = clip(sided, norm) if cell is None else in_cells(sided, norm, cell)
        return bounded.noised(noise, self.noise_stddev, self.noise_grid)

    def released_sum(self, total: UnitSum, noise: NoiseSource) -> NamedArrays:
        """Return a sum over units with this client's share of the noise.

        Refuse a sum whose bound is above ``clipping_norm``, or whose grid is not that of ``cell``.
        """
        if not self.of_units:
            return super().released_sum(total, noise)
        if not total.bound <= self.clipping_norm or total.cell != self.cell:  # refuses NaN, too
            expected = _bound_text(self.clipping_norm, self.cell)
            raise _unfit_bound(_bound_text(total.bound, total.cell), expected)
        return total.noised(noise, self.noise_stddev, self.noise_grid)

    def sum_units(self, rows: NamedArrays, weights: Sequence[float]) -> BoundedSum:
        """Clip each unit's update; return the weighted sum, in cells if ``cell`` is given."""
        sided = rows if self._side is None else rows_with_sides(rows, *self._side)
        if self.cell is None:
            return sum_clipped_rows(sided, self.clipping_norm, weights)
        return sum_rows_in_cells(sided, self.clipping_norm, self.cell, weights)

    @property
    def _side(self) -> tuple[float, float] | None:
        norm, weight = self.adaptive_norm, self.side_weight
        return None if norm is None or weight is None else (norm, weight)


@dataclass(frozen=True, kw_only=True)
class OutputPerturbation(_Noised):
    """Clip the whole local model to norm τ and add N(0, σ² I).

    Parameters
    ----------
    clipping_norm : float
        τ > 0, the L2 norm over all arrays together.
    noise_stddev : float
        σ > 0, a standard deviation in the unit of the weights.
    num_examples : int, optional
        Number of training examples that a client must have for the guarantee to cover it.
    """

    bounds_models = True
    clipping_norm: Scale
    noise_stddev: Scale
    num_examples: Count | None = None

    def __str__(self) -> str:
        return (
            f"output perturbation: clipping norm {self.clipping_norm:g}, "
            f"noise stddev {self.noise_stddev:g}"
        )

    def released(self, upload: NamedArrays, noise: NoiseSource) -> dict[str, Any]:
        """Clip and noise a model in float64, then round the result to the model's own precision."""
        check_arrays(upload)
        bounded = clip(in_float64(upload), self.clipping_norm).value
        return in_precision_of(upload, noise.add_gaussian(bounded, self.noise_stddev))


@dataclass(frozen=True, kw_only=True)
class ClipSteps(Checked, Protection):
    """In every local step, clip each record's gradient and add noise; at the end, clip the model.

    Parameters
    ----------
    clipping_norm : float
        Norm bound of the model.
    gradient_clipping_norm : float
        Norm bound of one record's gradient.
    noise_stddev : float
        Standard deviation of the noise that each step adds to each weight.
    num_examples : int, optional
        Number of training examples that a client must have for the guarantee to cover it.
    """

    bounds_models = True
    hides_failures = False  # the steps add the noise, so a model without training carries none
    clipping_norm: Positive
    gradient_clipping_norm: Positive
    noise_stddev: Positive
    num_examples: Count | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a step's noise, divided by the gradient's clipping norm."""
        return self.noise_stddev / self.gradient_clipping_norm

    def released(self, upload: NamedArrays, noise: NoiseSource) -> NamedArrays:
        """Return the clipped model; the training has already added the noise."""
        return clip(upload, self.clipping_norm).value

    def largest_upload(self, numbers: int, *, norms: float = 1.0) -> float:
        """Return the clipping norm, because the client adds no noise after it has clipped."""
        return self.clipping_norm


@dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation(Checked, Protection):
    """Add ⟨n, w⟩ to the local objective of a model w; fresh noise n has density ∝ exp(−α‖n‖₂).

    Parameters
    ----------
    rate : float
        α > 0. The norm of n is Gamma distributed with mean d/α for d parameters.
    least_examples : int
        Least number of examples with which a client is protected. A plan computes this number.
    """

    hides_failures = False  # as for `ClipSteps`
    noise_multiplier = None
    rate: Scale
    least_examples: CountOrZero = 0

    def __str__(self) -> str:
        return f"objective perturbation: rate {self.rate:g}"

    def direction(self, like: NamedArrays, noise: NoiseSource) -> dict[str, np.ndarray]:
        """Draw the noise n as float64 arrays with the names and shapes of ``like``."""
        check_arrays(like)
        shapes = {name: tuple(array.shape) for name, array in like.items()}
        size = sum(map(math.prod, shapes.values()))
        return split_into(shapes, noise.gamma_direction(size, 1 / self.rate))


_UNBOUNDED = "no bound"


def _bound_text(bound: float, cell: float | None) -> str:
    return f"a bound of {bound:g}" + ("" if cell is None else f" in cells of {cell:g}")


def _unfit_bound(bound: str, expected: str) -> InvalidValue:
    return InvalidValue.tellable(
        f"each unit's part of the update: the method sets {bound}, but the plan expects {expected}"
    )


Perturbation = OutputPerturbation | ObjectivePerturbation
"""A perturbation of a client's trained model, or of the objective of its training."""


@dataclass(frozen=True)
class Unprotected(Protection):
    """Send the update unchanged, or an error if the training fails."""

    bounds_uploads = False
    hides_failures = False


@dataclass(frozen=True)
class ProtectedByServer(Protection):
    """Do not change the upload; the server bounds the update and adds all of the noise."""


@dataclass(frozen=True)
class ProtectedByTraining(Protection):
    """Do not change the upload; the training added noise (see ``dp_sgd`` of `ClientMethod`)."""

    bounds_uploads = False
    hides_failures = False  # as for `ClipSteps`
