"""Audit what standard input names, as JSON: ``python -m flower_ext.auditing.command``.

People use ``flower-ext audit``.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flower_ext.auditing.harness import Audit, Experiment, audit
from flower_ext.auditing.mechanisms import MECHANISMS
from flower_ext.privacy import epsilon_text
from flower_ext.reporting.commands.screen import console, titled_table
from flower_ext.reporting.figures import draw_roc
from flower_ext.reporting.files import write_whole

BROKEN, NO_AUDIT = 1, 2


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
        raise ValueError(
            f"target={target!r}: expected module:function, or one of {', '.join(MECHANISMS)}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"target={target!r}: {error}") from error
    if not isinstance(found, Experiment):
        raise ValueError(
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


def main() -> int:
    """Audit; the exit status says what was found."""
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        experiment = experiment_of(asked["target"])
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console
        )
        with bar:
            task = bar.add_task(experiment.name, total=2 * asked["trials"])
            found = audit(
                experiment,
                trials=asked["trials"],
                confidence=asked["confidence"],
                progress=lambda done, _: bar.update(task, completed=done),
            )
    except KeyboardInterrupt:
        print("Error: interrupted", file=sys.stderr)
        return NO_AUDIT
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return NO_AUDIT
    except Exception:  # of the strategy or its clients: where it was raised says more
        traceback.print_exc()
        return NO_AUDIT
    print_audit(found)
    for path in write_audit(found, Path(asked["output"])):
        console.print(str(path), soft_wrap=True)
    return BROKEN if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
