"""Protection of an upload before it leaves the client: the server asks for it, the client applies.

There are two kinds. Client- and user-level privacy bounds and noises a client's *update*.
Record-level privacy protects the records behind the client's whole *model*, by noise on the model,
in each local step, or in the objective. The classes are in `privacy.protections`; only this module
turns them into facts of a message and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation.cohort import partition_of
from flower_ext.federation.mods import objective_perturbation_term
from flower_ext.privacy import (
    NoiseSource,
    ObjectivePerturbation,
    SecureNoise,
    SeededNoise,
)
from flower_ext.privacy.bounds import BoundedSum
from flower_ext.privacy.cells import CellSum
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.protections import (
    ClipModel,
    ClipSteps,
    ClipToCells,
    ClipUnits,
    ClipUnitsToCells,
    ClipUpdate,
    PerturbObjective,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
)
from flower_ext.training import Linear, Params, StepNoise

OF_UPLOADS = "client-noise"
"""Name of the noise that protects an upload, on the upload or in the training behind it."""

# Values and facts -------------------------------------------------------------------------------

_SHARE = {"noise-stddev": "noise_stddev", "noise-grid": "noise_grid"}
_IN_CELLS = {"share-stddev": "share_stddev", "cell": "cell"}
_NUMBERS: Mapping[type[Protection], Mapping[str, str]] = {
    ClipUpdate: {"clipping-norm": "clipping_norm", **_SHARE},
    ClipUnits: {"unit-clipping-norm": "clipping_norm", **_SHARE},
    ClipUnitsToCells: {"unit-clipping-norm": "clipping_norm", **_IN_CELLS},
    ClipToCells: {"clipping-norm": "clipping_norm", **_IN_CELLS},
    ClipModel: {
        "model-clipping-norm": "clipping_norm",
        "model-noise-stddev": "noise_stddev",
        "agreed-examples": "num_examples",
    },
    ClipSteps: {
        "model-clipping-norm": "clipping_norm",
        "gradient-clipping-norm": "gradient_clipping_norm",
        "step-noise-stddev": "noise_stddev",
        "agreed-examples": "num_examples",
    },
    PerturbObjective: {"objective-rate": "rate", "least-examples": "least_examples"},
    ProtectedByTraining: {},
}
"""For each protection, its fields by their names in a message."""
_OPTIONAL = frozenset({"agreed-examples", "noise-grid"})
_BY_SERVER, SEEDED = "server-protects", "seeded-noise"
_OTHER_FACTS = frozenset(
    {"run", "number", "seed", "diagnostics", "training-loss", "report-size", "remembered"}
    | {"evaluation"}
    | {_BY_SERVER, SEEDED}
    | _OPTIONAL
)


def to_facts(protection: Protection | None, *, seeded_noise: bool) -> dict[str, float]:
    """Return a protection as facts of a message.

    Raises
    ------
    TypeError
        Messages have no names for this protection, so a client would apply another one, or none.
    """
    if protection is None:
        return {}
    if type(protection) is ProtectedByServer:
        return {_BY_SERVER: True}
    if type(protection) not in _NUMBERS:
        raise TypeError(
            f"{type(protection).__name__}: messages have no names for its fields; add them to "
            f"_NUMBERS in {__name__}, as a set of names that no other protection has"
        )
    names = _NUMBERS[type(protection)]
    facts = {name: getattr(protection, field) for name, field in names.items()}
    told = {name: value for name, value in facts.items() if value is not None}
    return {**told, SEEDED: seeded_noise}


def from_facts(facts: Mapping[str, Any]) -> Protection | None:
    """Return the protection in the facts of a message; the inverse of `to_facts`.

    The function ignores the other facts of a round.

    Raises
    ------
    InvalidValue
        The protection is incomplete or unknown, or one of its numbers is out of range.
    TypeError
        A fact has the wrong type.
    """
    asked = frozenset(facts) - _OTHER_FACTS
    if not asked:
        seeded = _is_seeded(facts)
        if facts.get(_BY_SERVER):
            return ProtectedByServer()
        return None if seeded is None else ProtectedByTraining()
    kinds = [kind for kind, names in _NUMBERS.items() if asked == frozenset(names) - _OPTIONAL]
    if not kinds:
        raise InvalidValue(f"the server's message has {sorted(asked)}: expected a known protection")
    for name in asked:
        value = _number(facts, name)
        if not 0 < value < math.inf and (name, value) != ("least-examples", 0):
            raise InvalidValue(
                f"{name}={value!r} in the server's message: expected a finite number > 0"
            )
    if _is_seeded(facts) is None:
        raise TypeError(f"{SEEDED}=None: expected true or false")
    (kind,) = kinds
    fields: dict[str, Any] = {
        field: _number(facts, name) for name, field in _NUMBERS[kind].items() if name in facts
    }
    return kind(**fields)


def check_facts(facts: Mapping[str, Any]) -> Protection | None:
    """Check the facts of a round, and return the protection that they ask for.

    Raises
    ------
    InvalidValue
        A fact is missing or out of range; the message names it.
    TypeError
        A fact has the wrong type.
    """
    numbers = {"remembered": 0, **facts}  # sent only to clients that may have to forget
    for name, least in (("number", 1), ("seed", 0), ("remembered", 0)):
        if type(numbers.get(name)) is not int or numbers[name] < least:
            raise InvalidValue(f"{name}={numbers.get(name)!r}: expected an integer >= {least}")
    if type(facts.get("run", "")) is not str:
        raise TypeError(f"run={facts['run']!r} in the server's message: expected a string")
    return from_facts(facts)


def _is_seeded(facts: Mapping[str, Any]) -> bool | None:
    """Return True if the client's noise follows a seed; None if the client adds no noise."""
    seeded = facts.get(SEEDED)
    if seeded is not None and type(seeded) is not bool:
        raise TypeError(f"{SEEDED}={seeded!r}: expected true or false")
    return seeded


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} in the server's message: expected a number")
    return value


