"""``flower-ext new``: an app of one's own, from one of those that come with the package.

A wheel holds ``apps/`` as ``templates`` beside this module; a checkout has the folder itself.
"""

from __future__ import annotations

import keyword
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.screen import console
from flower_ext.errors import InvalidValue

_NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?")
"""A name that Flower takes for an app, and Python's packagers for a project."""

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
"""A link in Markdown to a file of the checkout, which a copy has not."""


def new(
    app: Annotated[
        str | None, typer.Argument(metavar="APP", help="One of them; without it, they are listed.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Made here, and the app's name; by default APP."),
    ] = None,
) -> None:
    """Make an app of your own from one that comes with this package, or list these.

    Example: flower-ext new dp2-fedsam my-app
    """
    known = templates()
    if app is None or app not in known:
        for name, template in known.items():
            console.print(
                f"{name:20}{_project(template)['description']}", highlight=False, soft_wrap=True
            )
    if app is None:
        return
    if app not in known:
        raise InvalidValue(f"app={app!r}: expected one of {', '.join(known)}")
    folder = Path(app) if folder is None else folder
    copy(known[app], folder)
    told = f"{folder} is yours: cd {shlex.quote(str(folder))} && flower-ext run ."
    console.print(told, highlight=False, markup=False, soft_wrap=True)


def templates() -> dict[str, Path]:
    """Return the folders of the apps that come with this package, by name."""
    installed = Path(__file__).parent / "templates"
    apps = installed if installed.is_dir() else Path(__file__).parents[2] / "apps"
    return {path.parent.name: path.parent for path in sorted(apps.glob("*/pyproject.toml"))}


def copy(template: Path, folder: Path) -> None:
    """Copy an app; its project and its Python package are named as the folder is.

    Raises
    ------
    InvalidValue
        The folder is there, or cannot be the name of an app and of a package of its own.
    """
    name = folder.absolute().name
    package = _package(name)
    if folder.exists():
        raise InvalidValue(f"folder={str(folder)!r}: expected one that is not there yet")
    was = template.name.replace("-", "_") + "_app"
    for source in sorted(template.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        text = source.read_text(encoding="utf-8")
        text = text.replace(f"apps/{template.name}", ".").replace(was, package)
        if source.name == "pyproject.toml":
            text = text.replace(f'\nname = "{template.name}"\n', f'\nname = "{name}"\n', 1)
        elif source.suffix == ".md":
            text = _LINK.sub(r"\1", text)
        target = folder / str(source.relative_to(template)).replace(was, package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def _package(name: str) -> str:
    """Return the name of an app's Python package."""
    if not _NAME.fullmatch(name):
        raise InvalidValue(
            f"folder={name!r}: expected a name of at most 32 letters, digits and hyphens, the "
            "first a letter, the last no hyphen"
        )
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or find_spec(package) is not None:
        raise InvalidValue(
            f"folder={name!r}: expected a name that no Python module has; add a word, as in "
            f"{name}-app"
        )
    return package


def _project(template: Path) -> dict[str, str]:
    project: dict[str, str] = tomllib.loads(
        (template / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    return project
