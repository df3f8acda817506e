"""``flower-ext plan`` and ``search``: choose DP-Ditto's rounds T and global weight λ."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_ext.cli.ditto_search import search_by_runs
from flower_ext.cli.schedule_curves import FairnessRow, curve_rows, draw_plan, fairness_rows
from flower_ext.cli.screen import Settings, console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.planning import DittoProblem, LinearFairness, PilotEstimates
from flower_ext.planning.answers import Answer, PrivacyBudget, answers, finite_or_none
from flower_ext.privacy import ClippedSteps, epsilon_text
from flower_ext.privacy.guarantee import is_large

_budget = partial(typer.Option, rich_help_panel="Budget and training")
_losses = partial(typer.Option, rich_help_panel="Losses (a pilot run estimates them)")
_weight = partial(
    typer.Option, rich_help_panel="λ: given, or the fairest under a Bayesian linear model"
)


def plan(
    epsilon: Annotated[float, _budget(help="ε > 0.")],
    clients: Annotated[int, _budget(min=1, help="N: clients, all of which join every round.")],
    examples: Annotated[
        list[int],
        _budget(min=1, help="|D|: records of each client; one value, or N equal ones."),
    ],
    clipping_norm: Annotated[float, _budget(help="C: clipping norm of the local model.")],
    learning_rate: Annotated[float, _budget(help="η_G: learning rate of the local model.")],
    pilot: Annotated[
        Path | None,
        _losses(help="pilot.json of a pilot run; the options below override its values."),
    ] = None,
    dimension: Annotated[int | None, _losses(help="d: number of weights.")] = None,
    strong_convexity: Annotated[
        float | None, _losses(help="μ: strong convexity of the losses.")
    ] = None,
    smoothness: Annotated[float | None, _losses(help="L: smoothness of the losses.")] = None,
    initial_gap: Annotated[float | None, _losses(help="Ψ₁ = F(w⁰) − F(w*).")] = None,
    initial_distance: Annotated[float | None, _losses(help="Ψ₂ = ‖v⁰ − v*‖².")] = None,
    gradient_bound: Annotated[
        float | None, _losses(help="G₀: bound on gradients; the published bound needs it.")
    ] = None,
    model_spread: Annotated[
        float | None, _losses(help="M ≥ ‖u* − w*‖; the published bound needs it.")
    ] = None,
    delta: Annotated[float | None, _budget(help="δ; by default 1/|D|.")] = None,
    gradient_clipping_norm: Annotated[
        float | None,
        _budget(
            help="G: clipping norm of each record's gradient; without it, one record may move a "
            "model by 2C."
        ),
    ] = None,
    local_steps: Annotated[int, _budget(min=1, help="K: noised local steps in each round.")] = 1,
    batch_size: Annotated[int | None, _budget(help="B; by default all records.")] = None,
    personal_learning_rate: Annotated[
        float | None, _budget(help="η_L: learning rate of the personal model; by default η_G.")
    ] = None,
    max_rounds: Annotated[int, _budget(min=1, help="Largest number of rounds to consider.")] = 1000,
    global_weight: Annotated[float | None, _weight(help="λ from 0 (local) to 2 (global).")] = None,
    feature_energy: Annotated[float | None, _weight(help="ρ: the diagonal of XᵀX.")] = None,
    label_variance: Annotated[
        float | None, _weight(help="σ²: variance of the labels' noise.")
    ] = None,
    model_variance: Annotated[
        float | None, _weight(help="ζ²: variance between clients' true models.")
    ] = None,
    worlds: Annotated[
        int | None,
        _weight(min=2, help="Number of federations to draw from that model, to check R(λ)."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for figures and CSV files.")] = Path("plan"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose the number of rounds and the weight of the global model for a privacy budget.

    The plan is for DP-Ditto: Ditto with noise on every uploaded model. The privacy unit is one
    record of a client, replaced by another, and the server sees every upload. The command answers
    twice: by the published and by the provable formulas. The convergence bound assumes strongly
    convex losses and one full-gradient step in each round.

    Example: flower-ext plan --epsilon 10 --delta 1e-4 --clients 20 --examples 3000
    --clipping-norm 20 --gradient-clipping-norm 1 --learning-rate 0.1 --dimension 10
    --strong-convexity 1 --smoothness 2 --initial-gap 1 --initial-distance 4 --gradient-bound 1
    --model-spread 1 --global-weight 0.5
    """
    linear = {
        "feature_energy": feature_energy,
        "label_variance": label_variance,
        "model_variance": model_variance,
    }
    missing = [name for name, value in linear.items() if value is None]
    if (global_weight is None) == (len(missing) == len(linear)) or 0 < len(missing) < len(linear):
        raise typer.BadParameter(
            "give either --global-weight or all of --feature-energy, --label-variance and "
            "--model-variance"
        )
    if worlds is not None and missing:
        raise typer.BadParameter(f"--worlds needs {_options(missing)}")
    if gradient_clipping_norm is None and (batch_size is not None or local_steps > 1):
        raise typer.BadParameter("--batch-size and --local-steps need --gradient-clipping-norm")
    size = _equal_size(examples, clients)
    steps = fairness = None
    if gradient_clipping_norm is not None:
        steps = ClippedSteps(
            learning_rate=learning_rate,
            gradient_clipping_norm=gradient_clipping_norm,
            num_examples=size,
            local_steps=local_steps,
            batch_size=batch_size,
        )
    budget = PrivacyBudget(
        epsilon=epsilon,
        delta=1 / size if delta is None else delta,
        num_clients=clients,
        num_examples=size,
        clipping_norm=clipping_norm,
        steps=steps,
    )
    losses = _known_losses(
        pilot,
        dimension=dimension,
        strong_convexity=strong_convexity,
        smoothness=smoothness,
        initial_gap=initial_gap,
        initial_distance=initial_distance,
        gradient_bound=gradient_bound,
        model_spread=model_spread,
    )
    problem = DittoProblem(
        **losses,
        num_clients=clients,
        learning_rate=learning_rate,
        personal_learning_rate=learning_rate
        if personal_learning_rate is None
        else personal_learning_rate,
    )
    if not missing:
        fairness = LinearFairness.expected(
            num_clients=clients,
            num_examples=size,
            dimension=problem.dimension,
            **{name: value for name, value in linear.items() if value is not None},
        )
    found = answers(
        budget, problem, max_rounds=max_rounds, global_weight=global_weight, fairness=fairness
    )
    drawn = fairness_rows(found, fairness, worlds) if fairness and worlds else []
    figures = draw_plan(found, output, fairness=fairness)
    if as_json:
        facts: dict[str, Any] = {
            "unit": "record",
            "relation": "replace-one",
            "view": "each-upload",
            "epsilon": epsilon,
            "delta": budget.delta,
            "plans": [answer.to_dict() for answer in found],
            "curves": [
                {"rounds": rounds, **{a.basis: _json_at(a, rounds) for a in found}}
                for rounds in curve_rows(found)
            ],
            "figures": [str(path) for path in figures],
        }
        if drawn:
            facts["worlds"] = [vars(row) for row in drawn]
        console.print_json(json.dumps(facts))
        return
    _print_plan(budget, found, figures)
    if drawn:
        _print_worlds(worlds, drawn)
    unknown = [name for name in ("gradient_bound", "model_spread") if math.isinf(losses[name])]
    if unknown:
        console.print(f"No published plan: its bound needs {_options(unknown)} as well")


