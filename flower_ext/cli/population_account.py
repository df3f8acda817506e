"""``flower-ext ledger``: show the ε that one population has spent in all its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from flower_ext.cli.screen import console
from flower_ext.runs.report import account_text


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
    console.print(Markdown(account_text(path, epsilon, delta)))
