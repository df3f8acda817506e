"""A finding: what the check found in an app, and the remedy. A rule: when to report a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flower_ext.check.probes import Probes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of an app, or one limit of the app's guarantee, that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool = True
    place: str = ""
    """``path:line`` of the app's call that the remedy changes; "" if the app has none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A fault to look for: the texts of its finding, and a function that tells if an app has it."""

    code: str
    when: Callable[[Probes], Any]
    """Returns a true value if the app has the fault.

    ``text`` and ``remedy`` show this value in place of each {}.
    """
    text: str
    remedy: str
    refutes: bool | Callable[[Probes], bool] = True


def findings_of(rules: Iterable[Rule], probes: Probes) -> Iterator[Finding]:
    """Yield a finding for each rule whose condition ``when`` holds."""
    for rule in rules:
        if value := rule.when(probes):
            yield Finding(
                code=rule.code,
                text=rule.text.format(value),
                remedy=rule.remedy.format(value),
                refutes=rule.refutes(probes) if callable(rule.refutes) else rule.refutes,
            )
