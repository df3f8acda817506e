"""Settings of a run configuration, each read as one type: the words "false" and "2" are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from flower_ext.errors import InvalidValue

PATHS = ("run-directory", "data-folder", "state-folder")
"""Settings that say where things are."""

INCIDENTAL = frozenset({*PATHS, "resume", "connect-timeout", "round-timeout"})
"""Settings that say where things are and how long to wait: no result depends on them."""


class UnfitSetting(InvalidValue):
    """A setting is not what the app expects; the message says what that is."""


def flag(config: Mapping[str, Any], name: str) -> bool:
    """True or false.

    Raises
    ------
    UnfitSetting
        It is something else.
    """
    value = config[name]
    if not isinstance(value, bool):
        raise _unfit(name, value, "true or false")
    return value


def integer(config: Mapping[str, Any], name: str, *, least: int | None = None) -> int:
    """An integer, not below ``least``.

    Raises
    ------
    UnfitSetting
        It is something else.
    """
    value = config[name]
    if not _is_a(value, int) or (least is not None and value < least):
        raise _unfit(name, value, "an integer" if least is None else f"an integer >= {least}")
    return int(value)


def number(config: Mapping[str, Any], name: str, *, above: float | None = None) -> float:
    """A number, with or without a decimal point, that is above ``above``.

    Raises
    ------
    UnfitSetting
        It is something else.
    """
    value = config[name]
    if not _is_a(value, int | float) or (above is not None and not value > above):
        raise _unfit(name, value, "a number" if above is None else f"a number > {above:g}")
    return float(value)


def text(config: Mapping[str, Any], name: str) -> str:
    """A text, which may be empty.

    Raises
    ------
    UnfitSetting
        It is something else.
    """
    value = config[name]
    if not isinstance(value, str):
        raise _unfit(name, value, "a text")
    return value


def choice(config: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    """One of some words.

    Raises
    ------
    UnfitSetting
        It is something else; the message lists them.
    """
    value = config[name]
    if value not in allowed:
        raise _unfit(name, value, f"one of {', '.join(allowed)}")
    return str(value)


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # Python's booleans are integers


def _unfit(name: str, value: Any, expected: str) -> UnfitSetting:
    return UnfitSetting(f"run-config {name}={value!r}: expected {expected}")


def num_nodes(config: Mapping[str, Any]) -> int | None:
    """Return the number of nodes that an app's settings ask for; None where they do not say.

    Raises
    ------
    UnfitSetting
        They are no numbers, or no node has a whole number of clients.
    """
    setting = clients_setting(config)
    if setting is None:
        return None
    count = integer(config, setting)
    per_node = integer({"clients-per-node": 1, **config}, "clients-per-node", least=1)
    if count % per_node:
        raise UnfitSetting(
            f"run-config clients-per-node={per_node}: expected an integer that divides "
            f"{setting}={count}"
        )
    return count // per_node


def clients_setting(config: Mapping[str, Any]) -> str | None:
    """Which of an app's settings says how many clients there are; None where none does."""
    return next((name for name in ("clients", "num-silos") if name in config), None)
