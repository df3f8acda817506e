"""The files of an app: unpack them, and read the app's settings and source."""

import ast
import shutil
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml

_SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "*.pt", "*.npz")
_USUAL_NAMES = frozenset(
    {"arrays", "metrics", "config", "model", "update", "num-examples", "num_examples", "norm_bit"}
)
"""Names of records and metrics that hold no data."""


@dataclass(frozen=True)
class AppFolder:
    """A copy of an app's folder, into which the app's code may write."""

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
        """All string literals of the source. A name that is not among them may come from data."""
        return frozenset(
            node.value
            for tree in self.modules.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )

    def shown(self, name: str) -> str:
        """Return a name that is usual or stands in the app's source; else "(a computed name)"."""
        return name if name in self.literals | _USUAL_NAMES else "(a computed name)"

    def component(self, side: str) -> Path | None:
        """Return the file that defines the ``"serverapp"`` or the ``"clientapp"``, if any."""
        module = str(self.tool["components"][side]).partition(":")[0]
        path = Path(*module.split(".")).with_suffix(".py")
        return path if path in self.modules else None

    def call_of(self, side: str, *names: str) -> str:
        """Return ``path:line`` of a call in the source; "" if the source calls none of ``names``.

        The search takes the names in order. For each name, it begins in the file that defines the
        component ``side``.
        """
        trees = dict(self.modules)
        if (first := self.component(side)) is not None:
            trees = {first: trees.pop(first), **trees}
        for name in names:
            for path, tree in trees.items():
                if call := next(calls(tree, name), None):
                    return f"{path.as_posix()}:{call.lineno}"
        return ""

    def described(self, error: BaseException) -> str:
        """Return the type and place of an error, but not its text, because it may hold data.

        The place is the last ``path:line`` of the traceback that is in the app's source. Without
        such a line, the place is the file name and line that raised the error.
        """
        frames = traceback.extract_tb(error.__traceback__)
        paths = [(Path(frame.filename), frame.lineno) for frame in frames]
        if isinstance(error, SyntaxError) and error.filename:  # no frame has reached that line
            paths.append((Path(error.filename), error.lineno))
        inside = [(p.relative_to(self.path), n) for p, n in paths if p.is_relative_to(self.path)]
        places = inside or [(Path(path.name), line) for path, line in paths]
        return f"{type(error).__name__} at {':'.join(map(str, places[-1]))}"


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls of the function or method ``name``, each before the calls inside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (
            getattr(node.func, "attr", None),
            getattr(node.func, "id", None),
        ):
            yield node


def unpack(app: Path, scratch: Path) -> AppFolder:
    """Copy an app, given as a folder or a FAB, into a new folder; refuse any other path."""
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
