"""Inputs of a guarantee: a method's traits, the assumptions about its sums, and the run so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.units import AdversaryView


@dataclass(frozen=True, kw_only=True)
class MethodTraits:
    """Traits of a method. A plan reads them to decide whether it protects the method."""

    name: str
    bounds_units: bool = False
    """True if a client's upload is a sum over units, and the method bounds each unit's part."""
    weighs_updates: bool = False
    """True if the method determines the weights of clients, such as equal ones."""
    needs_each_update: bool = False
    """True if the server needs every single update, not only the noised sum of all updates."""
    keeps_memory: bool = False
    """True if clients keep values between rounds."""
    updates_ignore_memory: bool = True
    """True if updates do not depend on anything that a client keeps between rounds."""
    upload_phase: str | None = None
    """Name of the training phase that alone determines the upload; None if no phase does."""
    added_proximal_weight: float = 0.0
    """Weight μ of the method's own proximal term around the received model; local training adds
    this term to the one whose weight its settings give."""
    num_silos: int | None = None
    """Number of silos among which each unit's data are divided; None if the units are clients."""
    weighting: str = ""
    """Rule by which a unit's weight is divided among silos; empty without silos."""


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """The assumptions of guarantees about one kind of sum."""

    secure_sum: str | None = None
    """Assumption under which the server sees no single contribution; None if it sees them all."""
    hidden_draw: str | None = None
    """Assumption under which the server does not know the drawn units; None if it draws them."""
    assumptions: Mapping[AdversaryView, Sequence[str]] = field(default_factory=dict)
    """Further assumptions of the provable guarantee against each adversary."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything that a plan knows about a run so far."""

    method: MethodTraits
    participations: Participations
    sums: SumTerms = field(default_factory=SumTerms)
    """The assumptions of guarantees about the run's sums."""
    num_examples: Mapping[int, int] = field(default_factory=dict)
    """|D_i|: number of training examples of each client that reported it."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """The phases of local training, by name (see `training.LocalTraining`)."""
    proximal_weight: float = 0.0
    """Weight μ of the proximal term around the received model, the same in all local training."""
    sent: Mapping[str, Any] = field(default_factory=dict)
    """The shared model that the server sent last, as arrays; empty before the first message."""
    secure_noise: bool = True
    """True if the noise uses the operating system's randomness and no seed."""
    secure_cohorts: bool = True
    """True if the draw of cohorts uses the operating system's randomness and no seed."""
    not_covered: Sequence[str] = ()
    """Values that leave the clients and that the guarantee does not cover."""
    group_size: int | None = None
    """Largest number of one user's records that all silos together use; None if not known."""
