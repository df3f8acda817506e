"""Files of settings, and an app's presets: files with the settings of its paper's experiments.

The preset NAME of an app is the file ``papers/NAME.toml`` in the app's folder. A user's own file of
settings has the same format::

    title = "DP²-FedSAM, Table II, (N, S) = (1000, 2)"

    [settings]
    dataset = "cifar10"
    clients = 1000

    [where.method.dp-fedavg]    # only for runs with method = "dp-fedavg"
    local-epochs = 4
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml
from flower_ext.runs.settings import INCIDENTAL, nearest

FOLDER = "papers"
"""Folder of an app's presets."""


@dataclass(frozen=True)
class SettingsFile:
    """The settings in a file.

    Parameters
    ----------
    name : str
        Name of the file without its ending.
    title : str
        What the settings are for; may be empty.
    shared : Mapping[str, Any]
        Values of the table ``[settings]``, by the name of the setting.
    special : Mapping[str, Mapping[str, Mapping[str, Any]]]
        Values of the tables ``[where.SETTING.VALUE]``, which hold only if SETTING has the VALUE: by
        SETTING, by VALUE as text, and by the name of the setting.
    """

    name: str
    title: str
    shared: Mapping[str, Any]
    special: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of settings.

        Raises
        ------
        InvalidValue
            There is no such file, it is not TOML, or it does not have the format at the top of this
            module.
        """
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

        They are the values of ``[settings]``, and those of each table ``[where.SETTING.VALUE]`` for
        which SETTING has the value VALUE in the run. ``chosen`` are the settings that the user
        set, and ``defaults`` are the app's. The value of SETTING comes from ``chosen`` if it is
        there, otherwise from ``[settings]``, and otherwise from ``defaults``. The result does not
        include ``chosen``.
        """
        values = dict(self.shared)
        for name, cases in self.special.items():
            value = ChainMap(dict(chosen), dict(self.shared), dict(defaults)).get(name)
            values |= cases.get(str(value).lower() if isinstance(value, bool) else str(value), {})
        return values

    def text(self, changed: Collection[str]) -> str:
        """Return a text that says in a run's records from which file its settings come.

        The text has the file's name and title. It also lists ``changed``, which are the names of
        the settings that the user set to other values.
        """
        names = ", ".join(name for name in changed if name not in INCIDENTAL)
        title = f" ({self.title})" if self.title else ""
        return f"{self.name}{title}" + (f", changed: {names}" if names else "")


def _is_table(value: object, depth: int = 1) -> bool:
    """Return True if a value is a table of tables, nested ``depth`` levels deep."""
    if depth == 0:
        return True
    return isinstance(value, dict) and all(_is_table(each, depth - 1) for each in value.values())


def presets(app: Path) -> dict[str, Path]:
    """Return the files of an app's presets by name."""
    return {path.stem: path for path in sorted((app / FOLDER).glob("*.toml"))}


def preset(app: Path, name: str) -> SettingsFile:
    """Return an app's preset.

    Raises
    ------
    InvalidValue
        The app has no such preset; the message suggests the nearest ones.
    """
    known = presets(app)
    if name not in known:
        which = nearest(name, known) if known else f"{app} has no folder {FOLDER}"
        raise InvalidValue(f"preset {name!r}: no such preset; {which}")
    return SettingsFile.read(known[name])
