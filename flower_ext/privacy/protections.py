"""Protections of an upload before it leaves its client: one class a mechanism."""

from __future__ import annotations

from dataclasses import dataclass


class Protection:
    """What a client does to its upload; one that adds no noise of its own unless it says so."""

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the client's own noise, in clipping norms; 0 for none."""
        return 0.0


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

    clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise, in clipping norms."""
        return self.noise_stddev / self.clipping_norm


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

    clipping_norm: float
    gradient_clipping_norm: float
    noise_stddev: float
    num_examples: int | None = None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a step's noise, in clipping norms of a gradient."""
        return self.noise_stddev / self.gradient_clipping_norm


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
