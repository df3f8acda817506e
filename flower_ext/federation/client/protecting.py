"""Protection of an upload before it leaves its client, and what the node's owner permits.

There are two kinds of protection. Client- and user-level privacy bounds and noises a client's
*update*. Record-level privacy protects the records behind the client's whole *model*, by noise on
the model, in each local step, or in the objective. The mechanisms are in
`privacy.mechanisms.protections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation.protection import SEEDED
from flower_ext.federation.roster import partition_of
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.privacy import NoiseSource, SecureNoise, SeededNoise
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipSteps,
    ClipUnits,
    ClipUnitsToCells,
    ObjectivePerturbation,
    Protection,
)
from flower_ext.training import Linear, Params, StepNoise

OF_UPLOADS = "client-noise"
"""Name of the noise that protects an upload, on the upload or in the training behind it."""


@dataclass(frozen=True)
class NodePolicy:
    """Limits that the owner of a node, and the developer of its ClientApp, set.

    The owner of a SuperNode sets these values with ``--node-config``:

    * ``require-secure-noise=true``: the client refuses settings that protect nobody, such as seeded
      noise.
    * ``least-noise-multiplier=0.1``: the smallest noise that the client itself adds, in clipping
      norms. The client then refuses training whose upload it does not noise itself. It also
      refuses objective perturbation, which has no noise multiplier.

    Parameters
    ----------
    context : Context
    allow_seeded_noise : bool
        True if the ClientApp was built for simulation.
    """

    context: Context
    allow_seeded_noise: bool

    @property
    def may_simulate(self) -> bool:
        """True if this client accepts settings that protect nobody: seeded noise and small keys."""
        return self.allow_seeded_noise and not self.context.node_config.get("require-secure-noise")

    def check(self, protection: Protection) -> None:
        """Refuse training with less noise than the node's owner requires.

        Raises
        ------
        PermissionError
            The node's owner requires more noise.
        """
        least = float(self.context.node_config.get("least-noise-multiplier", 0.0))
        if not (multiplier := protection.noise_multiplier) >= least:
            raise PermissionError(
                f"the server asks for a noise multiplier of {multiplier:g} on this client's "
                f"upload: the owner of this node requires least-noise-multiplier={least:g}"
            )

    def noise(self, entries: Mapping[str, Any], purpose: str) -> NoiseSource:
        """Return secure noise, or seeded noise if the server asks and this client allows it.

        Seeded noise is independent for each ``purpose``.

        Raises
        ------
        PermissionError
            The server asks for seeded noise, but this client does not allow it.
        """
        if not entries.get(SEEDED):
            return SecureNoise()
        if not self.may_simulate:
            raise tellable(
                PermissionError(
                    "the server asks for seeded noise, which this client does not allow: in "
                    "simulation, build the ClientApp by client_app(..., allow_seeded_noise=True); "
                    "elsewhere, set seeded_noise=False on the server"
                )
            )
        partition = partition_of(self.context.node_config)
        return SeededNoise(entries["seed"], purpose, partition, entries["number"])


Contribution = Params | BoundedSum | HiddenSum
"""A client's update, or its whole model, before bound and noise."""
Protected = Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]
"""A client's update as it leaves the client."""


class Unprotected(Protection):
    """No protection: the update leaves the client as it is, and so do errors."""

    bounds_uploads = False
    hides_failures = False


def check_size(num_examples: int, protection: Protection) -> None:
    """Refuse to train on another number of examples than the guarantee assumes.

    Raises
    ------
    PreconditionFailed
        The server's plan assumes another number.
    """
    agreed = protection.num_examples
    if agreed is not None and num_examples != agreed:
        raise tellable(
            PreconditionFailed(
                f"this client trains on another number of examples than the plan's num_examples="
                f"{agreed}, which holds for all clients: give every client that many, or change "
                "the plan"
            )
        )


def step_noise(protection: Protection, noise: NoiseSource) -> StepNoise | None:
    """Return the clipping and noise of each local step, if the server asks for them."""
    if not isinstance(protection, ClipSteps):
        return None
    return StepNoise(
        clipping_norm=protection.gradient_clipping_norm,
        stddev=protection.noise_stddev,
        source=noise,
    )


def objective_terms(
    params: Params, num_examples: int, protection: Protection, noise: NoiseSource
) -> tuple[Linear, ...]:
    """Return ⟨n, w⟩ with fresh noise n if the server asks for objective perturbation.

    Raises
    ------
    PreconditionFailed
        This client has too few examples for the noise to protect one of them.
    """
    if not isinstance(protection, ObjectivePerturbation):
        return ()
    if num_examples < protection.least_examples:
        raise tellable(
            PreconditionFailed(
                "this client trains on too few examples: objective perturbation needs at least "
                f"{protection.least_examples:.0f} = 2u₂/μ of them (Theorem 6.3); take a larger "
                "proximal_weight"
            )
        )
    arrays = {name: p.detach().cpu().numpy() for name, p in params.items()}
    direction = protection.direction(arrays, noise)
    return (Linear(direction={n: torch.from_numpy(d).to(params[n]) for n, d in direction.items()}),)


def protected(
    update: Contribution,
    received: Params,
    protection: Protection,
    noise: NoiseSource,
) -> Protected:
    """Return the update as it leaves the client.

    If the protection `bounds_models`, ``update`` is the whole trained model. Rebuilding that model
    from the received one and a difference would add rounding that the sensitivity bound does not
    cover.

    Raises
    ------
    InvalidValue
        The plan and the method disagree: only one of them bounds each unit's part of the update.
    """
    bounds_units = isinstance(protection, ClipUnits | ClipUnitsToCells)
    # A sum over units says how far one unit moves it; clipping the whole would not.
    if isinstance(update, BoundedSum | HiddenSum) or bounds_units:
        return _noised_sum(update, received, protection, noise)
    released = protection.released(update, noise)
    if not protection.bounds_models:
        return released
    return {name: value - received[name] for name, value in released.items()}


def _noised_sum(
    update: Contribution,
    received: Params,
    protection: Protection,
    noise: NoiseSource,
) -> Protected:
    """Return a sum over units, each bounded by the method, with this client's share of noise."""
    is_bounded = (
        isinstance(update, BoundedSum | HiddenSum)
        and isinstance(protection, ClipUnits | ClipUnitsToCells)
        and update.bound <= protection.clipping_norm
    )
    if is_bounded and isinstance(update, BoundedSum):
        if isinstance(protection, ClipUnitsToCells) and update.cell == protection.cell:
            return protection.noised(update.value, noise)
        if isinstance(protection, ClipUnits) and update.cell is None:
            noised = protection.noised(update.value, noise)
            return {name: value.to(received[name].dtype) for name, value in noised.items()}
    elif is_bounded and isinstance(protection, ClipUnits) and isinstance(update, HiddenSum):
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in received.items()}
        return update.encrypt(noise.gaussian(zeros, protection.noise_stddev))
    raise tellable(
        InvalidValue(
            f"each unit's part of the update has {_bound_of(update)}: the plan expects "
            f"{_bound_of(protection)}"
        )
    )


def _bound_of(value: object) -> str:
    """Return the bound on each unit's part, by a sum or by a protection, for an error."""
    if isinstance(value, BoundedSum | HiddenSum):
        bound = f"a bound of {value.bound:g}"
    elif isinstance(value, ClipUnits | ClipUnitsToCells):
        bound = f"one of {value.clipping_norm:g}"
    else:
        return "none"
    cell = getattr(value, "cell", None)
    return bound if cell is None else f"{bound} in cells of {cell:g}"
