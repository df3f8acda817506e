"""The screen of all commands: tables, and messages about failures."""

from __future__ import annotations

from collections.abc import Iterable

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperCommand

from flower_ext.errors import FlowerExtError, InvalidValue

console = Console()
_errors = Console(stderr=True)


def titled_table(title: str, columns: Iterable[str]) -> Table:
    """Return an empty table whose columns wrap long words, so that no text is cut off."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")


def say(text: str) -> None:
    """Print a text as it is; long lines are not cut, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


class Command(TyperCommand):
    """A command that prints an expected error as one message, without a traceback.

    The exit status is 2 for an `InvalidValue`, and 1 for a file that cannot be read or written. For
    any other `FlowerExtError`, it is the error's ``exit_status``, or 1 if the error has none.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse an option that is given twice, because its first value would have no effect."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        options = [each for each in given if isinstance(each, click.Option)]
        for each in options:
            if options.count(each) > 1 and not (each.multiple or each.is_flag):
                raise typer.BadParameter("given twice: expected once", ctx, each)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; show an `InvalidValue` as an error of usage."""
        try:
            return super().invoke(ctx)
        except InvalidValue as error:
            raise typer.BadParameter(str(error), ctx) from error
        except (FlowerExtError, OSError) as error:
            if not isinstance(error, FlowerExtError) and error.filename is None:
                raise
            reason = f"[bold red]Failed:[/] {escape(str(error))}"
            _errors.print(reason, soft_wrap=True, highlight=False)
            raise typer.Exit(getattr(error, "exit_status", 1)) from error
