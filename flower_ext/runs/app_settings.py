"""The settings of an app: defaults, declarations, checked overrides, and files of settings.

An app of this package names its class of settings in its ``pyproject.toml``, in
``[tool.flower-ext.app]``. The settings of any other Flower app have the types of their defaults.

The preset NAME of an app is the file ``papers/NAME.toml`` in the app's folder. A user's own file of
settings has the same format::

    title = "DP²-FedSAM, Table II, (N, S) = (1000, 2)"

    [settings]
    dataset = "cifar10"
    clients = 1000

    [where.method.dp-fedavg]    # only for runs with method = "dp-fedavg"
    local-epochs = 4
"""

import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml
from flower_ext.runs.settings import INCIDENTAL, Declaration, declarations, nearest

_NOT_NAMED = {*INCIDENTAL, "method", "upcycled", "clients-per-node"}
"""Settings on which no result depends, and those that choose one of the methods of a paper."""


@dataclass(frozen=True)
class SettingsFile:
    """The settings in a file; ``name`` is the file's name without its ending."""

    name: str
    title: str
    shared: Mapping[str, Any]
    """The table ``[settings]``."""
    special: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """The tables ``[where.SETTING.VALUE]``, by SETTING and then by VALUE, both as text."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of settings; refuse a file without the format in this module's docstring."""
        content = read_toml(path)
        title, shared = content.pop("title", ""), content.pop("settings", {})
        special = content.pop("where", {})
        if content or not (_is_table(shared) and _is_table(special, depth=3)):
            raise InvalidValue(
                f'settings file {path}: expected title = "…", a table [settings], and tables '
                "[where.SETTING.VALUE], nothing else"
            )
        return cls(path.stem, str(title), shared, special)

    def settings(
        self, chosen: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the settings that this file gives to a run.

        A table ``[where.SETTING.VALUE]`` counts if SETTING has this VALUE. The value of SETTING
        comes from the first of these that has one: the user's settings ``chosen``, the table
        ``[settings]``, and the app's ``defaults``. The result does not include ``chosen``.
        """
        values = dict(self.shared)
        for name, cases in self.special.items():
            value = ChainMap(dict(chosen), dict(self.shared), dict(defaults)).get(name)
            values |= cases.get(str(value).lower() if isinstance(value, bool) else str(value), {})
        return values

    def text(self, chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        """Return a text for a run's records: name, title, and ``chosen`` settings that differ."""
        values = {**defaults, **self.settings(chosen, defaults)}
        named = [name for name in chosen if name not in _NOT_NAMED and chosen[name] != values[name]]
        title = f" ({self.title})" if self.title else ""
        return f"{self.name}{title}" + (f", changed: {', '.join(named)}" if named else "")


def _is_table(value: object, depth: int = 1) -> bool:
    """Return True if a value is a table (``depth`` 1), a table of tables (2), and so on."""
    if depth == 0:
        return True
    return isinstance(value, dict) and all(_is_table(each, depth - 1) for each in value.values())


def presets(app: Path) -> dict[str, Path]:
    """Return the files of an app's presets by name."""
    return {path.stem: path for path in sorted((app / "papers").glob("*.toml"))}


def preset(app: Path, name: str) -> SettingsFile:
    """Return the preset ``name``; the error for an unknown name suggests the nearest names."""
    known = presets(app)
    if name not in known:
        which = nearest(name, known) if known else f"{app} has no folder papers"
        raise InvalidValue(f"preset {name!r}: no such preset; {which}")
    return SettingsFile.read(known[name])


def checked_settings(
    app: Path, settings: Sequence[str], file: SettingsFile | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's default settings, and the settings that override them.

    ``settings`` are texts ``name=value``, which also override the ``file``. Each value is checked
    against the declaration of its setting, even if the chosen method ignores this setting.
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
    """Return the defaults in an app's ``pyproject.toml``, and the declarations of its settings."""
    project = app / "pyproject.toml"
    if not project.is_file():
        missing = "it has no pyproject.toml" if app.is_dir() else "there is no such folder"
        raise InvalidValue(f"app={app}: expected the folder of a Flower app, but {missing}")
    tool = read_toml(project).get("tool", {})
    defaults = tool.get("flwr", {}).get("app", {}).get("config", {})
    named = tool.get("flower-ext", {}).get("app", {}).get("settings")
    known: dict[str, Declaration] = {}
    if named:
        known = {each.name: each for each in declarations(_settings_class(app, named)).values()}
    return defaults, {
        name: known.get(name) or Declaration.of_type(name, type(default))
        for name, default in defaults.items()
    }


def _settings_class(app: Path, named: str) -> Any:
    """Return the class ``module:Class`` in an app's folder."""
    module, _, kind = named.partition(":")
    file = app.absolute() / Path(*module.split(".")).with_suffix(".py")
    # Dataclasses look modules up by name, and two apps may have packages of one name, so the name
    # includes the folder.
    name = f"{module} of {app.absolute()}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InvalidValue(
            f"[tool.flower-ext.app] settings={named!r}: expected module:Class, where the module is "
            f"a file in {app}"
        )
    if name not in sys.modules:
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], kind)
