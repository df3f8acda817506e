"""``flower-ext stats``: release statistics of an app's data, and print them."""

import csv
import math
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.launching import launch
from flower_ext.cli.preparing import Overrides, RunOptions, RunsFolder, prepare
from flower_ext.cli.screen import console, say, titled_table
from flower_ext.runs.settings import UnfitSetting
from flower_ext_consortium.statistics import read_statistics
from flower_ext_consortium.statistics.results import HEADER, PAGE, STANDARDISE, TABLE


def stats(
    app_folder: Annotated[
        Path,
        typer.Argument(metavar="APP", help="Folder of an app with the method statistics."),
    ],
    statistics: Annotated[
        list[str],
        typer.Argument(
            metavar="STATISTIC…",
            help='Such as count, "mean age 20:90", "variance age 20:90", "histogram age 20:90:7", '
            '"quantiles age 20:90", "table sex 0:2:2 age 20:90:7", "survival days event 0:99:9".',
        ),
    ],
    epsilon: Annotated[float, typer.Option(help="ε of all these statistics together.")],
    settings: Overrides = None,
    superlink: Annotated[
        str | None,
        typer.Option(help="Connection of Flower's configuration; by default the simulation."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run in one process, without Ray.")
    ] = False,
) -> None:
    """Release statistics with a guarantee: print them, and write a run directory with a web page.

    With --superlink, they are in the run directory on the SuperLink's machine, and not printed.

    Example: flower-ext stats apps/consortium "mean age 20:90" count --epsilon 0.2 --in-process
    """
    text = "; ".join(statistics)
    read_statistics(text)  # refuses a misspelt one before anything starts
    options = RunOptions(
        app=app_folder,
        superlink=superlink,
        settings=(
            "method=statistics",
            f"statistics={text}",
            f"epsilon={epsilon!r}",
            *(settings or ()),
        ),
        runs=runs if superlink is None else None,
        in_process=in_process,
    )
    path = launch(prepare(options))
    if path is None or superlink is not None:
        return
    if not (path / TABLE).exists():
        raise UnfitSetting(f"{path}: the round released nothing; report.html says why")
    with (path / TABLE).open(encoding="utf-8", newline="") as stream:
        rows = [*csv.reader(stream)][1:]
    table = titled_table(f"Statistics at ε = {epsilon:g}", HEADER[1:])
    for row in rows:
        numbers = [float(number) for number in row[2:]]
        is_hidden = math.isnan(numbers[0])
        table.add_row(row[1], *(["noise"] if is_hidden else [f"{n:.4g}" for n in numbers]))
    console.print(table)
    say(f"Page: {path / PAGE}")
    if (path / STANDARDISE).exists():
        say(f"To standardise: flower-ext run … --settings {path / STANDARDISE}")
