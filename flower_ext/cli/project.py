"""The settings of an app: their defaults in its ``pyproject.toml``, and the values that users give.

``flower-ext settings`` lists them.

An app of this package names its class of settings there, in ``[tool.flower-ext.app]``. The settings
of any other Flower app have the types of their defaults.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sys import modules
from typing import Annotated, Any

import typer
from rich.markup import escape

from flower_ext.cli.screen import console, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.runs.settings import Declaration, declarations, nearest

SECTION = "[tool.flwr.app.config]"


def settings(
    apps: Annotated[list[Path], typer.Argument(metavar="APP", help="Folders of Flower apps.")],
) -> None:
    """List the settings of an app: names for --set, defaults, choices and meanings.

    Example: flower-ext settings apps/dp2-fedsam
    """
    for app in apps:
        title = f"Settings of {app.resolve().name}"
        table = titled_table(title, ("setting", "default", "choices", "meaning"))
        for name, row in rows_of(app).items():
            table.add_row(name, *map(escape, row))
        console.print(table)


def rows_of(app: Path) -> dict[str, tuple[str, str, str]]:
    """Return default, choices and meaning of an app's settings, in ``pyproject.toml``'s order.

    Raises
    ------
    InvalidValue
        The folder is not a Flower app, or the app has no settings.
    """
    defaults, known = declared_settings(app)
    if not defaults:
        raise InvalidValue(f"{app} has no settings: add {SECTION} to its pyproject.toml")
    return {
        name: (_default(defaults[name]), " | ".join(_choices(declaration)), declaration.meaning)
        for name, declaration in known.items()
    }


def checked_settings(app: Path, settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's default settings, and the overrides in ``settings`` (``name=value``).

    Each override is checked by its declaration, even if the chosen method does not read it.

    Raises
    ------
    InvalidValue
        There is no app, the app has no such setting, or a value does not fit its setting.
    """
    defaults, known = declared_settings(app)
    changes = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in known:
            raise InvalidValue(
                f"setting {setting!r}: expected name=value, as `flower-ext settings APP` lists "
                f"them; {nearest(name, known)}"
            )
        changes[name] = known[name].parse(text)
    return defaults, changes


def declared_settings(app: Path) -> tuple[dict[str, Any], dict[str, Declaration]]:
    """Return the defaults in an app's ``pyproject.toml``, and the declarations of its settings.

    Raises
    ------
    InvalidValue
        There is no app.
    """
    project = app / "pyproject.toml"
    if not project.is_file():
        missing = "no pyproject.toml in it" if app.is_dir() else "no such folder"
        raise InvalidValue(f"app={app}: expected the folder of a Flower app; there is {missing}")
    try:
        tool = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
    except ValueError as error:
        raise InvalidValue(f"{project} is not valid TOML: {error}") from None
    defaults = tool.get("flwr", {}).get("app", {}).get("config", {})
    named = tool.get("flower-ext", {}).get("app", {}).get("settings")
    known = _declared(app, named) if named else {}
    return defaults, {
        name: known.get(name) or Declaration.of_type(name, type(default))
        for name, default in defaults.items()
    }


def _declared(app: Path, named: str) -> dict[str, Declaration]:
    """Return the declarations of the class ``module:Class`` in an app's folder."""
    module, _, kind = named.partition(":")
    file = app.absolute() / Path(*module.split(".")).with_suffix(".py")
    # The name keeps apart two apps with packages of one name; dataclasses look modules up by name.
    name = f"{module} of {app.absolute()}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InvalidValue(
            f"[tool.flower-ext.app] settings={named!r}: expected module:Class of a file in {app}"
        )
    if name not in modules:
        modules[name] = module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    declared = declarations(getattr(modules[name], kind))
    return {declaration.name: declaration for declaration in declared.values()}


def _default(value: object) -> str:
    return json.dumps(value).strip('"') or '""'


def _choices(declaration: Declaration) -> tuple[str, ...]:
    return ("true", "false") if declaration.kind is bool else declaration.choices