# What a node allows -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NodePolicy:
    """Limits that the owner of a node, and the developer of its ClientApp, set.

    The owner of a SuperNode sets these values with ``--node-config``:

    * ``require-secure-noise=true``: the client refuses anything that protects nobody, as seeded
      noise does.
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
        """True if this client accepts what protects nobody: seeded noise and small keys."""
        return self.allow_seeded_noise and not self.context.node_config.get("require-secure-noise")

    def check(self, protection: Protection | None) -> None:
        """Refuse training with less noise than the node's owner requires.

        Raises
        ------
        PermissionError
            The node's owner requires more noise.
        """
        least = float(self.context.node_config.get("least-noise-multiplier", 0.0))
        own = 0.0 if protection is None else protection.noise_multiplier
        if not own >= least:
            raise PermissionError(
                f"the server asks for a noise multiplier of {own:g} on this client's upload: the "
                f"owner of this node requires least-noise-multiplier={least:g}"
            )

    def noise(self, facts: Mapping[str, Any], purpose: str) -> NoiseSource:
        """Return secure noise, or seeded noise if the server asks and this client allows it.

        Seeded noise is independent for each ``purpose``.

        Raises
        ------
        PermissionError
            The server asks for seeded noise, but this client does not allow it.
        """
        if not facts.get(SEEDED):
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
        return SeededNoise(facts["seed"], purpose, partition, facts["number"])


# What a client does -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HiddenSum:
    """A sum over units that leaves the client only in encrypted form.

    Parameters
    ----------
    bound : float
        Largest distance by which one unit can move the sum, as in `BoundedSum`.
    encrypt : Callable[[Params], Mapping[str, np.ndarray]]
        Function that takes this client's share of the noise, in float64, and returns the encrypted
        upload: values plus noise, in whole numbers of public steps. The function itself rounds the
        noise to these steps. Noise that was rounded before to coarser multiples would leave the
        steps between them without noise.
    """

    bound: float
    encrypt: Callable[[Params], Mapping[str, np.ndarray]]


def protects(protection: Protection | None) -> bool:
    """Return True if the client or the server protects the upload as a whole.

    The bound then covers this client only, so no other client may be able to change the upload.
    """
    return protection is not None and protection.bounds_uploads


def bounds_models(protection: Protection | None) -> bool:
    """Return True if a client's whole model, rather than its update, is clipped and noised."""
    return protection is not None and protection.bounds_models


def check_size(num_examples: int, protection: Protection | None) -> None:
    """Refuse to train on another number of examples than the guarantee assumes.

    Raises
    ------
    PreconditionFailed
        The server's plan assumes another number.
    """
    agreed = None if protection is None else protection.num_examples
    if agreed is not None and num_examples != agreed:
        raise tellable(
            PreconditionFailed(
                f"this client trains on another number of examples than the plan's num_examples="
                f"{agreed}, which holds for all clients: give every client that many, or change "
                "the plan"
            )
        )


