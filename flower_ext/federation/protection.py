"""What protects an update before it leaves the client: asked for by the server, done here.

Two kinds, which may not be mixed: a `ReleasePlan` bounds and noises the *update* (client-level
privacy); an output or objective perturbation, or noise in each local step, protects the records
behind a client's whole *model* (record-level privacy).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from flower_ext.federation.cohort import partition_of
from flower_ext.federation.failures import tellable
from flower_ext.federation.mods import objective_perturbation_term
from flower_ext.privacy import (
    NoiseSource,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    ReleasePlan,
    SecureNoise,
    SeededNoise,
    clip,
)
from flower_ext.privacy.bounds import BoundedSum
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.training import Linear, Params, StepNoise

_FORMS: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"clipping-norm", "noise-stddev"}),
    frozenset({"unit-clipping-norm", "noise-stddev"}),
    frozenset({"model-clipping-norm", "model-noise-stddev"}),
    frozenset({"model-clipping-norm", "gradient-clipping-norm", "step-noise-stddev"}),
    frozenset({"objective-rate", "least-examples"}),
)
"""Protections that a server can ask for; a part of one is none."""
_OTHER_FACTS = frozenset(
    {
        "run",
        "number",
        "seed",
        "diagnostics",
        "training-loss",
        "report-size",
        "agreed-examples",
        "seeded-noise",
        "noise-grid",
        "remembered",
        "server-protects",
    }
)


@dataclass(frozen=True, kw_only=True)
class HiddenSum:
    """A sum over units that leaves the client under encryption only.

    Parameters
    ----------
    bound : float
        How far one unit can move the sum, as in `BoundedSum`.
    encrypt : Callable[[Params], Mapping[str, np.ndarray]]
        Takes this client's share of the noise, in float64, and returns what leaves: values and
        noise as whole numbers of public steps, to which the noise is rounded here and not before,
        lest it leave the steps between its own multiples bare.
    """

    bound: float
    encrypt: Callable[[Params], Mapping[str, np.ndarray]]


def plan_facts(plan: ReleasePlan, cohort_size: int, *, seeded_noise: bool) -> dict[str, float]:
    """What a client needs to bound and noise its update; that the server does, where it does."""
    if cohort_size == 0:
        return {}
    if plan.noise_placement == "server":
        return {"server-protects": True}
    return {
        "clipping-norm": plan.clipping_norm,
        "noise-stddev": plan.client_noise_stddev(cohort_size),
        "noise-grid": plan.noise_grid,
        "seeded-noise": seeded_noise,
    }


def perturbation_facts(plan: PerturbationPlan, *, seeded_noise: bool) -> dict[str, float]:
    """What a client needs to perturb its local model."""
    perturbation = plan.perturbation
    if isinstance(perturbation, OutputPerturbation):
        own = {
            "model-clipping-norm": perturbation.clipping_norm,
            "model-noise-stddev": perturbation.noise_stddev,
        }
    else:
        own = {
            "objective-rate": perturbation.rate,
            "least-examples": plan.objective.least_examples(),
        }
    return {**own, "seeded-noise": seeded_noise}


def per_unit(facts: Mapping[str, float]) -> dict[str, float]:
    """`plan_facts` where a client bounds each unit of its sum by itself, not the sum."""
    renamed = {"clipping-norm": "unit-clipping-norm"}
    return {renamed.get(name, name): value for name, value in facts.items()}


def record_level_facts(plan: RecordLevelPlan, *, seeded_noise: bool) -> dict[str, float]:
    """What a client needs to clip and noise its local model, or each local step."""
    facts = {
        "model-clipping-norm": plan.clipping_norm,
        "agreed-examples": plan.num_examples,
        "seeded-noise": seeded_noise,
    }
    if plan.steps is None:
        return {**facts, "model-noise-stddev": plan.noise_stddev}
    return {
        **facts,
        "gradient-clipping-norm": plan.steps.gradient_clipping_norm,
        "step-noise-stddev": plan.noise_stddev,
    }


def protects(facts: Mapping[str, Any]) -> bool:
    """Whether what a client sends is protected, by itself or by the server.

    Its bound then speaks of this client alone: nothing that another client does may move it.
    """
    return bool(facts.get("server-protects")) or not frozenset(facts) <= _OTHER_FACTS


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse a round whose protection is incomplete or unknown.

    Raises
    ------
    ValueError
        Names what is wrong.
    TypeError
        A fact is not of its type.
    """
    numbers = {"remembered": 0, **facts}  # said only to those that may have to forget
    for name, least in (("number", 1), ("seed", 0), ("remembered", 0)):
        if type(numbers.get(name)) is not int or numbers[name] < least:
            raise ValueError(f"{name}={numbers.get(name)!r}: expected an integer >= {least}")
    if type(facts.get("run", "")) is not str:
        raise TypeError(f"run={facts['run']!r} in the server's message: expected a name")
    asked = frozenset(facts) - _OTHER_FACTS
    if asked not in _FORMS:
        raise ValueError(f"the server asks for a protection of {sorted(asked)}, which is none")
    for name in asked:
        value = _number(facts, name)
        if not 0 < value < math.inf and (name, value) != ("least-examples", 0):
            raise ValueError(f"{name}={value!r} in the server's message: expected above 0, finite")
    if type(facts.get("seeded-noise", False)) is not bool or (
        asked and "seeded-noise" not in facts
    ):
        raise TypeError(f"seeded-noise={facts.get('seeded-noise')!r}: expected true or false")


