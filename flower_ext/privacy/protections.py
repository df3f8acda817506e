"""Protections of an upload before it leaves its client: one class a mechanism.

A class knows its numbers and what it does to arrays of any library. How its numbers travel is in
`federation.protection`; what acts during training, the training itself applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flower_ext.privacy.bounds import clip
from flower_ext.privacy.cells import Cells, in_cells
from flower_ext.privacy.noise import NoiseSource
from flower_ext.privacy.perturbation import OutputPerturbation


class Protection:
    """A mechanism on the client; by default, nothing is done to the upload."""

    bounds_models: ClassVar[bool] = False
    """The client's whole model is bounded and noised, and not what it changed."""
    bounds_uploads: ClassVar[bool] = True
    """The upload as a whole is bounded: nothing that another client does may move it."""
    num_examples: int | None = None
    """The only number of training examples that the guarantee speaks of, where there is one."""

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the client's own noise, in clipping norms; 0 where none is."""
        return 0.0

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the upload as it leaves the client: an update, or a model if `bounds_models`.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            As `clip`.
        """
        return upload


@dataclass(frozen=True, kw_only=True)
class ClipUpdate(Protection):
    """Clip the whole update, add a share of the sum's noise (a `ReleasePlan`'s).

    Parameters
    ----------
    clipping_norm : float
        C.
    noise_stddev : float
        Standard deviation of this client's share.
    noise_grid : float, optional
        What noised uploads are whole multiples of, in all clients and rounds alike; by default the
        share's own.
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
        """Return what is bounded already with noise."""
        return noise.add_gaussian(bounded, self.noise_stddev, grid=self.noise_grid)


@dataclass(frozen=True, kw_only=True)
class ClipToCells(Protection):
    """Clip the whole update, round it to cells of a public grid, and add discrete Gaussian noise.

    What leaves the client is a vector of whole numbers, for a secure sum (see `privacy.cells`).

    Parameters
    ----------
    clipping_norm : float
        C.
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

    def noised(self, cells: Cells, noise: NoiseSource) -> Cells:
        """Return what is bounded and in cells already with noise."""
        return noise.add_discrete_gaussian(cells, self.share_stddev / self.cell)


@dataclass(frozen=True, kw_only=True)
class ClipUnits(ClipUpdate):
    """The same where the upload is a sum over units, each of them clipped by the method."""


@dataclass(frozen=True, kw_only=True)
class ClipModel(Protection):
    """Clip the whole local model, add noise of its own (output perturbation).

    Parameters
    ----------
    clipping_norm, noise_stddev : float
    num_examples : int, optional
        The only number of training examples that the guarantee speaks of.
    """

    bounds_models = True
    clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

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
    """Clip each record's gradient and add noise in every local step; clip the model at the end.

    Parameters
    ----------
    clipping_norm : float
        Of the model.
    gradient_clipping_norm : float
        Of a record's gradient.
    noise_stddev : float
        Of the weights, in each step.
    num_examples : int, optional
        The only number of training examples that the guarantee speaks of.
    """

    bounds_models = True
    clipping_norm: float
    gradient_clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a step's noise, in clipping norms of a gradient."""
        return self.noise_stddev / self.gradient_clipping_norm

    def released(self, upload: Mapping[str, Any], noise: NoiseSource) -> Mapping[str, Any]:
        """Return the clipped model: every step that led to it is noised already."""
        return clip(upload, self.clipping_norm).value


@dataclass(frozen=True, kw_only=True)
class PerturbObjective(Protection):
    """Add ⟨n, w⟩ with fresh noise n to the local objective.

    Parameters
    ----------
    rate : float
        α of n's density.
    least_examples : int
        Fewer are not protected.
    """

    rate: float
    least_examples: int


@dataclass(frozen=True)
class ProtectedByServer(Protection):
    """Nothing: the server bounds the update and adds all of the noise."""


@dataclass(frozen=True)
class ProtectedByTraining(Protection):
    """Nothing: the method's own training is noised already (DP-SGD)."""

    bounds_uploads = False
