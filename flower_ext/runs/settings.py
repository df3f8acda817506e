"""Settings of a run: declared once as a frozen dataclass, read once, checked at construction.

An app declares its settings as fields of its own class. The class inherits the settings that all
apps share from `flower_ext.runs.shared_settings`::

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings, CohortSettings, ReleaseSettings, TrainingSettings):
        head_epochs: Count = setting("passes of each client's own head")

The field ``head_epochs`` is the setting ``head-epochs`` of ``[tool.flwr.app.config]`` in the app's
``pyproject.toml``, which gives its default. This table may lack a setting if ``setting(...)`` gives
a default.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

# Apps import the types of their settings from here; `X as X` marks a name as exported.
from flower_ext.checks import Count as Count
from flower_ext.checks import CountOrZero as CountOrZero
from flower_ext.checks import Fraction as Fraction
from flower_ext.checks import FractionBelowOne as FractionBelowOne
from flower_ext.checks import NotNegative as NotNegative
from flower_ext.checks import Positive as Positive
from flower_ext.checks import ProperFraction as ProperFraction
from flower_ext.checks import Rule as Rule
from flower_ext.checks import is_integer, is_number
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.secure_sum import LEAST_MEMBERS

OF_NODES = ("data-folder", "draw-key")
"""Settings that name files or folders on a client's machine; the node config overrides them."""
PATHS = ("run-directory", "state-folder", "state-key-file", *OF_NODES)
"""Settings that name files or folders."""

INCIDENTAL = frozenset({*PATHS, "resume", "connect-timeout", "round-timeout"})
"""Settings on which no result depends, such as paths and waiting times."""

RECORDED = ("planned-rounds", "data-source")
"""Names of entries that apps record in a run's configuration in addition to their settings."""


class UnfitSetting(InvalidValue):
    """A setting has a value that the app cannot use; the message says what it expects."""


def _is_absolute_or_empty(text: object) -> bool:
    return text == "" or (isinstance(text, str) and Path(text).expanduser().is_absolute())


AbsolutePath = Annotated[str, Rule("an absolute path", _is_absolute_or_empty)]


def setting(meaning: str, default: Any = MISSING) -> Any:
    """Declare a field of a `Settings` class.

    ``flower-ext settings`` and the documentation show its ``meaning``. Apps may leave out a setting
    that has a ``default``.
    """
    return field(default=default, metadata={"meaning": meaning})


_RULES = {
    bool: Rule("true or false", lambda value: isinstance(value, bool)),
    int: Rule("an integer", is_integer),
    float: Rule("a finite number", lambda value: is_number(value) and math.isfinite(value)),
    str: Rule("a text", lambda value: isinstance(value, str)),
}
"""Rules for settings that accept every value of their type."""