def search(
    app_folder: Annotated[
        Path, typer.Argument(metavar="APP", help="Folder of an app like apps/dp-ditto.")
    ],
    rounds: Annotated[list[int], typer.Option(help="Candidate for T; repeatable.")],
    global_weight: Annotated[list[float], typer.Option(help="Candidate for λ; repeatable.")],
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs for each pair, with seeds 1, 2, …")
    ] = 1,
    settings: Settings = None,
    runs: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("search"),
) -> None:
    """Choose T and λ for a privacy budget by short runs, for models that no bound covers.

    The search alternates: it picks the T with the smallest training loss of the personal models at
    the current λ, then the λ at which these losses differ least between clients, until both stay
    the same. It reads losses without noise, so use it on simulations or public stand-in data only.

    Example: flower-ext search apps/dp-ditto --rounds 5 --rounds 20 --global-weight 0
    --global-weight 0.5 --set epsilon=10
    """
    found = search_by_runs(
        app_folder,
        rounds=rounds,
        global_weights=global_weight,
        seeds=range(1, seeds + 1),
        settings=settings or (),
        folder=runs,
    )
    columns = ("T", "λ", "mean", "std over clients")
    table = titled_table("Training losses of personal models", columns)
    for (T, weight), outcome in sorted(found.outcomes.items()):
        table.add_row(str(T), f"{weight:g}", f"{outcome.loss:.4g}", f"{outcome.unfairness:.4g}")
    console.print(table)
    how = "both stay" if found.settled else "the search cycles; smallest loss of the cycle"
    console.print(f"T* = {found.rounds}, λ* = {found.global_weight:g} ({how})")


