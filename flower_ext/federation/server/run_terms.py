"""The terms of a run: everything that must stay the same when the run is resumed."""

from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from flower_ext.federation.server.run import Run
from flower_ext.runs.settings import UnfitSetting, changed_settings
from flower_ext.training import LocalTraining


def terms_of(run: Run, player: Strategy) -> dict[str, Any]:
    """Return a run's method, plan, sum and options as plain values by name.

    ``player`` is the run's strategy, or a wrapper around it. A wrapper has the run's strategy, or
    another wrapper, as ``base``. Its other public attributes are terms, too.
    """
    method, plan, of_method = run.method, _fields(run.plan), dict[str, Any]()
    for name, value in _fields(method).items():
        if not isinstance(value, LocalTraining):
            of_method[name] = value
        # A ClientApp that does not use this package defines its own training.
        elif not method.any_client_app or value != LocalTraining():
            of_method[f"training-{name}"] = value
    # Joined by hyphens: the names of a wrapper, of the method and of a strategy in `Hosted`.
    wrappers, of_wrapper = list[str](), dict[str, Any]()
    while hasattr(player, "base"):
        wrappers.append(type(player).__name__)
        public = {name: value for name, value in vars(player).items() if name[0] != "_"}
        player = public.pop("base")
        of_wrapper |= public
    terms = {
        "method": "-".join(dict.fromkeys([*wrappers, method.name])),
        "plan": type(run.plan).__name__,
        "planned-rounds": plan.pop("rounds", 0),
        "sum": run.summation.describe() or type(run.summation).__name__,
        "disclosures": run.spending.disclosures,
        **{n: v for n, v in _fields(run.options).items() if n not in ("timeout", "state_key_file")},
        "seed": run.options.seed or 0,
    }
    for owner, values in (("plan", plan), ("method", of_method), ("wrapper", of_wrapper)):
        for name, value in values.items():
            terms[name if name not in terms else f"{owner}-{name}"] = value
    settings = {name.replace("_", "-"): _plain(value) for name, value in terms.items()}
    return {name: value for name, value in settings.items() if value != ""}


def check_same(
    path: Path, first: Mapping[str, Any], now: Mapping[str, Any], *, free: Container[str] = ()
) -> None:
    """Refuse to continue the run in ``path`` with other values than it began with.

    The values of names in ``free`` may differ.
    """
    complete = {**dict.fromkeys(first), **now}  # None for a name that `now` lacks
    differing = [
        f"{name}={value!r} (it began with {before!r})"
        for name, (before, value) in changed_settings(first, complete, free=free).items()
    ]
    if differing:
        raise UnfitSetting(
            f"the run in {path} cannot continue with different settings: {', '.join(differing)}; "
            "set them as they were, or begin a new run"
        )


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; of any other object, the attributes with plain values."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    attributes = getattr(value, "__dict__", {})
    return {n: part for n, part in attributes.items() if isinstance(part, int | float | str)}


def _plain(value: Any) -> str | int | float | bool:
    """Describe a value by a number or a text, the same in every process; by "" if it is None."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | int | float | bool):
        return value
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(str(_plain(part)) for part in value)
    if parts := _fields(value):
        plain_parts = {name: _plain(part) for name, part in parts.items()}
        texts = (f"{name}={plain}" for name, plain in plain_parts.items() if plain != "")
        return f"{type(value).__name__}({', '.join(texts)})"
    return getattr(value, "__qualname__", type(value).__name__)
