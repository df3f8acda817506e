"""The settings of an app: its defaults, their declarations, and checked overrides.

An app of this package names its class of settings in its ``pyproject.toml``, in
``[tool.flower-ext.app]``. The settings of any other Flower app have the types of their defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml
from flower_ext.runs.presets import SettingsFile
from flower_ext.runs.settings import Declaration, declarations, nearest


def checked_settings(
    app: Path, settings: Sequence[str], file: SettingsFile | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's default settings, and the settings that override them.

    A setting ``name=value`` also overrides the file. Each override is checked against its
    declaration, even if the chosen method ignores it.

    Raises
    ------
    InvalidValue
        There is no app, the app has no such setting, or a value does not fit its setting.
    """
    defaults, known = declared_settings(app)
    changes: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in known:
            raise InvalidValue(
                f"setting {setting!r}: expected name=value, as `flower-ext settings APP` lists "
                f"them; {nearest(name, known)}"
            )
        changes[name] = known[name].parse(text)
    if file is None:
        return defaults, changes
    values = file.settings(changes, defaults)
    for name, value in values.items():
        if name not in known:
            raise InvalidValue(
                f"settings file {file.name}: no setting {name!r}; {nearest(name, known)}"
            )
        known[name].check(value, f"settings file {file.name}:")
    return defaults, {**values, **changes}


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
    tool = read_toml(project).get("tool", {})
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
    # Dataclasses look modules up by name, and two apps may have packages of one name, so the name
    # includes the folder.
    name = f"{module} of {app.absolute()}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InvalidValue(
            f"[tool.flower-ext.app] settings={named!r}: expected module:Class of a file in {app}"
        )
    if name not in sys.modules:
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    declared = declarations(getattr(sys.modules[name], kind))
    return {declaration.name: declaration for declaration in declared.values()}
