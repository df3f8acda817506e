"""The settings of an app, as its ``pyproject.toml`` has them, and the values that users give them.

There, a comment follows each setting: the choices, as in ``poisson | everyone``, then a colon and
the setting's meaning.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.runs.settings import UnfitSetting

SECTION = "[tool.flwr.app.config]"

_LINE = re.compile(r'(?P<name>[\w-]+) *= *(?:"[^"]*"|[^#"]*?) *(?:# *(?P<comment>.*))?')
_MORE = re.compile(r"\s+# *(?P<comment>.*)")
_COMMENT = re.compile(r"(?P<choices>[\w.-]+(?: \| [\w.-]+)+)(?:: (?P<meaning>.*))?")

_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}

_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "a finite number > 0")
_SHARE: tuple[Callable[[Any], bool], str] = (lambda value: 0 < value <= 1, "a number in (0, 1]")
_PART: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < 1, "a number in [0, 1)")
_COUNT: tuple[Callable[[Any], bool], str] = (lambda value: value >= 1, "an integer >= 1")
_RANGES = {
    "rounds": _COUNT,
    "clients": _COUNT,
    "num-silos": _COUNT,
    "sampling-rate": _SHARE,
    "record-sampling-rate": _SHARE,
    "epsilon": _POSITIVE,
    "delta": _PART,
    "clipping-norm": _POSITIVE,
    "noise-multiplier": (lambda value: value >= 0, "a finite number >= 0"),
    "colluding-share": _PART,
    "dropout-share": _PART,
}
"""Values of the settings by which apps promise privacy, whatever method reads them."""


def checked_settings(app: Path, settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's default settings, and the overrides in ``settings`` (``name=value``).

    Each override is checked by the type of its default, by the choices in the app's
    ``pyproject.toml``, and by the ranges that all apps of this package share, even if the chosen
    method does not read it.

    Raises
    ------
    InvalidValue
        There is no app, the app has no such setting, or a value does not fit its setting.
    """
    project = app / "pyproject.toml"
    if not app.is_dir():
        raise InvalidValue(
            f"app={app}: expected the folder of a Flower app; there is no such folder"
        )
    if not project.is_file():
        raise InvalidValue(
            f"app={app}: expected the folder of a Flower app; there is no pyproject.toml in it"
        )
    try:
        facts = tomllib.loads(project.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(f"{project} is not valid TOML: {error}") from None
    flwr = facts.get("tool", {}).get("flwr", {})
    defaults: dict[str, Any] = flwr.get("app", {}).get("config", {})
    changes = dict(_override(setting, defaults) for setting in settings)
    comments = comments_of(app, defaults)
    for name, value in changes.items():
        listed, _ = choices_of(comments[name])
        choices = listed.split(" | ") if listed else ()
        # Choices without the default are no list of all values.
        if str(defaults[name]) in choices and str(value) not in choices:
            raise UnfitSetting(f"setting {name}={value!r}: expected one of {', '.join(choices)}")
        if isinstance(value, float) and math.isnan(value):
            raise UnfitSetting(f"setting {name}={value!r}: expected a finite number")
        if name in _RANGES and "resume" in defaults:  # an app of this package's settings
            fits, expected = _RANGES[name]
            if not (math.isfinite(value) and fits(value)):
                raise UnfitSetting(f"setting {name}={value!r}: expected {expected}")
    return defaults, changes


def comments_of(app: Path, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return the comment of each setting in the app's ``pyproject.toml``, or an empty text."""
    comments, name = dict.fromkeys(defaults, ""), ""
    _, _, section = (app / "pyproject.toml").read_text(encoding="utf-8").partition(SECTION)
    for line in section.partition("\n[")[0].splitlines():
        if (setting := _LINE.fullmatch(line)) and setting["name"] in comments:
            name = setting["name"]
            comments[name] = setting["comment"] or ""
        elif name and (more := _MORE.fullmatch(line)):
            comments[name] += f" {more['comment']}"
    return comments


def choices_of(comment: str) -> tuple[str, str]:
    """Return the choices in a setting's comment, with bars between them, and the meaning."""
    parts = _COMMENT.fullmatch(comment)
    return (parts["choices"], parts["meaning"] or "") if parts else ("", comment)


def _override(setting: str, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    name, separator, text = setting.partition("=")
    if not separator or name not in defaults:
        if alike := get_close_matches(name, defaults):
            raise InvalidValue(
                f"setting {setting!r}: expected name=value; did you mean {' or '.join(alike)}? "
                "`flower-ext settings APP` lists all settings"
            )
        raise InvalidValue(
            f"setting {setting!r}: expected name=value with one of {', '.join(sorted(defaults))}"
        )
    kind = type(defaults[name])
    try:
        return name, {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UnfitSetting(f"setting {name}={text!r}: expected {_EXPECTED[kind]}") from None
