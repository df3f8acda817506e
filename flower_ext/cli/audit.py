"""``flower-ext audit``: what an attack proves about a strategy's ε."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from flower_ext import auditing
from flower_ext.auditing import Audit, Experiment
from flower_ext.auditing.mechanisms import MECHANISMS
from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.privacy import epsilon_text
from flower_ext.runs.figures import draw_roc
from flower_ext.runs.files import write_whole

_BROKEN, _NO_AUDIT, _INTERRUPTED = 1, 2, 130


def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="module:function that returns an Experiment, or a mechanism of this package, as "
            "client-noise.",
        ),
    ],
    trials: Annotated[int, typer.Option(min=8, help="Runs in each of the two worlds.")] = 1000,
    confidence: Annotated[
        float, typer.Option(help="With which all bounds hold at once, between 0 and 1.")
    ] = 0.99,
    output: Annotated[
        Path, typer.Option(help="Where audit.json and a figure of each view go.")
    ] = Path("audit"),
) -> None:
    """Bound ε from below: run a strategy with and without a canary, and tell the runs apart.

    Exit status 1 says that a bound exceeds the printed ε, 2 that there was no audit.

    Example: flower-ext audit client-noise --trials 500, or with a file mine.py beside you,
    flower-ext audit mine:experiment. docs/audit.md shows such a file.
    """
    if not 0 < confidence < 1:
        raise typer.BadParameter(f"confidence={confidence!r}: expected a number in (0, 1)")
    try:
        experiment = experiment_of(target)
        with Progress(console=console) as bar:
            task = bar.add_task(experiment.name, total=2 * trials)
            found = auditing.audit(
                experiment,
                trials=trials,
                confidence=confidence,
                progress=lambda done, _: bar.update(task, completed=done),
            )
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except InvalidValue:
        raise
    except Exception:  # of the strategy or its clients: where it was raised says more
        traceback.print_exc()
        raise typer.Exit(_NO_AUDIT) from None
    print_audit(found)
    for path in write_audit(found, output):
        console.print(str(path), soft_wrap=True)
    if found.broken:
        raise typer.Exit(_BROKEN)


def experiment_of(target: str) -> Experiment:
    """The experiment of a mechanism's name, or what ``module:function`` returns.

    Raises
    ------
    ValueError
        There is no such mechanism or function, or it returns something else.
    """
    if target in MECHANISMS:
        return MECHANISMS[target]()
    module, separator, name = target.partition(":")
    if not separator:
        raise InvalidValue(
            f"target={target!r}: expected module:function, or one of {', '.join(MECHANISMS)}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise InvalidValue(f"target={target!r}: {error}") from error
    if not isinstance(found, Experiment):
        raise InvalidValue(
            f"target={target!r} returned a {type(found).__name__}: expected a "
            "flower_ext.auditing.Experiment"
        )
    return found


def write_audit(found: Audit, folder: Path) -> list[Path]:
    """``audit.json``, and for each view the ROC of the attack beside what (ε, δ) allows."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "audit.json"
    write_whole(told, json.dumps(found.to_dict(), indent=2).encode(), private=False)
    drawn = [
        draw_roc(
            folder,
            view.view.value,
            f"{found.name}: {view.view.value}",
            *view.scores,
            epsilon=view.printed,
            delta=view.delta,
        )
        for view in found.views
    ]
    return [told, *drawn]


def print_audit(found: Audit) -> None:
    """One line a view, and what the numbers mean."""
    columns = ("view", "printed ε", "δ", "lower bound", "ratio", "by")
    table = titled_table(f"Audit of {found.name}", columns)
    for view in found.views:
        best = view.best
        table.add_row(
            view.view.value,
            epsilon_text(view.printed),
            f"{view.delta:g}",
            f"{best.epsilon:.3f}",
            f"{best.ratio:.2f}" + (" EXCEEDED" if best.exceeds else ""),
            best.method,
        )
    console.print(table)
    console.print(
        f"{found.trials} runs in each world, {found.seconds:.0f} s; all bounds hold at once with "
        f"a confidence of {found.confidence:.4g} (Bonferroni). A bound below the printed ε proves "
        "nothing about other attacks."
    )
