"""``flower-ext new``: copy an app of this package as the start of a new app.

A wheel holds ``apps/`` as ``templates`` beside this module; a checkout has the folder ``apps/``.
"""

import keyword
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.checks import require_one_of
from flower_ext.cli.screen import say
from flower_ext.errors import InvalidValue
from flower_ext.files import read_toml

_NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?")
"""Names that Flower accepts for an app, and that Python's packaging tools accept for a project."""

_NOT_COPIED = {"__pycache__", ".flwr", "runs"}
"""Folders that running an app leaves in it."""

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
"""A Markdown link to a file of the checkout, which a copied app does not have."""


def new(
    app: Annotated[
        str | None,
        typer.Argument(metavar="APP", help="App to copy; without it, the command lists all apps."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folder to create, by default APP; the new app gets the folder's name.",
        ),
    ] = None,
) -> None:
    """Create an app of your own from an app of this package, or list the apps of this package.

    Example: flower-ext new dp2-fedsam my-app
    """
    known = templates()
    if app is None or app not in known:
        for name, template in known.items():
            project = read_toml(template / "pyproject.toml")["project"]
            say(f"{name:20}{project['description']}")
    if app is None:
        return
    require_one_of("app", app, list(known))
    folder = Path(app) if folder is None else folder
    copy(known[app], folder)
    say(f"Created {folder}. To run it: cd {shlex.quote(str(folder))} && flower-ext run .")


def templates() -> dict[str, Path]:
    """Return the folders of the apps that come with this package, by name."""
    installed = Path(__file__).parent / "templates"
    apps = installed if installed.is_dir() else Path(__file__).parents[2] / "apps"
    return {path.parent.name: path.parent for path in sorted(apps.glob("*/pyproject.toml"))}


def copy(template: Path, folder: Path) -> None:
    """Copy an app; name its project and its Python package after the folder."""
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        raise InvalidValue(
            f"folder={name!r}: expected a name of at most 32 letters, digits and hyphens that "
            "begins with a letter and does not end with a hyphen"
        )
    package = name.replace("-", "_").lower()
    if keyword.iskeyword(package) or find_spec(package) is not None:
        raise InvalidValue(
            f"folder={name!r}: expected a name that no installed Python module has; add a word, "
            f"for example {name}-app"
        )
    if folder.exists():
        raise InvalidValue(f"folder={str(folder)!r}: expected a folder that does not exist yet")
    # Imports, commands and links of the copy name the new app in place of the template.
    was = template.name.replace("-", "_") + "_app"
    for source in sorted(template.rglob("*")):
        if source.is_dir() or _NOT_COPIED & set(source.relative_to(template).parts):
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
