"""Protections that a client applies to its upload before it leaves: one class per mechanism.

A class holds its parameters and applies them to arrays of any library. `federation.protection`
writes the parameters into messages. The local training applies what acts during training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flower_ext.privacy.mechanisms.bounds import clip
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.perturbation import OutputPerturbation
from flower_ext.privacy.mechanisms.quantization import Cells, in_cells


class Protection:
    """A mechanism that a client applies to its upload; by default it does nothing."""

    bounds_models: ClassVar[bool] = False
    """True if the client bounds and noises its whole model instead of its update."""
    bounds_uploads: ClassVar[bool] = True
    """True if the whole upload is bounded, so that no other client's behaviour may move it."""
    num_examples: int | None = None
    """The only number of training examples that the guarantee covers; None if it covers all."""
    hides_failures: ClassVar[bool] = True
    """True if the noise also covers a received model that is sent in place of a failed training."""
    takes_models: ClassVar[bool] = True
    """True if an upload may come from a whole model; False if only from a sum over units."""

    @property
    def hides_missing_data(self) -> bool:
        """True if the upload of a client that cannot load its data looks like any other upload."""
        return self.hides_failures

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the client's own noise, in clipping norms; 0 without noise."""
        return 0.0

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the upload as it leaves the client: an update, or a model with `bounds_models`.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            As `clip`.
        """
        return upload


@dataclass(frozen=True, kw_only=True)
class ClipUpdate(Protection):
    """Clip the whole update and add a share of the sum's noise (for a `ReleasePlan`).

    Parameters
    ----------
    clipping_norm : float
        Norm bound C.
    noise_stddev : float
        Standard deviation of this client's share.
    noise_grid : float, optional
        Noised uploads are whole multiples of it, the same in all clients and rounds. By default
        the grid of the share.
    """

    clipping_norm: float
    noise_stddev: float
    noise_grid: float | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of this client's own noise, in clipping norms."""
        return self.noise_stddev / self.clipping_norm

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the clipped update with noise."""
        return self.noised(clip(upload, self.clipping_norm).value, noise)

    def noised(self, bounded: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Add noise to an update that is already bounded."""
        return noise.add_gaussian(bounded, self.noise_stddev, grid=self.noise_grid)


@dataclass(frozen=True, kw_only=True)
class ClipToCells(Protection):
    """Clip the whole update, round it to cells of a public grid, and add discrete Gaussian noise.

    The upload is a vector of whole numbers, for a secure sum (see
    `privacy.mechanisms.quantization`).

    Parameters
    ----------
    clipping_norm : float
        Norm bound C.
    share_stddev : float
        Standard deviation of this client's share of the noise.
    cell : float
        Width of a cell, a power of two.
    """

    clipping_norm: float
    share_stddev: float
    cell: float

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of this client's own noise, in clipping norms."""
        return self.share_stddev / self.clipping_norm

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the noised update in cells, as int64."""
        cells = in_cells(upload, self.clipping_norm, self.cell)
        return noise.add_discrete_gaussian(cells, self.share_stddev / self.cell)


@dataclass(frozen=True, kw_only=True)
class ClipUnitsToCells(ClipToCells):
    """The same where the upload is a sum over units, each clipped and rounded by the method."""

    takes_models = False

    def noised(self, cells: Cells, noise: NoiseSource) -> Cells:
        """Return what is bounded and in cells already with noise."""
        return noise.add_discrete_gaussian(cells, self.share_stddev / self.cell)


@dataclass(frozen=True, kw_only=True)
class ClipUnits(ClipUpdate):
    """Noise a sum over units, each of which the method clips; otherwise as `ClipUpdate`."""

    takes_models = False


@dataclass(frozen=True, kw_only=True)
class ClipModel(Protection):
    """Clip the whole local model and add noise to it (output perturbation).

    Parameters
    ----------
    clipping_norm, noise_stddev : float
    num_examples : int, optional
        The only number of training examples that the guarantee covers.
    """

    bounds_models = True
    clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

    @property
    def hides_missing_data(self) -> bool:
        """True if the number of examples, which the client reports, is agreed on."""
        return self.num_examples is not None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise, in clipping norms."""
        return self.noise_stddev / self.clipping_norm

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the clipped model with noise."""
        perturbation = OutputPerturbation(
            clipping_norm=self.clipping_norm, noise_stddev=self.noise_stddev
        )
        return perturbation.apply(upload, noise)


@dataclass(frozen=True, kw_only=True)
class ClipSteps(Protection):
    """Clip each record's gradient and noise every local step; clip the model at the end.

    Parameters
    ----------
    clipping_norm : float
        Norm bound of the model.
    gradient_clipping_norm : float
        Norm bound of one record's gradient.
    noise_stddev : float
        Noise of each weight in each step.
    num_examples : int, optional
        The only number of training examples that the guarantee covers.
    """

    bounds_models = True
    hides_failures = False  # the noise is in the steps, so a model without them has none
    clipping_norm: float
    gradient_clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a step's noise, in clipping norms of a gradient."""
        return self.noise_stddev / self.gradient_clipping_norm

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the clipped model, whose steps were all noised during training."""
        return clip(upload, self.clipping_norm).value


@dataclass(frozen=True, kw_only=True)
class PerturbObjective(Protection):
    """Add ⟨n, w⟩ with fresh noise n to the local objective.

    Parameters
    ----------
    rate : float
        α; the density of n is proportional to exp(−α‖n‖₂).
    least_examples : int
        Clients with fewer examples are not protected.
    """

    hides_failures = False  # as for `ClipSteps`
    rate: float
    least_examples: int


@dataclass(frozen=True)
class ProtectedByServer(Protection):
    """Leave the upload as it is; the server bounds the update and adds all of the noise."""


@dataclass(frozen=True)
class ProtectedByTraining(Protection):
    """Leave the upload as it is; the method's own training is already noised (DP-SGD)."""

    bounds_uploads = False
    hides_failures = False  # as for `ClipSteps`
