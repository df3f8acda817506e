"""Shared by all commands: an option, tables that lose no word, and why a command failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperCommand

from flower_ext.errors import FlowerExtError, InvalidValue

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Run-config override, name=value; repeatable.")
]
"""An option of the commands that start runs."""

console = Console()
_errors = Console(stderr=True)


def titled_table(title: str, columns: Iterable[str]) -> Table:
    """An empty table; words that are too long for their column go on in the next line."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")


class Command(TyperCommand):
    """A command that prints errors meant for people as one line.

    A value that the package refuses ends the command with 2; other such errors, and files that
    cannot be read or written, end it with 1.
    """

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except InvalidValue as error:
            raise typer.BadParameter(str(error), ctx) from error
        except (FlowerExtError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:
                raise
            raise failed(error) from error


def failed(error: Exception) -> typer.Exit:
    """Print why a command failed; return what ends it with 1, or as a signal's default would."""
    _errors.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    return typer.Exit(getattr(error, "exit_status", 1))
