"""``flower-ext audit``: what an attack proves about a strategy's ε."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


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
    asked = {
        "target": target,
        "trials": trials,
        "confidence": confidence,
        "output": str(output.absolute()),
    }
    # Strategies are run above this room, as those of `flower-ext run` are: in their own process.
    engine = [sys.executable, "-m", "flower_ext.auditing.command"]
    try:
        done = subprocess.run(engine, input=json.dumps(asked), text=True, check=False)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if done.returncode:
        raise typer.Exit(1 if done.returncode == 1 else 2)
