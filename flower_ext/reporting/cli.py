"""The command line: ``flower-ext run | deploy | calibrate | plan | search | report``."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flower_ext.planning import DittoProblem, LinearFairness, PilotEstimates
from flower_ext.privacy import (
    Accountant,
    ClippedSteps,
    FixedSizeSampling,
    FullParticipation,
    LedgerCorrupt,
    NeighboringRelation,
    Participations,
    PoissonSampling,
    Sampling,
    TargetOutOfReach,
    calibrate_noise_multiplier,
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
    participations_loss,
    privacy_loss,
    size_for_rate,
)
from flower_ext.reporting.comparison import write_comparison
from flower_ext.reporting.deployment import CONNECTION, Deployment, DeploymentFailed
from flower_ext.reporting.ditto_plan import (
    Answer,
    PrivacyBudget,
    answers,
    curve_rows,
    draw_plan,
)
from flower_ext.reporting.ditto_search import search_by_runs
from flower_ext.reporting.launch import LaunchFailed, launch
from flower_ext.reporting.report import write_report
from flower_ext.reporting.run import NotARun, RunDirectory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Private and personalised federated learning for Flower.",
)
console = Console()


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to account the same run."""

    name: str
    relation: NeighboringRelation
    view: str
    basis: str
    epsilon_at: Callable[[float], float]
    noise_for: Callable[[float], float]


