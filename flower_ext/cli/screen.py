"""The screen of all commands: tables, and messages about failures."""

import os
import sys
from collections.abc import Iterable
from typing import ClassVar

import click
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperCommand

from flower_ext.errors import FlowerExtError, InvalidValue

# A file or a pipe has no width of its own: with 120 columns, tables need not break words.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
_errors = Console(stderr=True)


def titled_table(title: str, columns: Iterable[str]) -> Table:
    """Return an empty table whose columns wrap long words, so that no text is cut off."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")


class _FoldedTable(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            for column in getattr(table, "columns", ()):
                column.overflow = "fold"
            yield table


class Page(Markdown):
    """A text in Markdown, whose tables wrap long words, so that no text is cut off."""

    elements: ClassVar = {**Markdown.elements, "table_open": _FoldedTable}


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
