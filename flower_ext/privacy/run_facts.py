"""All that a plan may know of the method that it protects, and of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flower_ext.privacy.participations import Participations


@dataclass(frozen=True, kw_only=True)
class MethodTraits:
    """What a method declares of itself, so that a plan can refuse what it does not protect.

    Parameters
    ----------
    name : str
    units_are_clients : bool
        The privacy units are the clients, each of them with one upload a round.
    bounds_units : bool
        A client's upload is a sum over units, each of which the method bounds by itself.
    needs_each_update : bool
        The server needs every single update, not only their noised sum.
    keeps_memory : bool
        Clients remember something from round to round, which their updates depend on.
    memoryless : bool
        Updates depend on no client memory.
    upload_phase : str, optional
        The phase of training that alone leads to the upload.
    """

    name: str
    units_are_clients: bool = True
    bounds_units: bool = False
    needs_each_update: bool = False
    keeps_memory: bool = False
    memoryless: bool = True
    upload_phase: str | None = None


class LocalSteps(Protocol):
    """The settings of local training that plans speak of (see `training.LocalTraining`)."""

    @property
    def learning_rate(self) -> float:
        """η."""

    @property
    def batch_size(self) -> int:
        """Most examples of a step."""

    @property
    def momentum(self) -> float:
        """Of the steps; 0 for plain SGD."""

    @property
    def sam_radius(self) -> float:
        """Of sharpness-aware steps; 0 for plain SGD."""

    @property
    def tolerance(self) -> float:
        """Largest gradient norm at which a minimiser stops; 0 where steps of SGD are made."""

    @property
    def optimizer(self) -> str:
        """``SGD``, or the name of another optimiser."""

    def num_steps(self, num_examples: int, /) -> int:
        """Steps of one training."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run so far.

    Parameters
    ----------
    method : MethodTraits
    participations : Participations
        Whose data went into the rounds.
    num_examples : Mapping[int, int]
        |D_i| by client, where it told.
    training : Mapping[str, LocalSteps]
        The phases of local training.
    proximal_weight : float
        μ of the proximal term around the received model that every local training has.
    sent : Mapping[str, array]
        The shared model that clients were sent last; nothing before that.
    secure_noise, secure_cohorts : bool
        Noise and cohorts come from the operating system's randomness, not from a seed.
    not_covered : Sequence[str]
        What leaves the clients outside the guarantee.
    group_size : int, optional
        The most records of a user that are used, where a method limits them.
    """

    method: MethodTraits
    participations: Participations
    num_examples: Mapping[int, int] = field(default_factory=dict)
    training: Mapping[str, LocalSteps] = field(default_factory=dict)
    proximal_weight: float = 0.0
    sent: Mapping[str, Any] = field(default_factory=dict)
    secure_noise: bool = True
    secure_cohorts: bool = True
    not_covered: Sequence[str] = ()
    group_size: int | None = None
