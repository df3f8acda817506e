"""Readers of settings: each accepts one type, so the words "false" and "2" are refused.

Every reader raises `UnfitSetting` for a value of another type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flower_ext.errors import InvalidValue

Word = TypeVar("Word", bound=str)

PATHS = ("run-directory", "data-folder", "state-folder")
"""Settings that name places."""

INCIDENTAL = frozenset({*PATHS, "resume", "connect-timeout", "round-timeout", "trackers"})
"""Settings of places and waiting times, on which no result depends."""


RECORDED = ("planned-rounds", "data-source")
"""Names of facts that apps record in a run's configuration beside their settings."""


class UnfitSetting(InvalidValue):
    """A setting has a value that the app cannot use; the message says what it expects."""


def flag(config: Mapping[str, Any], name: str) -> bool:
    """Read true or false."""
    return bool(_read(config, name, lambda value: isinstance(value, bool), "true or false"))


def integer(config: Mapping[str, Any], name: str, *, least: int | None = None) -> int:
    """Read an integer that is not below ``least``."""

    def fits(value: Any) -> bool:
        return _is_a(value, int) and (least is None or value >= least)

    expected = "an integer" if least is None else f"an integer >= {least}"
    return int(_read(config, name, fits, expected))


def number(config: Mapping[str, Any], name: str, *, above: float | None = None) -> float:
    """Read a number, with or without a decimal point, that is above ``above``."""

    def fits(value: Any) -> bool:
        return _is_a(value, int | float) and (above is None or value > above)

    expected = "a number" if above is None else f"a number > {above:g}"
    return float(_read(config, name, fits, expected))


def text(config: Mapping[str, Any], name: str) -> str:
    """Read a text, which may be empty."""
    return str(_read(config, name, lambda value: isinstance(value, str), "a text"))


def absolute_path(config: Mapping[str, Any], name: str) -> Path | None:
    """Read a path that is the same in every process; None if the text is empty."""
    if not (named := text(config, name)):
        return None
    path = Path(named).expanduser()
    if not path.is_absolute():
        raise UnfitSetting(f"run-config {name}={named!r}: expected an absolute path")
    return path


def integers(config: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Read integers separated by commas; None if the text is empty."""

    def fits(value: Any) -> bool:
        parts = value.split(",") if isinstance(value, str) else ["none"]
        return value == "" or all(part.strip().isdecimal() for part in parts)

    listed = _read(config, name, fits, "integers with commas between them")
    return tuple(map(int, listed.split(","))) if listed else None


def words(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read words separated by commas; empty if the text is, or if the app has no such setting."""
    listed = text({name: "", **config}, name)
    return tuple(word.strip() for word in listed.split(",")) if listed.strip() else ()


def choice(config: Mapping[str, Any], name: str, allowed: Sequence[Word]) -> Word:
    """Read one of the ``allowed`` words; the error lists them."""
    expected = f"one of {', '.join(allowed)}"
    word: Word = _read(config, name, lambda value: value in allowed, expected)
    return word


def _read(config: Mapping[str, Any], name: str, fits: Callable[[Any], bool], expected: str) -> Any:
    if name not in config:
        raise UnfitSetting(
            f"run-config has no {name}: expected {expected}; add it to [tool.flwr.app.config]"
        )
    value = config[name]
    if not fits(value):
        raise UnfitSetting(f"run-config {name}={value!r}: expected {expected}")
    return value


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # Python's booleans are integers


def num_nodes(config: Mapping[str, Any]) -> int | None:
    """Return the number of nodes that an app's settings ask for; None if they do not say.

    ``clients-per-node=0`` leaves the choice to ``flower-ext run``; each node then counts as one
    client.

    Raises
    ------
    UnfitSetting
        A setting is not a number, or the nodes would not have a whole number of clients each.
    """
    setting = clients_setting(config)
    if setting is None:
        return None
    count = integer(config, setting, least=1)
    per_node = integer({"clients-per-node": 1, **config}, "clients-per-node", least=0) or 1
    if count % per_node:
        raise UnfitSetting(
            f"run-config clients-per-node={per_node}: expected an integer that divides "
            f"{setting}={count}"
        )
    return count // per_node


def clients_setting(config: Mapping[str, Any]) -> str | None:
    """Return the name of the setting that gives the number of clients; None if there is none."""
    return next((name for name in ("clients", "num-silos") if name in config), None)
