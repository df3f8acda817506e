"""``flower-ext report`` and ``ledger``: reports on runs, and on the account that runs share."""

from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import Page, console, say
from flower_ext.runs.comparison import write_comparison
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.report import account_text, write_report


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directory; give several to compare.")],
    output: Annotated[Path, typer.Option(help="Folder for a comparison of several runs.")] = Path(
        "comparison"
    ),
) -> None:
    """Write the report of one run anew, or a comparison of several runs.

    A comparison treats runs that differ only in their seed as repetitions of one run.

    Example: flower-ext report runs/20260101-120000-dp2-fedsam-digits
    """
    opened = [RunDirectory.open(path) for path in runs]
    if len(opened) == 1:
        path = write_report(opened[0])
    else:
        path = write_comparison(opened, output, title="Comparison of runs")
    say(str(path.absolute()))


def ledger(
    path: Annotated[
        Path, typer.Argument(help="Shared account of several runs: Budget(ledger=...).")
    ],
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Budget ε; by default that of the last run.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ of the total ε; by default that of the last run.")
    ] = None,
) -> None:
    """Show the ε that a population has spent in all its runs, the ε left, and what no ε covers.

    Example: flower-ext ledger hospital.jsonl
    """
    console.print(Page(account_text(path, epsilon, delta)))
