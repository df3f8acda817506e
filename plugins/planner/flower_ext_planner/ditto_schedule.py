"""``flower-ext ditto-schedule``: choose DP-Ditto's number of rounds T and global weight λ."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer

from flower_ext.checks import Count, Positive, ProperFraction, Scale
from flower_ext.cli.screen import Page, console
from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml
from flower_ext.privacy import ClippedSteps, Condition, FullParticipation, RecordLevelPlan
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import Basis, is_large
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.runs.page import to_markdown
from flower_ext.runs.settings import Settings
from flower_ext_planner.comparison import default_delta
from flower_ext_planner.convergence import DittoProblem, ScaleOrZero, Size
from flower_ext_planner.fairness import LinearFairness
from flower_ext_planner.search import best_schedule

Part = TypeVar("Part", ClippedSteps, DittoProblem, LinearFairness)

_LINEAR = ("feature_energy", "label_variance", "model_variance")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    """Settings of ``flower-ext ditto-schedule``; ``apps/dp-ditto/schedule.toml`` explains them."""

    origin: ClassVar[str] = "schedule"
    place: ClassVar[str] = "the settings file"

    # Budget and training
    epsilon: Positive
    delta: ProperFraction | None = None
    num_clients: Size
    num_examples: Size
    clipping_norm: Scale
    gradient_clipping_norm: Scale | None = None
    local_steps: Count = 1
    batch_size: Count | None = None
    learning_rate: Scale
    personal_learning_rate: Scale | None = None
    max_rounds: Count = 1000

    # Losses; the pilot.toml of a pilot run has these lines
    dimension: Size
    strong_convexity: Scale
    smoothness: Scale
    initial_gap: ScaleOrZero
    initial_distance: ScaleOrZero
    gradient_bound: Scale | None = None
    model_spread: ScaleOrZero | None = None

    # λ: given, or the fairest under a Bayesian linear model
    global_weight: float | None = None
    feature_energy: Scale | None = None
    label_variance: Scale | None = None
    model_variance: Scale | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        absent = [name for name in _LINEAR if getattr(self, name) is None]
        if (absent and len(absent) < len(_LINEAR)) or (self.global_weight is None) != (not absent):
            names = ", ".join(_LINEAR).replace("_", "-")
            raise InvalidValue(f"give either global-weight or all of {names}, but not both")
        several = self.batch_size is not None or self.local_steps > 1
        if several and self.gradient_clipping_norm is None:
            raise InvalidValue(
                "batch-size and local-steps need gradient-clipping-norm: set it, or leave both out"
            )

    @property
    def target_delta(self) -> float:
        """The setting ``delta``; if it is not set, 1/(100 |D|), where |D| is ``num_examples``."""
        return self.delta or default_delta(self.num_examples)

    @property
    def steps(self) -> ClippedSteps | None:
        """The local steps, which clip gradients; None if gradient-clipping-norm is not set."""
        return None if self.gradient_clipping_norm is None else self.part(ClippedSteps)

    def plan_of(self, rounds: int, basis: Basis) -> RecordLevelPlan:
        """Return the plan that spends at most the budget in ``rounds`` rounds."""
        return RecordLevelPlan.for_target(
            epsilon=self.epsilon,
            delta=self.target_delta,
            sampling=FullParticipation(self.num_clients),
            num_examples=self.num_examples,
            rounds=rounds,
            clipping_norm=self.clipping_norm,
            basis=basis,
            steps=self.steps,
        )

    def part(self, kind: type[Part], **values: float) -> Part:
        """Return an object of the class ``kind``. ``values`` are the values of some of its fields.

        Every other field gets the setting of the same name, or its default if that setting is None.
        """
        present = {name: value for name, value in vars(self).items() if value is not None}
        names = {each.name for each in fields(kind)}
        return kind(**{name: present[name] for name in names & present.keys()} | values)


def ditto_schedule(
    settings_file: Annotated[
        Path, typer.Argument(metavar="SETTINGS.toml", help="Budget, training, losses and λ.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose the number of rounds and the weight of the global model for a privacy budget.

    The schedule is for DP-Ditto: Ditto with noise on every uploaded model. The privacy unit is one
    record of a client, replaced by another, and the server sees every upload. The command uses the
    provable formulas and, if gradient-bound and model-spread are set, also the published ones. The
    convergence bound assumes strongly convex losses and one full-gradient step in each round.

    Example: flower-ext ditto-schedule apps/dp-ditto/schedule.toml
    """
    settings = ScheduleSettings.of(read_toml(settings_file))
    delta = settings.target_delta
    rate = settings.personal_learning_rate or settings.learning_rate
    problem = settings.part(DittoProblem, personal_learning_rate=rate)
    unknown = [n for n in ("gradient_bound", "model_spread") if getattr(settings, n) is None]
    bases: list[Basis] = ["provable"] if unknown else ["published", "provable"]
    schedules = [_schedule(settings, problem, basis) for basis in bases]
    if as_json:
        terms = {"unit": "record", "relation": "replace-one", "view": "each-upload"}
        budget = {"epsilon": settings.epsilon, "delta": delta}
        console.print_json(json.dumps({**terms, **budget, "schedules": schedules}))
        return
    text = to_markdown(
        "ditto-schedule",
        "flower_ext_planner",
        settings=settings,
        steps=settings.steps,
        delta=delta,
        has_large_delta=is_large(delta, settings.num_examples),
        kinds=["as published", "worst case", *(["gradients clipped"] if settings.steps else [])],
        schedules=schedules,
        unknown=[name.replace("_", "-") for name in unknown],
    )
    console.print(Page(text))


