"""The command line ``flower-ext``: new, run, report, export and more.

A command's module is imported only when that command runs, because importing PyTorch alone takes
a second.
"""

import ast
import io
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.models import ArgumentInfo

import flower_ext
from flower_ext import plugins
from flower_ext.cli.screen import Command, console
from flower_ext.errors import InvalidValue

COMMANDS = {
    "new": "new",
    "run": "run_command",
    "report": "reporting",
    "ledger": "reporting",
    "export": "export",
    "settings": "settings_table",
}
"""For each command, the module of this package that has a function of the command's name."""

PLUGINS = {
    "audit": "flower-ext-audit",
    "calibrate": "flower-ext-planner",
    "check": "flower-ext-check",
    "ditto-schedule": "flower-ext-planner",
    "guard": "flower-ext-guard",
    "link": "flower-ext-consortium",
    "stats": "flower-ext-consortium",
    "study": "flower-ext-consortium",
    "withdraw": "flower-ext-consortium",
}
"""For each command of a plug-in of this project, the distribution to install."""


def command_modules() -> dict[str, str]:
    """Return the module of each command, by the command's name.

    A plug-in adds a command by an entry point in the group ``flower_ext.commands``. A plug-in whose
    module is gone is left out.
    """
    core = {name: f"flower_ext.cli.{module}" for name, module in COMMANDS.items()}
    points = plugins.points("flower_ext.commands")
    return core | {point.name: point.module for point in points if _file_of(point.module)}


class Commands(TyperGroup):
    """A group that lists its commands without loading them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.modules = command_modules()
        self.commands = {
            name: Command(name, help=_docstring(name, module))
            for name, module in self.modules.items()
        }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Load the command that the user typed; for a misspelt one, Click suggests the nearest."""
        if args[0] not in self.modules and (distribution := PLUGINS.get(args[0])):
            ctx.fail(f"'{args[0]}' is a plug-in: {plugins.how_to_install(distribution)}")
        self.suggest_commands = False  # Typer would add a second suggestion
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name, self.modules[name]), rest


def _file_of(module: str) -> str:
    """Return the path of a module's file, or "" if there is no such module.

    Nothing is imported: the package of a plug-in may import PyTorch.
    """
    package, *names = module.split(".")
    spec = find_spec(package)
    for name in names:
        package = f"{package}.{name}"
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(package, folders or [])
    return (spec and spec.origin) or ""


def _docstring(name: str, module: str) -> str | None:
    source = Path(_file_of(module)).read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    function = name.replace("-", "_")
    return next(ast.get_docstring(node) for node in functions if node.name == function)


def load_command(name: str, module_name: str) -> click.Command:
    """Import a command's module, and return the command."""
    module = import_module(module_name)
    if hasattr(module, "app"):  # a command of several steps
        group = get_command(module.app)
        assert isinstance(group, click.Group)
        for step, step_command in group.commands.items():
            _restore_help(step_command, getattr(module, step))
        return group
    alone = typer.Typer(**_PLAIN)
    function = getattr(module, name.replace("-", "_"))
    alone.command(name, cls=Command)(function)
    command = get_command(alone)
    _restore_help(command, function)
    return command


def _restore_help(command: click.Command, function: Callable[..., object]) -> None:
    """Set the help texts of positional arguments again.

    Typer 0.20, the newest version that Flower allows, sets the help of an argument before it calls
    Click's constructor, but does not pass the help to this constructor. The constructor of Click
    8.5 then clears the help.
    """
    for name, hint in get_type_hints(function, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, ArgumentInfo):
                (argument,) = (each for each in command.params if each.name == name)
                argument.help = note.help


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"flower-ext {flower_ext.__version__}", highlight=False)
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
            stream.reconfigure(errors="replace")  # a terminal that cannot show ε prints "?"
    try:
        app()
    except InvalidValue as error:  # of the environment, before any command has been loaded
        sys.exit(f"flower-ext: {error}")


if __name__ == "__main__":
    main()