def step_noise(protection: Protection | None, noise: NoiseSource) -> StepNoise | None:
    """Return the clipping and noise of each local step, if the server asks for them."""
    if not isinstance(protection, ClipSteps):
        return None
    return StepNoise(
        clipping_norm=protection.gradient_clipping_norm,
        stddev=protection.noise_stddev,
        source=noise,
    )


def objective_terms(
    params: Params, num_examples: int, protection: Protection | None, noise: NoiseSource
) -> tuple[Linear, ...]:
    """Return ⟨n, w⟩ with fresh noise n if the server asks for objective perturbation.

    Raises
    ------
    PreconditionFailed
        This client has too few examples for the noise to protect one of them.
    """
    if not isinstance(protection, PerturbObjective):
        return ()
    if num_examples < protection.least_examples:
        raise tellable(
            PreconditionFailed(
                "this client trains on too few examples: objective perturbation needs at least "
                f"{protection.least_examples:.0f} = 2u₂/μ of them (Theorem 6.3); take a larger "
                "proximal_weight"
            )
        )
    perturbation = ObjectivePerturbation(rate=protection.rate)
    return (objective_perturbation_term(params, perturbation, noise),)


def protected(
    update: Params | BoundedSum | CellSum | HiddenSum,
    received: Params,
    protection: Protection | None,
    noise: NoiseSource,
) -> Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]:
    """Return the update as it leaves the client.

    If the protection `bounds_models`, ``update`` is the whole trained model. Rebuilding that model
    from the received one and a difference would add rounding that the sensitivity bound does not
    cover.

    Raises
    ------
    InvalidValue
        The plan bounds each unit's part of the update and the method does not, or the method does
        and the plan asks for something else.
    """
    if isinstance(protection, ClipUnitsToCells) or isinstance(update, CellSum):
        return _noised_cells(update, protection, noise)
    if isinstance(protection, ClipUnits) or isinstance(update, BoundedSum | HiddenSum):
        return _noised_sum(update, received, protection, noise)
    if protection is None:
        return update
    released = protection.released(update, noise)
    if not protection.bounds_models:
        return released
    return {name: value - received[name] for name, value in released.items()}


def _noised_cells(
    update: Params | BoundedSum | CellSum | HiddenSum,
    protection: Protection | None,
    noise: NoiseSource,
) -> Mapping[str, np.ndarray]:
    """Return a sum over units, each bounded and rounded already, with this client's share."""
    if not isinstance(update, CellSum):
        error = "the plan asks for a sum over units in whole numbers of cells; the method made none"
    elif not isinstance(protection, ClipUnitsToCells):
        error = "the update is a sum in whole numbers of cells, which the plan does not ask for"
    elif update.bound > protection.clipping_norm or update.cell != protection.cell:
        error = (
            f"each unit's part of the update has a bound of {update.bound:g} in cells of "
            f"{update.cell:g}; the plan asks for {protection.clipping_norm:g} in cells of "
            f"{protection.cell:g}"
        )
    else:
        return protection.noised(update.value, noise)
    raise tellable(InvalidValue(error))


def _noised_sum(
    update: Params | BoundedSum | HiddenSum,
    received: Params,
    protection: Protection | None,
    noise: NoiseSource,
) -> Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]:
    """Return a sum over units, each bounded by the method, with this client's share of noise."""
    asked = protection if isinstance(protection, ClipUnits) else None
    norm = 0.0 if asked is None else asked.clipping_norm
    if asked is None or not isinstance(update, BoundedSum | HiddenSum) or not update.bound <= norm:
        own = update.bound if isinstance(update, BoundedSum | HiddenSum) else None
        bound = "none" if own is None else f"a bound of {own:g}"
        error = f"each unit's part of the update has {bound}: the plan expects {norm:g}"
        raise tellable(InvalidValue(error))
    if isinstance(update, HiddenSum):
        nothing = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in received.items()}
        return update.encrypt(noise.gaussian(nothing, asked.noise_stddev))
    noised = asked.noised(update.value, noise)
    return {name: value.to(received[name].dtype) for name, value in noised.items()}
