"""``flower-ext audit``: attack a strategy; compare the proven lower bound with the reported ε."""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from flower_ext import plugins
from flower_ext.cli.screen import console, say, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.files import write_whole
from flower_ext.privacy import epsilon_text
from flower_ext_audit import harness
from flower_ext_audit.experiment import Experiment
from flower_ext_audit.mechanisms import MECHANISMS

PLUGINS = {
    "guard": "flower-ext-guard",
    "statistics-clients": "flower-ext-consortium",
    "statistics-secure-sum": "flower-ext-consortium",
    "statistics-users": "flower-ext-consortium",
}
"""For each experiment that needs another plug-in of this project, the distribution to install."""


def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A mechanism of flower-ext, such as client-noise, or module:function that "
            "returns an Experiment.",
        ),
    ],
    trials: Annotated[
        int, typer.Option(min=8, help="Runs with the canary, and as many without it.")
    ] = 1000,
    confidence: Annotated[
        float, typer.Option(help="Probability that all bounds hold together, between 0 and 1.")
    ] = 0.99,
    output: Annotated[Path, typer.Option(help="Folder for audit.json.")] = Path("audit"),
) -> None:
    """Attack a strategy to prove a lower bound on its ε.

    The audit runs the strategy with and without a canary and measures how well an attacker tells
    the two kinds of runs apart. Exit status 1 means that a lower bound exceeds the reported ε; exit
    status 2 means that the audit did not run.

    Example: flower-ext audit client-noise --trials 500, or, with a file mine.py in the current
    folder, flower-ext audit mine:experiment. docs/audit.md shows such a file.
    """
    if not 0 < confidence < 1:
        raise typer.BadParameter(f"confidence={confidence!r}: expected a number in (0, 1)")
    try:
        experiment = _experiment_of(target)
        with Progress(console=console) as bar:
            task = bar.add_task(experiment.name, total=2 * trials)
            result = harness.audit(
                experiment,
                trials=trials,
                confidence=confidence,
                progress=lambda done, _: bar.update(task, completed=done),
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except InvalidValue:
        raise
    except Exception:  # raised by the strategy or its clients: the traceback shows where
        traceback.print_exc()
        raise typer.Exit(2) from None
    _print(result)
    file = output / "audit.json"
    output.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(result.to_dict(), indent=2).encode(), private=False)
    say(str(file))
    if result.broken:
        raise typer.Exit(1)


def _experiment_of(target: str) -> Experiment:
    """Return the experiment of a named mechanism, or the experiment of ``module:function``."""
    if target in MECHANISMS:
        return MECHANISMS[target].experiment()
    offered = {point.name: point for point in plugins.points("flower_ext.experiments")}
    if target in offered:
        experiment: Experiment = offered[target].load()()
        return experiment
    if target in PLUGINS:
        raise InvalidValue(
            f"target={target!r} needs a plug-in: {plugins.how_to_install(PLUGINS[target])}"
        )
    module, separator, name = target.partition(":")
    if not separator:
        names = ", ".join([*MECHANISMS, *offered])
        raise InvalidValue(f"target={target!r}: expected module:function, or one of {names}")
    # A console script does not look for modules in the current folder, where the user's file is.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        experiment = getattr(importlib.import_module(module), name)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise InvalidValue(
            f"target={target!r}: {error}; expected module:function, with a module in the current "
            "folder or an installed package"
        ) from error
    if not isinstance(experiment, Experiment):
        raise InvalidValue(
            f"target={target!r}: expected a function that returns a flower_ext_audit.Experiment,"
            f" but it returned a {type(experiment).__name__}"
        )
    return experiment


def _print(result: harness.Audit) -> None:
    """Print a table with one row for each adversary's view, and how to read the table."""
    columns = ("view", "reported ε", "δ", "lower bound", "ratio", "by")
    table = titled_table(f"Audit of {result.name}", columns)
    for view in result.views:
        best = view.best
        table.add_row(
            view.view.value,
            epsilon_text(best.terms.reported),
            f"{best.terms.delta:g}",
            f"{best.epsilon:.3f}",
            f"{best.ratio:.2f}" + (" EXCEEDED" if best.exceeds else ""),
            best.method,
        )
    console.print(table)
    console.print(
        f"{result.trials} runs in each world, {result.seconds:.0f} s. All bounds hold together "
        f"with confidence {result.confidence:.4g} (Bonferroni). A bound below the reported ε "
        "proves nothing about other attacks."
    )
