"""Parts that all commands share: an option, tables, and messages about failures."""

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
    list[str] | None, typer.Option("--set", help="Override of a setting, name=value; repeatable.")
]
"""The option ``--set`` of all commands that start runs."""

console = Console()
_errors = Console(stderr=True)


def titled_table(title: str, columns: Iterable[str]) -> Table:
    """Return an empty table whose columns wrap long words, so that no text is cut off."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")


class Command(TyperCommand):
    """A command that prints an expected error as one message, without a traceback.

    The exit status is 2 for an `InvalidValue`, and 1 for any other `FlowerExtError` and for a file
    that cannot be read or written.
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
    """Print why a command failed; return the exit to raise.

    The exit status is the error's own ``exit_status`` if it has one, and 1 otherwise.
    """
    _errors.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    return typer.Exit(getattr(error, "exit_status", 1))