def _equal_size(examples: list[int], clients: int) -> int:
    """Return |D|, which must be equal for all, because the analysis averages without weights."""
    if len(examples) not in (1, clients):
        raise InvalidValue(
            f"examples={examples!r}: expected one size for all clients, or {clients} sizes, one "
            "for each client"
        )
    if len(set(examples)) > 1:
        raise InvalidValue(
            f"examples={examples!r}: expected equal sizes, because Theorems 1 to 3 assume them; "
            "plan for the smallest size and let every client use that many records"
        )
    return examples[0]


def _known_losses(pilot: Path | None, **given: float | None) -> dict[str, Any]:
    """Return the facts on the losses for `DittoProblem`; given values override the pilot run's."""
    known: dict[str, Any] = {"gradient_bound": math.inf, "model_spread": math.inf}
    if pilot is not None:
        estimates, dimension = PilotEstimates.load(pilot)
        known |= {**asdict(estimates), "dimension": dimension}
    known |= {name: value for name, value in given.items() if value is not None}
    if missing := [name for name in given if name not in known]:
        raise InvalidValue(f"give {_options(missing)}, or --pilot with a file that holds them")
    return known


def _options(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _at(answer: Answer, rounds: int) -> dict[str, float]:
    """Return the bound and the weight of an answer's curves after ``rounds`` rounds."""
    schedule = answer.schedule
    return {
        "bound": float(schedule.convergence[rounds - 1]),
        "global_weight": float(schedule.global_weights[rounds - 1]),
    }


def _json_at(answer: Answer, rounds: int) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in _at(answer, rounds).items()}


def _print_plan(budget: PrivacyBudget, found: list[Answer], figures: list[Path]) -> None:
    console.print(
        f"Unit: one record of {budget.num_examples} on a client, replace-one, each upload seen · "
        f"N = {budget.num_clients} · ε = {budget.epsilon:g} · δ = {budget.delta:.3g}"
    )
    if is_large(budget.delta, budget.num_examples):
        console.print(
            f"δ = {budget.delta:g} is large beside 1/|D| = {1 / budget.num_examples:.3g}, at which "
            "even a mechanism that publishes one random record would satisfy it"
        )
    console.print(f"Provable noise: {budget.provable_source}\n")
    kinds = ["as published", "worst case", *(["gradients clipped"] if budget.steps else [])]
    columns = ("basis", "T*", "λ*", "h(T*, λ*)", "noise stddev σ_u", *(f"ε {k}" for k in kinds))
    table = titled_table("Rounds and global weight for the budget", columns)
    for answer in found:
        schedule = answer.schedule
        table.add_row(
            answer.basis,
            str(schedule.rounds),
            f"{schedule.global_weight:.4g}",
            f"{float(schedule.bound.after(schedule.rounds)):.4g}",
            f"{answer.noise_stddev:.4g}" if schedule.rounds else "–",
            *(epsilon_text(answer.epsilons[kind]) if schedule.rounds else "–" for kind in kinds),
        )
    console.print(table)
    for answer in found:
        if answer.schedule.rounds == 0:
            console.print(f"{answer.basis}: no number of rounds improves the bound on the start")
        if answer.schedule.rounds == int(answer.schedule.candidates[-1]):
            console.print(f"{answer.basis}: T* equals --max-rounds; a larger one may be better")
        for text in answer.not_met:
            console.print(f"  ✗ {answer.basis}: {text}")
    pairs = ((f"h, {answer.basis}", f"λ, {answer.basis}") for answer in found)
    columns = ("T", *chain.from_iterable(pairs))
    curves = titled_table("h(T, λ) and λ over the planned rounds", columns)
    for rounds in curve_rows(found):
        cells = [_at(answer, rounds) for answer in found]
        numbers = [f"{cell[name]:.4g}" for cell in cells for name in ("bound", "global_weight")]
        curves.add_row(str(rounds), *numbers)
    console.print(curves)
    for path in figures:
        console.print(f"Figure: {path} (numbers: {path.with_suffix('.csv').name})", soft_wrap=True)


def _print_worlds(worlds: int | None, rows: list[FairnessRow]) -> None:
    columns = ("noise", "σ_u", "λ", "R as published", "R provable", "R drawn", "±")
    title = f"R, the variance over clients of ‖u* − v‖², in {worlds} drawn federations (seed 0)"
    table = titled_table(title, columns)
    for row in rows:
        numbers = (row.noise_stddev, row.global_weight, row.published, row.provable)
        seen = f"{row.drawn:.4g}", f"{row.standard_error:.2g}"
        table.add_row(row.noise, *(f"{number:.4g}" for number in numbers), *seen)
    console.print(table)
    console.print(
        "The smaller R, the more equally personal models serve all clients; ± is a standard error"
    )