def check_noise(facts: Mapping[str, Any], context: Context, *, kind: str) -> None:
    """Refuse a round with less noise than this node asks for.

    The owner of a SuperNode names the least noise with ``--node-config
    "least-noise-multiplier=0.1"``: a client's own share of it, in clipping norms. Trainings whose
    upload this client does not noise by itself are then refused, and so is objective perturbation,
    which has no such number.

    Raises
    ------
    PermissionError
        The node's owner asks for more.
    """
    least_noise = float(context.node_config.get("least-noise-multiplier", 0.0))
    if kind != "train" or least_noise == 0:
        return
    own = _noise_multiplier(facts)
    if not own >= least_noise:
        raise PermissionError(
            f"the server asks for a noise multiplier of {own:g} on this client's upload; this node "
            f"takes part from least-noise-multiplier={least_noise:g}"
        )


def _noise_multiplier(facts: Mapping[str, Any]) -> float:
    """Standard deviation of this client's noise over its clipping norm; 0 where it adds none."""
    for stddev, norms in (
        ("noise-stddev", ("clipping-norm", "unit-clipping-norm")),
        ("model-noise-stddev", ("model-clipping-norm",)),
        ("step-noise-stddev", ("gradient-clipping-norm",)),
    ):
        for norm in norms:
            if stddev in facts and norm in facts:
                return _number(facts, stddev) / _number(facts, norm)
    return 0.0


def check_size(num_examples: int, facts: Mapping[str, Any]) -> None:
    """Refuse to train on another number of examples than the guarantee speaks of.

    Raises
    ------
    PreconditionFailed
        The server's plan names another number.
    """
    agreed = facts.get("agreed-examples", num_examples)
    if num_examples != agreed:
        raise tellable(
            PreconditionFailed(
                f"this client trains on another number of examples than the plan's num_examples="
                f"{agreed}, the same for all clients: give every client as many, or change the plan"
            )
        )


def step_noise(
    facts: Mapping[str, Any], context: Context, *, allow_seeded_noise: bool
) -> StepNoise | None:
    """What each step of the training behind an upload clips and adds, where the server asks."""
    if "gradient-clipping-norm" not in facts:
        return None
    return StepNoise(
        clipping_norm=_number(facts, "gradient-clipping-norm"),
        stddev=_number(facts, "step-noise-stddev"),
        source=noise_source(facts, context, allow_seeded_noise=allow_seeded_noise),
    )


def bounds_models(facts: Mapping[str, Any]) -> bool:
    """Whether a client's whole model is clipped and noised, and not its update."""
    return "model-clipping-norm" in facts


def protected(
    update: Params | BoundedSum | HiddenSum,
    received: Params,
    facts: Mapping[str, Any],
    context: Context,
    *,
    allow_seeded_noise: bool,
) -> Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]:
    """The update as it leaves the client.

    Where the plan `bounds_models`, ``update`` is the whole model, as it was trained: made up again
    of the received one and a difference it would be rounded, of which no sensitivity speaks.

    Raises
    ------
    ValueError
        The plan bounds each unit's part of the update, and the method did not; or the method did
        and the plan asks for something else.
    """
    if "unit-clipping-norm" in facts or isinstance(update, BoundedSum | HiddenSum):
        return _noised_sum(update, received, facts, context, allow_seeded_noise=allow_seeded_noise)
    if "clipping-norm" in facts:
        noise = noise_source(facts, context, allow_seeded_noise=allow_seeded_noise)
        bounded = clip(update, _number(facts, "clipping-norm")).value
        return noise.add_gaussian(bounded, _number(facts, "noise-stddev"), grid=_grid(facts))
    if bounds_models(facts):
        clipping_norm = _number(facts, "model-clipping-norm")
        if "step-noise-stddev" in facts:  # every step that led here is noised already
            released = clip(update, clipping_norm).value
        else:
            perturbation = OutputPerturbation(
                clipping_norm=clipping_norm, noise_stddev=_number(facts, "model-noise-stddev")
            )
            noise = noise_source(facts, context, allow_seeded_noise=allow_seeded_noise)
            released = perturbation.apply(update, noise)
        return {name: value - received[name] for name, value in released.items()}
    return update