@dataclass(frozen=True)
class Declaration:
    """The name of a setting, the values that it accepts, and its meaning."""

    name: str
    kind: type
    rule: Rule
    choices: tuple[str, ...] = ()
    meaning: str = ""
    is_required: bool = True

    @classmethod
    def of_type(cls, name: str, hint: Any, **options: Any) -> Declaration:
        """Return the declaration of a setting that accepts the values of a type hint."""
        if type(None) in get_args(hint):  # a setting that may be absent
            hint = get_args(hint)[0]
        if get_origin(hint) is Literal:
            words = get_args(hint)
            rule = Rule(f"one of {', '.join(words)}", lambda value: value in words)
            return cls(name, str, rule, words, **options)
        if get_origin(hint) is Annotated:
            return cls(name, *get_args(hint), **options)
        return cls(name, hint, _RULES[hint], **options)

    def check(self, value: Any, origin: str = "run-config") -> None:
        """Refuse a value that the setting cannot have; the message begins with ``origin``."""
        if not self.rule.accepts(value):
            raise UnfitSetting(f"{origin} {self.name}={value!r}: expected {self.rule.expected}")

    def parse(self, text: str) -> Any:
        """Return the value that a command-line text gives to this setting; refuse an unfit text."""
        try:
            value = {"true": True, "false": False}[text] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            expected = self.rule.expected
            raise UnfitSetting(f"setting {self.name}={text!r}: expected {expected}") from None
        self.check(value, "setting")
        return value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an app; the class of an app inherits from this one and adds fields.

    Raises
    ------
    UnfitSetting
        A value does not fit its setting; the message names the setting and the accepted values.
    """

    origin: ClassVar[str] = "run-config"
    """First words of messages about a setting."""
    place: ClassVar[str] = "[tool.flwr.app.config]"
    """Table of ``pyproject.toml`` to which a user adds a setting."""

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes the class of a frozen dataclass for unhashable
        for attribute, declaration in declarations(kind).items():
            if (value := getattr(self, attribute)) is not None:
                declaration.check(value, self.origin)
                if declaration.kind is float and type(value) is int:  # 2 in TOML, for 2.0
                    object.__setattr__(self, attribute, float(value))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings that a run configuration holds.

        `UnfitSetting` names a setting that is missing, that the app does not know, or whose value
        does not fit it.
        """
        kind: Any = cls
        known = declarations(kind)
        names = {declaration.name for declaration in known.values()}
        if unknown := [name for name in config if name not in names and name not in RECORDED]:
            name = unknown[0]
            raise UnfitSetting(f"{cls.origin} {name}: no such setting; {nearest(name, names)}")
        values = {}
        for attribute, declaration in known.items():
            if declaration.name in config:
                values[attribute] = config[declaration.name]
            elif declaration.is_required:
                raise UnfitSetting(
                    f"{cls.origin} has no {declaration.name}: expected "
                    f"{declaration.rule.expected}; add it to {cls.place}"
                )
        return cls(**values)


@cache  # a simulated client reads its settings for every message
def declarations(kind: Any) -> Mapping[str, Declaration]:
    """Return the declarations of the settings in a class ``kind``, by the names of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: Declaration.of_type(
            each.name.replace("_", "-"),
            hints[each.name],
            meaning=each.metadata.get("meaning", ""),
            is_required=each.default is MISSING,
        )
        for each in fields(kind)
    }


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase that suggests the known names nearest to ``name``, or lists them all."""
    if alike := get_close_matches(name, sorted(known)):
        return f"did you mean {' or '.join(alike)}?"
    return f"expected one of {', '.join(sorted(known))}"


def absolute_path(text: str) -> Path | None:
    """Return the path of a setting of kind `AbsolutePath`; None if the text is empty."""
    return Path(text).expanduser() if text else None


def changed_settings(
    earlier: Mapping[str, Any], config: Mapping[str, Any], *, free: Container[str] = INCIDENTAL
) -> dict[str, tuple[Any, Any]]:
    """Return the settings of ``config`` that differ from those of an earlier run.

    The result has the earlier value and the present one by name. Settings in ``free`` may differ.
    A setting that the earlier run lacks does not count if it is empty or zero, because the app may
    have gained it since, and such a value leaves the run as it was.
    """
    return {
        name: (earlier.get(name), value)
        for name, value in sorted(config.items())
        if name not in free and earlier.get(name) != value and (name in earlier or value)
    }


def num_nodes(config: Mapping[str, Any]) -> int | None:
    """Return the number of nodes that an app's settings ask for; None if no setting counts clients.

    If ``clients-per-node`` is 0, ``flower-ext run`` will choose it, and the result is the number of
    clients.
    """
    name = clients_setting(config)
    if name is None:
        return None
    clients, per_node = config[name], config.get("clients-per-node", 1)
    counts = isinstance(clients, int) and isinstance(per_node, int)
    if not counts or clients < 1 or per_node < 0 or clients % (per_node or 1):
        raise UnfitSetting(
            f"run-config {name}={clients!r} with clients-per-node={per_node!r}: expected "
            f"{name} to be at least 1 and a multiple of clients-per-node"
        )
    if clients < LEAST_MEMBERS and config.get("aggregation") == "secure":
        raise UnfitSetting(
            f"run-config {name}={clients!r} with aggregation='secure': expected at least "
            f"{LEAST_MEMBERS}, the fewest members of a secure sum; or set aggregation='plain'"
        )
    return int(clients // (per_node or 1))


def clients_setting(config: Mapping[str, Any]) -> str | None:
    """Return the name of the setting that gives the number of clients; None if there is none."""
    return next((name for name in ("clients", "num-silos") if name in config), None)
