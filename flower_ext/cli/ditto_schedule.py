"""``flower-ext ditto-schedule``: choose DP-Ditto's number of rounds T and global weight λ."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from rich.markdown import Markdown

from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml
from flower_ext.planning import DittoProblem, LinearFairness
from flower_ext.planning.search import planned_schedules
from flower_ext.privacy import ClippedSteps, FullParticipation, RecordLevelPlan
from flower_ext.privacy.guarantee import Basis, is_large
from flower_ext.runs.page import to_markdown
from flower_ext.runs.settings import Count, NotNegative, Positive, ProperFraction, Settings, setting

Part = TypeVar("Part", ClippedSteps, DittoProblem, LinearFairness)

_LINEAR = ("feature_energy", "label_variance", "model_variance")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    """Settings of ``flower-ext ditto-schedule``; ``apps/dp-ditto/schedule.toml`` is an example."""

    origin: ClassVar[str] = "schedule"
    place: ClassVar[str] = "the settings file"

    # Budget and training
    epsilon: Positive = setting("ε of one record, after all rounds")
    delta: ProperFraction | None = setting("δ; absent: 1/|D|", default=None)
    num_clients: Count = setting("N: clients, all of which join every round")
    num_examples: Count = setting("|D|: records of each client, equal for all")
    clipping_norm: Positive = setting("C: clipping norm of the local model")
    gradient_clipping_norm: Positive | None = setting(
        "G: clipping norm of each record's gradient; absent: one record may move a model by 2C",
        default=None,
    )
    local_steps: Count = setting("K: noised local steps in each round", default=1)
    batch_size: Count | None = setting("B; absent: all records", default=None)
    learning_rate: Positive = setting("η_G: learning rate of the local model")
    personal_learning_rate: Positive | None = setting(
        "η_L: learning rate of the personal model; absent: η_G", default=None
    )
    max_rounds: Count = setting("largest number of rounds to consider", default=1000)

    # Losses; the pilot.toml of a pilot run has these lines
    dimension: Count = setting("d: number of weights")
    strong_convexity: Positive = setting("μ: strong convexity of the losses")
    smoothness: Positive = setting("L: smoothness of the losses")
    initial_gap: NotNegative = setting("Ψ₁ = F(w⁰) − F(w*)")
    initial_distance: NotNegative = setting("Ψ₂ = ‖v⁰ − v*‖²")
    gradient_bound: Positive | None = setting(
        "G₀: bound on gradients; the published bound needs it", default=None
    )
    model_spread: NotNegative | None = setting(
        "M ≥ ‖u* − w*‖; the published bound needs it", default=None
    )

    # λ: given, or the fairest under a Bayesian linear model
    global_weight: float | None = setting("λ from 0 (local) to 2 (global)", default=None)
    feature_energy: Positive | None = setting("ρ: the diagonal of XᵀX", default=None)
    label_variance: Positive | None = setting("σ²: variance of the labels' noise", default=None)
    model_variance: Positive | None = setting(
        "ζ²: variance between clients' true models", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        absent = [name for name in _LINEAR if getattr(self, name) is None]
        if (absent and len(absent) < len(_LINEAR)) or (self.global_weight is None) != (not absent):
            names = ", ".join(_LINEAR).replace("_", "-")
            raise InvalidValue(f"give either global-weight or all of {names}")
        several = self.batch_size is not None or self.local_steps > 1
        if several and self.gradient_clipping_norm is None:
            raise InvalidValue(
                "batch-size and local-steps need gradient-clipping-norm: set it, or leave both out"
            )

    def plan_of(self, rounds: int, basis: Basis) -> RecordLevelPlan:
        """Return the plan that spends at most the budget in ``rounds`` rounds."""
        return RecordLevelPlan.for_target(
            epsilon=self.epsilon,
            delta=self.delta or 1 / self.num_examples,
            sampling=FullParticipation(self.num_clients),
            num_examples=self.num_examples,
            rounds=rounds,
            clipping_norm=self.clipping_norm,
            basis=basis,
            steps=self.steps,
        )

    @property
    def steps(self) -> ClippedSteps | None:
        """The local steps, in which gradients are clipped; None without gradient-clipping-norm."""
        return None if self.gradient_clipping_norm is None else self.part(ClippedSteps)

    def part(self, kind: type[Part], **values: Any) -> Part:
        """Make a ``kind`` of ``values``, and of the settings with the names of its other fields."""
        names = {each.name for each in fields(kind)}
        present = {name: value for name, value in vars(self).items() if value is not None}
        return kind(**{**{name: present[name] for name in names & present.keys()}, **values})


def ditto_schedule(
    settings_file: Annotated[
        Path, typer.Argument(metavar="SETTINGS.toml", help="Budget, training, losses and λ.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose the number of rounds and the weight of the global model for a privacy budget.

    The schedule is for DP-Ditto: Ditto with noise on every uploaded model. The privacy unit is one
    record of a client, replaced by another, and the server sees every upload. The command answers
    twice: by the published and by the provable formulas. The convergence bound assumes strongly
    convex losses and one full-gradient step in each round.

    Example: flower-ext ditto-schedule apps/dp-ditto/schedule.toml
    """
    settings = ScheduleSettings.of(read_toml(settings_file))
    delta, weight = settings.delta or 1 / settings.num_examples, settings.global_weight
    problem = settings.part(
        DittoProblem,
        personal_learning_rate=settings.personal_learning_rate or settings.learning_rate,
    )
    schedules = planned_schedules(
        settings.plan_of,
        problem,
        settings.part(LinearFairness) if weight is None else weight,
        max_rounds=settings.max_rounds,
    )
    if as_json:
        answer = {
            "unit": "record",
            "relation": "replace-one",
            "view": "each-upload",
            "epsilon": settings.epsilon,
            "delta": delta,
            "schedules": [
                {
                    "basis": planned.basis,
                    "rounds": planned.schedule.rounds,
                    "global_weight": planned.schedule.global_weight,
                    "bound": h if math.isfinite(h := planned.schedule.value) else None,
                    "noise_stddev": planned.noise_stddev,
                    "epsilon": planned.epsilons,
                    "conditions_not_met": planned.not_met,
                }
                for planned in schedules
            ],
        }
        console.print_json(json.dumps(answer))
        return
    bounds = ("gradient_bound", "model_spread")
    text = to_markdown(
        "ditto-schedule",
        settings=settings,
        steps=settings.steps,
        delta=delta,
        has_large_delta=is_large(delta, settings.num_examples),
        kinds=["as published", "worst case", *(["gradients clipped"] if settings.steps else [])],
        answers=schedules,
        unknown=[name.replace("_", "-") for name in bounds if math.isinf(getattr(problem, name))],
    )
    console.print(Markdown(text))