def _schedule(settings: ScheduleSettings, problem: DittoProblem, basis: Basis) -> dict[str, Any]:
    """Return the best schedule by the formulas of ``basis``, as the command prints it in JSON."""
    weight = settings.global_weight
    global_weight = settings.part(LinearFairness) if weight is None else weight
    schedule = best_schedule(
        problem,
        global_weight,
        variance_per_round=settings.plan_of(1, basis).upload_stddev ** 2,
        max_rounds=settings.max_rounds,
        basis=basis,
    )
    conditions = [*schedule.bound.conditions, _one_full_step(settings)]
    if isinstance(global_weight, LinearFairness):
        norm = settings.clipping_norm
        conditions.append(global_weight.uniqueness(clipping_norm=norm, basis=basis))
    # If T* is 0, clients release nothing, so there is no noise.
    plan = settings.plan_of(schedule.rounds, basis) if schedule.rounds else None
    return {
        "basis": basis,
        "rounds": schedule.rounds,
        "global_weight": schedule.global_weight,
        "bound": schedule.value if math.isfinite(schedule.value) else None,
        "noise_stddev": 0.0 if plan is None else plan.upload_stddev,
        "epsilon": {} if plan is None else _epsilons(plan),
        "conditions_not_met": [each.text for each in conditions if not each.holds],
    }


def _epsilons(plan: RecordLevelPlan) -> dict[str, float]:
    """Return the published ε, and the provable ε without and with clipped gradients.

    The last ε is missing if the plan does not clip gradients.
    """
    run = RunSummary(
        method=MethodTraits(name="DP-Ditto"), participations=Participations(rounds=plan.rounds)
    )
    # Algorithm 1 clips models but no gradients, so the worst case holds for it.
    uploads = replace(plan, noise_stddev=plan.upload_stddev, steps=None)
    published, worst_case = uploads.guarantees(run)
    epsilons = {"as published": published.epsilon, "worst case": worst_case.epsilon}
    if plan.steps is not None:
        epsilons["gradients clipped"] = plan.guarantees(run)[1].epsilon
    return epsilons


def _one_full_step(settings: ScheduleSettings) -> Condition:
    """Return the condition of Theorem 1 that each round is a single step on all records."""
    batch = settings.batch_size or settings.num_examples
    return Condition(
        f"one full-gradient step a round (K = {settings.local_steps}, B = {batch} of "
        f"{settings.num_examples} records): the bound h assumes one such step, and the noise "
        "covers all steps",
        settings.local_steps == 1 and batch == settings.num_examples,
    )
