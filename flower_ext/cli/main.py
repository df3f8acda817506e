"""The command line: ``flower-ext new | run | deploy | calibrate | plan | search | audit`` …

A command's module is loaded when it is asked for: PyTorch alone takes a second.
"""

from __future__ import annotations

import ast
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from flower_ext import __version__
from flower_ext.cli.screen import Command, console

COMMANDS = {
    "new": "new",
    "run": "run",
    "deploy": "deploy",
    "report": "report",
    "calibrate": "calibrate",
    "plan": "schedule",
    "search": "schedule",
    "audit": "audit",
    "ledger": "ledger",
    "export": "export",
    "settings": "settings",
}
"""Modules of this package by the names of the functions in them that are commands."""


class Commands(TyperGroup):
    """A group that lists its commands without loading them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: Command(name, help=_docstring(name)) for name in COMMANDS}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Load the command that is called."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else _loaded(name), rest


def _docstring(name: str) -> str | None:
    source = (Path(__file__).parent / f"{COMMANDS[name]}.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return next(ast.get_docstring(node) for node in functions if node.name == name)


def _loaded(name: str) -> click.Command:
    alone = typer.Typer(**_PLAIN)
    function = getattr(import_module(f"flower_ext.cli.{COMMANDS[name]}"), name)
    alone.command(name, cls=Command)(function)
    return get_command(alone)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"flower-ext {__version__}", highlight=False)
        raise typer.Exit


_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(cls=Commands, no_args_is_help=True, **_PLAIN)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Private and personalised federated learning for Flower."""


def main() -> None:
    """Entry point of ``flower-ext``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ε shows a question mark
    app()


if __name__ == "__main__":
    main()
