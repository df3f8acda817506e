"""Studies: stages, each a run, that share one account of the privacy that they spend.

A study is a TOML file::

    title = "Three hospitals"
    app = "apps/consortium"

    [settings]                       # of all stages, as for `flower-ext run --set`
    num-silos = 3

    [[link]]                         # options of `flower-ext link users`, once for each silo
    table = "north.csv"
    by = ["surname", "given"]
    key = "study.key"
    buckets = 100000
    output = "linked/silo-0.csv"

    [[stage]]
    name = "statistics"
    settings = { method = "statistics", epsilon = 0.3 }

    [[stage]]
    name = "training"
    uses = ["statistics/standardise.toml"]      # files of settings that earlier stages wrote
    settings = { epsilon = 1.0 }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flower_ext.errors import InvalidValue
from flower_ext.files import from_table, read_toml
from flower_ext.runs.presets import SettingsFile
from flower_ext.runs.settings import OF_NODES

ACCOUNT = "account.jsonl"
"""File in a study's folder with the privacy that all stages have spent."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of a study: its name, its settings, and the files of earlier stages that it uses."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """The content of a study's file; paths in it are relative to the file's folder."""

    path: Path
    app: str
    stage: Sequence[Stage]
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    link: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a study.

        Raises
        ------
        InvalidValue
            There is no such file, it is not TOML, or it lacks the form shown at the top of this
            module.
        """
        content, where = read_toml(path), f"study {path}"
        stages = [
            from_table(Stage, each, f"{where}: [[stage]]") for each in content.pop("stage", [])
        ]
        study = from_table(cls, {**content, "path": path, "stage": stages}, where)
        if not stages or len({stage.name for stage in stages}) < len(stages):
            raise InvalidValue(f"{where}: expected tables [[stage]], each with a different name")
        return study

    def placed(self, path: str) -> Path:
        """Return a path in the study's file as an absolute path."""
        return (self.path.parent / Path(path).expanduser()).absolute()

    def settings_of(self, stage: Stage, folder: Path) -> dict[str, Any]:
        """Return the settings of a stage; ``folder`` has the account and the earlier stages' runs.

        Raises
        ------
        InvalidValue
            The stage uses a file that no earlier stage has written.
        """
        settings = {"run-directory": str(folder / stage.name), **self.settings}
        if "population-epsilon" in settings:
            settings.setdefault("budget-ledger", str(folder / ACCOUNT))
        for name in OF_NODES:
            if settings.get(name):
                settings[name] = str(self.placed(settings[name]))
        for name in stage.uses:
            if not (path := folder / name).exists():
                raise InvalidValue(
                    f"`uses` names {path}, but no earlier stage has written this file"
                )
            settings |= SettingsFile.read(path).settings(settings)
        return {**settings, **stage.settings}
