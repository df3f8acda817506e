"""Figures 3 and 4: loss with perturbed local models, and its cost in ε, published and provable.

Plain and upcycled run equally many visible rounds, all devices, no stragglers, as in the paper:
σ = 1 against 0.8 under output perturbation, α = 10 against 20 under objective perturbation.

By default every record is scaled to norm at most 1, and the model is binary logistic regression, so
gradients are bounded. A method's local problem is solved exactly, with μ = 0.5, if it depends on no
memory: only then is the provable ε better than with the 2τ of any clipped model. ``--full`` has the
presets of both figures instead, and a τ for each of the two pairs of ε̄ that the paper prints.
"""

from collections.abc import Mapping, Sequence

from benchmarks.runs import Config, Experiment, mean_and_std, preset_settings
from benchmarks.upcycled.experiment import (
    METHODS,
    SYNTHETIC,
    Scale,
    in_rounds,
    mean_of_last_evaluations,
    method_config,
    search,
)
from flower_ext.privacy import Guarantee, epsilon_text
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

EXACT = ("fedavgm", "fedprox", "fedyogi")
"""Methods whose clients may minimise loss + (μ/2) ‖w − w̄‖² exactly."""
NOISE: dict[str, dict[bool, Config]] = {
    "output": {False: {"noise-stddev": 1.0}, True: {"noise-stddev": 0.8}},
    "objective": {False: {"noise-rate": 10.0}, True: {"noise-rate": 20.0}},
}


def figures(experiment: Experiment, scale: Scale) -> None:
    """Run both perturbations on every private data set; write tables and figures."""
    for dataset in scale.private_datasets:
        for norm in scale.clipping_norms:
            name = f"output-{norm:g}-{dataset}"
            _figure(experiment, scale, name, "output", dataset, {"clipping-norm": norm})
        _figure(experiment, scale, f"objective-{dataset}", "objective", dataset, {})


def _figure(
    experiment: Experiment,
    scale: Scale,
    name: str,
    perturbation: str,
    dataset: str,
    changes: Config,
) -> None:
    rounds = scale.private_rounds
    settings_of = _printed if scale.as_printed else _bounded
    settings = {
        f"private/{name}-{method}": {**settings_of(method, perturbation, dataset), **changes}
        for method in scale.private_methods
        # pFedMe's local problem has no proximal term, and Theorem 6.3 requires one.
        if not (perturbation == "objective" and method == "pfedme")
    }
    best = search(
        experiment,
        {pair: {**settings[pair], **NOISE[perturbation][True]} for pair in settings},
        rounds=(rounds // 2, rounds),
        learning_rates=scale.private_learning_rates,
        coefficients=scale.coefficients,
        jointly=scale.joint_search,
        metric="loss_mean",
    )
    cases = {
        f"{pair}-{upcycled:d}": {
            **settings[pair],
            **in_rounds(best[pair][upcycled], rounds),
            **NOISE[perturbation][upcycled],
        }
        for upcycled in (False, True)
        for pair in settings
    }
    runs_of = experiment.grouped(cases, scale.private_seeds, name).values()
    groups = {_label(runs[0]): runs for runs in runs_of}
    _draw(experiment, name, groups)
    rows = [(label, *_row(runs)) for label, runs in groups.items()]
    header = ("method", "loss", "accuracy", "published ε̄ (max)", "provable ε̄ (max)", "coefficient")
    notes = (
        f"{rounds} visible rounds, {len(scale.private_seeds)} seeds; "
        "ε̄ is the mean over devices, of one record before a server that sees every upload. "
        "✗: a condition of the published theorem is not met in this run."
    )
    title = f"# {perturbation.capitalize()} perturbation, {dataset}"
    experiment.write(name, title, table(header, rows), notes)


def _label(run: RunDirectory) -> str:
    name = METHODS[str(run.config["method"])]
    return f"{name}, upcycled" if run.config["upcycled"] else name


def _printed(method: str, perturbation: str, dataset: str) -> Config:
    """Return the settings of the paper's figure."""
    figure = {"output": 3, "objective": 4}[perturbation]
    name = f"upcycled-fig{figure}-{SYNTHETIC[dataset]}"
    return {**preset_settings("upcycled-fl", name, method=method), **method_config(method)}


def _bounded(method: str, perturbation: str, dataset: str) -> Config:
    """Return settings under which the local problem has bounded gradients."""
    exact = method in EXACT
    return {
        **method_config(method),
        "dataset": dataset,
        "perturbation": perturbation,
        "sampling-rate": 1.0,
        "straggler-ratio": 0.0,
        "unit-features": True,
        "model": "binary-logistic",
        "classes": 2,
        "solver": "newton" if exact else "sgd",
        "proximal-weight": 0.5 if exact or perturbation == "objective" else 0.0,
    }


def _row(runs: Sequence[RunDirectory]) -> tuple[str, ...]:
    last = runs[0].metrics()[-1]
    guarantees = runs[0].guarantees()
    coefficient = f"{runs[0].config['coefficient']:g}" if runs[0].config["upcycled"] else "–"
    return (
        mean_and_std([mean_of_last_evaluations(run, "loss_mean") for run in runs]),
        mean_and_std([mean_of_last_evaluations(run, "accuracy_mean") for run in runs]),
        *(_epsilons(last, guarantees, basis) for basis in ("published", "provable")),
        coefficient,
    )


def _epsilons(last: Mapping[str, float], guarantees: Sequence[Guarantee], basis: str) -> str:
    stated = [g for g in guarantees if g.basis == basis]
    if not stated or f"epsilon_{basis}" not in last:
        return "none"
    mean, largest = (epsilon_text(last[f"epsilon_{basis}{end}"]) for end in ("_mean", ""))
    return f"{mean} ({largest})" + ("" if stated[0].conditions_hold else " ✗")


def _draw(experiment: Experiment, name: str, groups: Mapping[str, Sequence[RunDirectory]]) -> None:
    """Draw loss against rounds, and against each ε̄; upcycled lines are dashed by their order."""
    loss = {
        label: [run.metrics().series("loss_mean") for run in runs] for label, runs in groups.items()
    }
    experiment.draw(f"{name}-rounds", f"Loss, {name}", "loss", loss)
    for basis in ("published", "provable"):
        spent = {
            label: [run.metrics().series(f"epsilon_{basis}_mean") for run in runs]
            for label, runs in groups.items()
        }
        drawn = {label: lines for label, lines in loss.items() if all(x for x, _ in spent[label])}
        experiment.draw(
            f"{name}-{basis}", f"Loss, {name}", "loss", drawn, xlabel=f"ε̄, {basis}", against=spent
        )
