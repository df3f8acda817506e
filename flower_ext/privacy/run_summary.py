"""The traits of a method and the summary of a run, from which a plan computes its guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flower_ext.privacy.accounting.participations import Participations


@dataclass(frozen=True, kw_only=True)
class MethodTraits:
    """Traits that a method declares, so that a plan can refuse a method that it does not protect.

    Parameters
    ----------
    name : str
    bounds_units : bool
        True if a client's upload is a sum over units, and the method bounds each unit.
    weighs_updates : bool
        True if the server's step weights the updates by a rule of the method's own.
    needs_each_update : bool
        True if the server needs every single update, not only the noised sum of all updates.
    keeps_memory : bool
        True if clients keep values between rounds; ``memoryless`` says if updates depend on them.
    memoryless : bool
        True if updates do not depend on anything that a client keeps between rounds.
    upload_phase : str, optional
        The phase of local training that alone determines the upload; None if the upload also
        depends on the client's data in another way.
    num_silos : int, optional
        Number of silos among which each unit's data are divided; None if the units are clients.
    weighting : str
        Rule by which a unit's weight is divided among silos; empty without silos.
    """

    name: str
    bounds_units: bool = False
    weighs_updates: bool = False
    needs_each_update: bool = False
    keeps_memory: bool = False
    memoryless: bool = True
    upload_phase: str | None = None
    num_silos: int | None = None
    weighting: str = ""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything that a plan knows about a run so far.

    Parameters
    ----------
    method : MethodTraits
    participations : Participations
        Counts of the rounds that each unit's data went into.
    num_examples : Mapping[int, int]
        |D_i|: number of training examples of each client that reported it.
    training : Mapping[str, LocalTraining]
        The phases of local training, by name (see `training.LocalTraining`).
    proximal_weight : float
        μ of the proximal term around the received model, the same in every local training.
    sent : Mapping[str, array]
        The shared model that the server sent last; empty before the first message.
    secure_noise, secure_cohorts : bool
        True if the noise, or the draw of cohorts, uses the operating system's randomness and no
        seed.
    not_covered : Sequence[str]
        Values that leave the clients and that the guarantee does not cover.
    group_size : int, optional
        The largest number of a user's records that are used; None if the method sets no limit.
    """

    method: MethodTraits
    participations: Participations
    num_examples: Mapping[int, int] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    proximal_weight: float = 0.0
    sent: Mapping[str, Any] = field(default_factory=dict)
    secure_noise: bool = True
    secure_cohorts: bool = True
    not_covered: Sequence[str] = ()
    group_size: int | None = None
