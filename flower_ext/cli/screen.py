"""What the commands print: tables that lose no word on a narrow terminal, and why one failed."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

console = Console()
_errors = Console(stderr=True)


def titled_table(title: str, columns: Iterable[str]) -> Table:
    """An empty table; words that are too long for their column go on in the next line."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")


def failed(error: Exception) -> typer.Exit:
    """Says why a command failed: to be raised, which ends it with 1."""
    _errors.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
    return typer.Exit(1)
