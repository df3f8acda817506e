"""An app as files: unpack it, read its settings and its source."""

from __future__ import annotations

import ast
import shutil
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml

_SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "*.pt", "*.npz")


@dataclass(frozen=True)
class AppFolder:
    """A copy of an app, which its code may change."""

    path: Path

    @cached_property
    def tool(self) -> dict[str, Any]:
        """The table ``[tool.flwr.app]`` of the app's ``pyproject.toml``."""
        app: dict[str, Any] = read_toml(self.path / "pyproject.toml")["tool"]["flwr"]["app"]
        return app

    @cached_property
    def modules(self) -> dict[Path, ast.Module]:
        """The syntax trees of all Python files, by path relative to the folder."""
        trees = {}
        for path in sorted(self.path.rglob("*.py")):
            try:
                trees[path.relative_to(self.path)] = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):  # a file that the app need not import
                continue
        return trees

    @cached_property
    def literals(self) -> frozenset[str]:
        """All strings that the source spells out. Any other name may be made from data."""
        nodes = (node for tree in self.modules.values() for node in ast.walk(tree))
        return frozenset(
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )

    def shown(self, name: str) -> str:
        """Return a name if the source spells it out, and otherwise a text without data."""
        return name if name in self.literals | _KNOWN else "(a computed name)"

    def place(self, file: str, line: int) -> str:
        """Return the place in a file, relative to the app if it is the app's."""
        path = Path(file)
        inside = path.is_relative_to(self.path)
        return f"{path.relative_to(self.path) if inside else path.name}:{line}"


_KNOWN = frozenset(
    {"arrays", "metrics", "config", "model", "update", "num-examples", "num_examples", "norm_bit"}
)


def unpacked(app: Path, scratch: Path) -> AppFolder:
    """Copy an app, a folder or a FAB, into a new folder.

    Raises
    ------
    InvalidValue
        The path is no Flower app.
    """
    folder = scratch / "app"
    if app.is_file() and zipfile.is_zipfile(app):
        with zipfile.ZipFile(app) as archive:
            archive.extractall(folder)  # drops leading slashes and ".."
    elif app.is_dir():
        shutil.copytree(app, folder, ignore=_SKIPPED)
    else:
        raise InvalidValue(f"app={app}: expected the folder of a Flower app, or a .fab file")
    try:
        names = AppFolder(folder).tool["components"]
        missing = {"serverapp", "clientapp"} - set(names)
    except (KeyError, TypeError, OSError) as error:
        raise InvalidValue(
            f"app={app}: expected a pyproject.toml with [tool.flwr.app.components]"
        ) from error
    if missing:
        raise InvalidValue(f"app={app}: [tool.flwr.app.components] lacks {sorted(missing)[0]!r}")
    return AppFolder(folder)
