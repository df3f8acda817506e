"""``flower-ext report``: the report of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import console
from flower_ext.runs.comparison import write_comparison
from flower_ext.runs.directory import RunDirectory
from flower_ext.runs.report import write_report


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[Path, typer.Option(help="Where a comparison of several runs goes.")] = Path(
        "comparison"
    ),
) -> None:
    """(Re)write the report of a run; compare several, those that differ in the seed as one.

    Example: flower-ext report runs/20260101-120000-dp2-fedsam-digits
    """
    opened = [RunDirectory.open(path) for path in runs]
    if len(opened) == 1:
        path = write_report(opened[0])
    else:
        output.mkdir(parents=True, exist_ok=True)
        path = write_comparison(opened, output, title="Comparison of runs")
    console.print(str(path.absolute()), soft_wrap=True)