def _noised_sum(
    update: Params | BoundedSum | HiddenSum,
    received: Params,
    facts: Mapping[str, Any],
    context: Context,
    *,
    allow_seeded_noise: bool,
) -> Mapping[str, torch.Tensor] | Mapping[str, np.ndarray]:
    """A sum over units, each of them bounded already, with this client's share of the noise."""
    norm = _number(facts, "unit-clipping-norm") if "unit-clipping-norm" in facts else 0.0
    if not isinstance(update, BoundedSum | HiddenSum) or not update.bound <= norm:
        own = update.bound if isinstance(update, BoundedSum | HiddenSum) else None
        bound = "none" if own is None else f"a bound of {own:g}"
        error = f"each unit's part of the update has {bound}; the plan asks for {norm:g}"
        raise tellable(ValueError(error))
    noise = noise_source(facts, context, allow_seeded_noise=allow_seeded_noise)
    stddev = _number(facts, "noise-stddev")
    if isinstance(update, HiddenSum):
        nothing = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in received.items()}
        return update.encrypt(noise.gaussian(nothing, stddev))
    noised = noise.add_gaussian(update.value, stddev, grid=_grid(facts))
    return {name: value.to(received[name].dtype) for name, value in noised.items()}


def objective_terms(
    params: Params,
    num_examples: int,
    facts: Mapping[str, Any],
    context: Context,
    *,
    allow_seeded_noise: bool,
) -> tuple[Linear, ...]:
    """⟨n, w⟩ with fresh noise n where the server asks for objective perturbation.

    Raises
    ------
    PreconditionFailed
        This client has too few examples for the noise to protect one of them.
    """
    if "objective-rate" not in facts:
        return ()
    least = _number(facts, "least-examples")
    if num_examples < least:
        raise tellable(
            PreconditionFailed(
                "this client trains on too few examples: objective perturbation protects none of "
                f"fewer than {least:.0f} = 2u₂/μ (Theorem 6.3): take a larger proximal_weight"
            )
        )
    noise = noise_source(facts, context, allow_seeded_noise=allow_seeded_noise)
    perturbation = ObjectivePerturbation(rate=_number(facts, "objective-rate"))
    return (objective_perturbation_term(params, perturbation, noise),)


def noise_source(
    facts: Mapping[str, Any],
    context: Context,
    *,
    allow_seeded_noise: bool,
    purpose: str = "client-noise",
) -> NoiseSource:
    """Secure noise, or seeded noise where the server asks and this client allows it.

    Seeded noise for another ``purpose`` is independent.

    Raises
    ------
    PermissionError
        The server asks for seeded noise and this client does not allow it.
    """
    if not facts["seeded-noise"]:
        return SecureNoise()
    if not may_simulate(context, allow_seeded_noise=allow_seeded_noise):
        raise tellable(
            PermissionError(
                "the server asks for seeded noise, which this client does not allow: in "
                "simulation build it with client_app(..., allow_seeded_noise=True), elsewhere "
                "set seeded_noise=False"
            )
        )
    partition = partition_of(context.node_config)
    return SeededNoise(
        int(_number(facts, "seed")), purpose, partition, int(_number(facts, "number"))
    )


def may_simulate(context: Context, *, allow_seeded_noise: bool) -> bool:
    """Whether this client takes part in what protects nobody: seeded noise, small keys."""
    return allow_seeded_noise and not context.node_config.get("require-secure-noise")


def _grid(facts: Mapping[str, Any]) -> float | None:
    """What a noised upload is whole multiples of; by default the noise's own."""
    return _number(facts, "noise-grid") if "noise-grid" in facts else None


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} in the server's message: expected a number")
    return value