@app.command()
def calibrate(
    population: Annotated[int, typer.Option(min=1, help="N: clients in the federation.")],
    rounds: Annotated[int, typer.Option(min=1, help="T: planned rounds.")],
    epsilon: Annotated[float | None, typer.Option(help="Target ε: prints the noise.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ instead of ε: prints what it gives.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; by default 1/N.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="r: share of clients a round.")
    ] = None,
    cohort_size: Annotated[int | None, typer.Option(help="rN instead of the rate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Noise for a target ε, or ε for a given noise: by the paper and by every sound accountant.

    The noise multiplier σ is the standard deviation of the noise on a round's sum over the
    clipping norm C. The unit is one client.

    Example: flower-ext calibrate --population 100 --sampling-rate 0.1 --rounds 60 --epsilon 2
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise typer.BadParameter("give either --epsilon or --noise-multiplier")
    if (sampling_rate is None) == (cohort_size is None):
        raise typer.BadParameter("give either --sampling-rate or --cohort-size")
    if cohort_size is not None and not 1 <= cohort_size <= population:
        raise typer.BadParameter(
            f"--cohort-size {cohort_size}: expected an integer from 1 to --population {population}"
        )
    rate = sampling_rate if cohort_size is None else cohort_size / population
    delta = 1 / population if delta is None else delta
    try:
        assert rate is not None
        ways = _ways(population, rate, rounds, delta)
        if epsilon is not None:
            noises = {way.name: way.noise_for(epsilon) for way in ways}
        else:
            noises = {ways[0].name: noise_multiplier or 0.0}
        rows: list[dict[str, Any]] = [
            {
                "calibrated by": way.name,
                "basis": way.basis,
                "relation": way.relation.value,
                "adversary sees": way.view,
                "noise_multiplier": noises[way.name],
                "epsilon": {other.name: other.epsilon_at(noises[way.name]) for other in ways},
            }
            for way in ways
            if way.name in noises
        ]
    except (ValueError, TargetOutOfReach) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        facts = {"unit": "client", "population": population, "sampling_rate": rate}
        console.print_json(json.dumps({**facts, "rounds": rounds, "delta": delta, "rows": rows}))
        return
    console.print(
        f"Unit: one client of {population} · r = {rate:g} · T = {rounds} · δ = {delta:.3g}\n"
    )
    if epsilon is not None:
        _print_noise(rows, epsilon)
    _print_epsilon(ways, rows)
    _print_failed_conditions(rate, rounds, delta, rows[0]["noise_multiplier"])


_BUDGET, _LOSSES = "Budget and training", "Losses (a pilot run estimates them)"
_WEIGHT = "λ: given, or the fairest by a Bayesian linear model"


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="ε > 0.", rich_help_panel=_BUDGET)],
    clients: Annotated[
        int, typer.Option(min=1, help="N: all take part in every round.", rich_help_panel=_BUDGET)
    ],
    examples: Annotated[
        list[int],
        typer.Option(
            min=1,
            help="|D|: records of a client; repeat for each client, all equal.",
            rich_help_panel=_BUDGET,
        ),
    ],
    clipping_norm: Annotated[
        float, typer.Option(help="C: of the local model.", rich_help_panel=_BUDGET)
    ],
    learning_rate: Annotated[
        float, typer.Option(help="η_G: of the local model.", rich_help_panel=_BUDGET)
    ],
    pilot: Annotated[
        Path | None,
        typer.Option(
            help="pilot.json of a pilot run, for the losses; options below come first.",
            rich_help_panel=_LOSSES,
        ),
    ] = None,
    dimension: Annotated[
        int | None, typer.Option(help="d: weights.", rich_help_panel=_LOSSES)
    ] = None,
    strong_convexity: Annotated[
        float | None, typer.Option(help="μ.", rich_help_panel=_LOSSES)
    ] = None,
    smoothness: Annotated[float | None, typer.Option(help="L.", rich_help_panel=_LOSSES)] = None,
    initial_gap: Annotated[
        float | None, typer.Option(help="Ψ₁ = F(w⁰) − F(w*).", rich_help_panel=_LOSSES)
    ] = None,
    initial_distance: Annotated[
        float | None, typer.Option(help="Ψ₂ = ‖v⁰ − v*‖².", rich_help_panel=_LOSSES)
    ] = None,
    gradient_bound: Annotated[
        float | None,
        typer.Option(help="G₀; without it no published bound.", rich_help_panel=_LOSSES),
    ] = None,
    model_spread: Annotated[
        float | None,
        typer.Option(help="M ≥ ‖u* − w*‖; without it no published bound.", rich_help_panel=_LOSSES),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ; by default 1/|D|.", rich_help_panel=_BUDGET)
    ] = None,
    gradient_clipping_norm: Annotated[
        float | None,
        typer.Option(
            help="G: of each record's gradient; without it one record may move a model by 2C.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    local_steps: Annotated[
        int, typer.Option(min=1, help="K: noised local steps a round.", rich_help_panel=_BUDGET)
    ] = 1,
    batch_size: Annotated[
        int | None, typer.Option(help="B; by default all records.", rich_help_panel=_BUDGET)
    ] = None,
    personal_learning_rate: Annotated[
        float | None, typer.Option(help="η_L; by default η_G.", rich_help_panel=_BUDGET)
    ] = None,
    max_rounds: Annotated[
        int, typer.Option(min=1, help="The most rounds to consider.", rich_help_panel=_BUDGET)
    ] = 1000,
    global_weight: Annotated[
        float | None,
        typer.Option(help="λ from 0 (local) to 2 (global).", rich_help_panel=_WEIGHT),
    ] = None,
    feature_energy: Annotated[
        float | None, typer.Option(help="ρ: the diagonal of XᵀX.", rich_help_panel=_WEIGHT)
    ] = None,
    label_variance: Annotated[
        float | None, typer.Option(help="σ²: of the labels' noise.", rich_help_panel=_WEIGHT)
    ] = None,
    model_variance: Annotated[
        float | None, typer.Option(help="ζ²: between clients' models.", rich_help_panel=_WEIGHT)
    ] = None,
    output: Annotated[Path, typer.Option(help="Where figures and CSV files go.")] = Path("plan"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How many rounds to run, and how much of the global model to take, for a privacy budget.

    For Ditto with noise on every uploaded model (DP-Ditto). The unit is one record of a client,
    replaced by another; the server sees every upload. Answers come as published and provable; the
    bound speaks of one full-gradient step a round on strongly convex losses.

    Example: flower-ext plan --epsilon 10 --delta 1e-4 --clients 20 --examples 3000
    --clipping-norm 20 --gradient-clipping-norm 1 --learning-rate 0.1 --dimension 10
    --strong-convexity 0.5 --smoothness 2 --initial-gap 1 --initial-distance 4 --global-weight 0.5
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
    if gradient_clipping_norm is None and (batch_size is not None or local_steps > 1):
        raise typer.BadParameter("--batch-size and --local-steps need --gradient-clipping-norm")
    try:
        size = _equal_size(examples, clients)
        steps = None
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
        losses = _losses(
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
        fairness = None
        if not missing:
            fairness = LinearFairness.expected(
                num_clients=clients,
                num_examples=size,
                dimension=problem.dimension,
                feature_energy=feature_energy or 0.0,
                label_variance=label_variance or 0.0,
                model_variance=model_variance or 0.0,
            )
        found = answers(
            budget,
            problem,
            max_rounds=max_rounds,
            global_weight=global_weight,
            fairness=fairness,
        )
    except (ValueError, TargetOutOfReach) as error:
        raise typer.BadParameter(str(error)) from error
    drawn = draw_plan(found, output, fairness=fairness)
    if as_json:
        facts = {"unit": "record", "relation": "replace-one", "view": "each-upload"}
        target = {"epsilon": epsilon, "delta": budget.delta}
        curves = [
            {"rounds": rounds, **{a.basis: _at(a, rounds) for a in found}}
            for rounds in curve_rows(found)
        ]
        console.print_json(
            json.dumps(
                {
                    **facts,
                    **target,
                    "plans": [answer.to_dict() for answer in found],
                    "curves": curves,
                    "figures": [str(path) for path in drawn],
                }
            )
        )
        return
    _print_plan(budget, found, drawn)


@app.command()
def run(
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")],
    superlink: Annotated[
        str | None,
        typer.Argument(help="Connection in Flower's config; by default the local simulation."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Run-config override, name=value; repeatable.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the run directory is made.")] = Path("runs"),
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="All clients in one process, in batches, without Ray."),
    ] = False,
    clients: Annotated[
        int | None, typer.Option(min=1, help="So many clients, in one process.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run directory to go on with; --set rounds=N goes beyond its end."),
    ] = None,
) -> None:
    """Run a Flower app, show its log, and exit with 1 if the run failed.

    Example: flower-ext run apps/dp2_fedsam --clients 1000 --set method=centaur --set rounds=20
    """
    settings = [*(settings or ()), *([] if clients is None else [f"clients={clients}"])]
    try:
        path = launch(
            app_folder,
            superlink=superlink,
            settings=settings,
            runs=runs,
            in_process=in_process or clients is not None,
            resume=resume,
        )
    except LaunchFailed as error:
        Console(stderr=True).print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    if path is not None and superlink is None:
        console.print(f"Run directory: {path}", soft_wrap=True)


@app.command()
def deploy(
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")],
    nodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes.")] = 4,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Run-config override, name=value; repeatable.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the run directory is made.")] = Path("runs"),
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where certificates, keys, database and logs are, and stay; by default nowhere."
        ),
    ] = None,
) -> None:
    """Run an app on a SuperLink and SuperNodes of this machine, with TLS and registered keys.

    Everything that is started is ended again: a rehearsal of docs/deploy.md on loopback.

    Example: flower-ext deploy apps/dp2_fedsam --nodes 4 --set rounds=3
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended from outside: end them as well
    with TemporaryDirectory() as temporary:
        deployment = Deployment(folder or Path(temporary), nodes)
        try:
            with deployment:
                console.print(f"SuperLink on port {deployment.port}, {nodes} SuperNodes online")
                path = launch(
                    app_folder,
                    superlink=CONNECTION,
                    nodes=nodes,
                    settings=settings or (),
                    runs=runs,
                    env=deployment.env,
                )
        except (LaunchFailed, DeploymentFailed) as error:
            Console(stderr=True).print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
    if path is not None:
        console.print(f"Report: {path / 'report.html'}", soft_wrap=True)


@app.command()
def search(
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="As apps/dp_ditto.")],
    rounds: Annotated[list[int], typer.Option(help="A T to try; repeatable.")],
    global_weight: Annotated[list[float], typer.Option(help="A λ to try; repeatable.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each pair, seeds 1, 2, …")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Run-config override, name=value; repeatable.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the run directories are made.")] = Path(
        "search"
    ),
) -> None:
    """T and λ for a budget by short runs in one process: for models that no bound speaks of.

    In turns: the T with the smallest training loss of personal models at the λ so far, the λ under
    which these losses are most alike at that T, until both stay. Losses are read without noise: for
    simulations and public stand-ins.

    Example: flower-ext search apps/dp_ditto --rounds 5 --rounds 20 --global-weight 0
    --global-weight 0.5 --set epsilon=10
    """
    try:
        found = search_by_runs(
            app_folder,
            rounds=rounds,
            global_weights=global_weight,
            seeds=range(1, seeds + 1),
            settings=settings or (),
            folder=runs,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except LaunchFailed as error:
        Console(stderr=True).print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    table = Table(title="Training losses of personal models", title_justify="left")
    for column in ("T", "λ", "mean", "std over clients"):
        table.add_column(column)
    for (T, weight), outcome in sorted(found.outcomes.items()):
        table.add_row(str(T), f"{weight:g}", f"{outcome.loss:.4g}", f"{outcome.unfairness:.4g}")
    console.print(table)
    how = "both stay" if found.settled else "they go round in a circle; its smallest loss"
    console.print(f"T* = {found.rounds}, λ* = {found.global_weight:g} ({how})")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[Path, typer.Option(help="Where a comparison of several runs goes.")] = Path(
        "comparison"
    ),
) -> None:
    """(Re)write the report of a run; compare several, grouped by method.

    Example: flower-ext report runs/20260101-120000-dp2-fedsam-digits
    """
    try:
        opened = [RunDirectory.open(path) for path in runs]
        if len(opened) == 1:
            path = write_report(opened[0])
        else:
            output.mkdir(parents=True, exist_ok=True)
            path = write_comparison(opened, output, title="Comparison of runs")
    except (NotARun, LedgerCorrupt) as error:
        raise typer.BadParameter(str(error)) from error
    console.print(str(path.absolute()), soft_wrap=True)


def main() -> None:
    """Entry point of ``flower-ext``."""
    app()


def _equal_size(examples: list[int], clients: int) -> int:
    """|D|, the same for all: the analysis averages over clients without weights."""
    if len(examples) not in (1, clients):
        raise ValueError(
            f"examples={examples!r}: expected one size for all, or {clients}, one for each client"
        )
    if len(set(examples)) > 1:
        raise ValueError(
            f"examples={examples!r}: expected equal sizes, which Theorems 1 to 3 rest on; plan for "
            "the smallest and let every client use that many records"
        )
    return examples[0]


def _losses(pilot: Path | None, **given: float | None) -> dict[str, Any]:
    """What `DittoProblem` has to know of the losses: from a pilot run, or as given."""
    known: dict[str, Any] = {"gradient_bound": math.inf, "model_spread": math.inf}
    if pilot is not None:
        estimates, dimension = PilotEstimates.load(pilot)
        known |= {**asdict(estimates), "dimension": dimension}
    known |= {name: value for name, value in given.items() if value is not None}
    if missing := [name for name in given if name not in known]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"give {options}, or --pilot with a file that has them")
    return known


def _at(answer: Answer, rounds: int) -> dict[str, float]:
    """One row of the curves."""
    plan = answer.plan
    return {
        "bound": float(plan.convergence[rounds - 1]),
        "global_weight": float(plan.global_weights[rounds - 1]),
    }


def _print_plan(budget: PrivacyBudget, found: list[Answer], drawn: list[Path]) -> None:
    console.print(
        f"Unit: one record of {budget.num_examples} on a client, replace-one, each upload seen · "
        f"N = {budget.num_clients} · ε = {budget.epsilon:g} · δ = {budget.delta:.3g}"
    )
    if budget.delta > 1 / budget.num_examples:
        console.print(
            f"δ = {budget.delta:g} is above 1/|D| = {1 / budget.num_examples:.3g}: a mechanism "
            "that publishes one record, drawn at random, would pass"
        )
    console.print(f"Provable noise: {budget.provable_source}\n")
    table = Table(title="Rounds and global weight for the budget", title_justify="left")
    kinds = ["as published", "worst case", *(["gradients clipped"] if budget.steps else [])]
    columns = ("basis", "T*", "λ*", "h(T*, λ*)", "noise stddev σ_u", *(f"ε {k}" for k in kinds))
    for column in columns:
        table.add_column(column)
    for answer in found:
        plan = answer.plan
        table.add_row(
            answer.basis,
            str(plan.rounds),
            f"{plan.global_weight:.4g}",
            f"{float(plan.bound.after(plan.rounds)):.4g}",
            f"{answer.noise_stddev:.4g}" if plan.rounds else "–",
            *(epsilon_text(answer.epsilons[kind]) if plan.rounds else "–" for kind in kinds),
        )
    console.print(table)
    for answer in found:
        if answer.plan.rounds == 0:
            console.print(f"{answer.basis}: no number of rounds improves the bound on the start")
        if answer.plan.rounds == int(answer.plan.candidates[-1]):
            console.print(f"{answer.basis}: T* is --max-rounds; more may be better")
        for text in answer.not_met:
            console.print(f"  ✗ {answer.basis}: {text}")
    curves = Table(title="h(T, λ) and λ over the planned rounds", title_justify="left")
    curves.add_column("T")
    for answer in found:
        curves.add_column(f"h, {answer.basis}")
        curves.add_column(f"λ, {answer.basis}")
    for rounds in curve_rows(found):
        cells = [_at(answer, rounds) for answer in found]
        numbers = [f"{cell[name]:.4g}" for cell in cells for name in ("bound", "global_weight")]
        curves.add_row(str(rounds), *numbers)
    console.print(curves)
    for path in drawn:
        console.print(f"Figure: {path} (numbers: {path.with_suffix('.csv').name})", soft_wrap=True)


def _ways(population: int, rate: float, rounds: int, delta: float) -> list[Way]:
    add_remove, replace_one = (
        NeighboringRelation.ADD_OR_REMOVE_ONE,
        NeighboringRelation.REPLACE_ONE,
    )
    theorem: dict[str, Any] = {"sampling_rate": rate, "rounds": rounds, "delta": delta}

    def sound(
        name: str,
        sampling: Sampling,
        relation: NeighboringRelation,
        view: str,
        accountant: Accountant,
    ) -> Way:
        facts: dict[str, Any] = {
            "sampling": sampling,
            "relation": relation,
            "rounds": rounds,
            "delta": delta,
            "accountant": accountant,
        }
        return Way(
            name=name,
            relation=relation,
            view=view,
            basis="provable",
            epsilon_at=lambda s: privacy_loss(noise_multiplier=s, **facts).epsilon,
            noise_for=lambda e: calibrate_noise_multiplier(epsilon=e, **facts),
        )

    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    everywhere = Participations.worst_case(rounds, fixed.size)

    def unamplified(name: str, view: str, participations: float) -> Way:
        facts: dict[str, Any] = {
            "participations": participations,
            "relation": NeighboringRelation.REPLACE_SPECIAL,
            "delta": delta,
        }
        # `participations` releases in which everyone takes part; they compose to one Gaussian.
        alone: dict[str, Any] = {
            "sampling": FullParticipation(population),
            "relation": NeighboringRelation.REPLACE_SPECIAL,
            "rounds": 1,
            "delta": delta,
        }
        return Way(
            name=name,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            view=view,
            basis="provable",
            epsilon_at=lambda s: participations_loss(noise_multiplier=s, **facts).epsilon,
            noise_for=lambda e: (
                calibrate_noise_multiplier(epsilon=e, **alone) * math.sqrt(participations)
            ),
        )

    return [
        Way(
            name="Theorem 2 (DP²-FedSAM)",
            relation=add_remove,
            view="each upload (claimed)",
            basis="published",
            epsilon_at=lambda s: dp2_fedsam_theorem2(noise_multiplier=s, **theorem).epsilon,
            noise_for=lambda e: dp2_fedsam_theorem2_noise_multiplier(epsilon=e, **theorem),
        ),
        sound("Poisson, PLD", poisson, add_remove, "released models", "pld"),
        sound("Poisson, RDP", poisson, add_remove, "released models", "rdp"),
        sound("fixed size, RDP", fixed, replace_one, "released models", "pld"),
        unamplified("cohorts known", "complete sums, in every round", everywhere.in_sums),
        unamplified(
            "uploads known",
            f"each upload, every round, cohorts of {fixed.size}",
            everywhere.in_uploads,
        ),
    ]


def _print_noise(rows: list[dict[str, Any]], epsilon: float) -> None:
    table = Table(title=f"Noise for ε = {epsilon:g}", title_justify="left")
    for column in ("calibrated by", "basis", "relation", "adversary sees", "noise multiplier σ"):
        table.add_column(column)
    for row in rows:
        words = [str(row[c]) for c in ("calibrated by", "basis", "relation", "adversary sees")]
        table.add_row(*words, noise_text(row["noise_multiplier"]))
    console.print(table)


def _print_epsilon(ways: list[Way], rows: list[dict[str, Any]]) -> None:
    table = Table(title="What each σ gives under each accounting", title_justify="left")
    table.add_column("σ")
    for way in ways:
        table.add_column(f"ε, {way.name}")
    for row in rows:
        epsilons = [epsilon_text(row["epsilon"][way.name]) for way in ways]
        table.add_row(noise_text(row["noise_multiplier"]), *epsilons)
    console.print(table)


def noise_text(noise_multiplier: float) -> str:
    """σ with four decimals, rounded up: the printed noise still meets its target."""
    # The guard keeps 2.0000000000000004 from becoming 2.0001; so below.
    return f"{math.ceil(noise_multiplier * 1e4 - 1e-6) / 1e4:.4f}"


def epsilon_text(epsilon: float) -> str:
    """ε with three significant digits, rounded up: never less than what would be spent."""
    if epsilon == 0 or math.isinf(epsilon):
        return f"{epsilon:g}"
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / step - 1e-6) * step:.3g}"


def _print_failed_conditions(
    rate: float, rounds: int, delta: float, noise_multiplier: float
) -> None:
    claim = dp2_fedsam_theorem2(
        noise_multiplier=noise_multiplier, sampling_rate=rate, rounds=rounds, delta=delta
    )
    console.print(f"Conditions of Theorem 2 not met at σ = {noise_text(noise_multiplier)}:")
    for condition in claim.conditions:
        if not condition.holds:
            console.print(f"  ✗ {condition.text}")


if __name__ == "__main__":
    main()
