"""The findings of a check. A finding *refutes* if it leaves no ε of the app provable.

``findings.toml`` has a text and a remedy for each `Case`. This module refuses to load if the two
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from flower_ext.files import from_table, read_toml
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.recognise import LOCAL_MOD, AppTraits


class Case(StrEnum):
    """The cases that the check can find, by their names in ``findings.toml``."""

    UNKNOWN_STRATEGY = "unknown-strategy"
    FOREIGN_PARTS = "foreign-parts"
    UNKNOWN_LOOP = "unknown-loop"
    NO_MECHANISM = "no-mechanism"
    SECURE_SUM = "secure-sum"
    MOD_MISSING = "mod-missing"
    ADAPTIVE_CLIPPING = "adaptive-clipping"
    NO_NOISE = "no-noise"
    NOT_A_MEAN = "not-a-mean"
    SENSITIVITY = "sensitivity"
    MOD_ORDER = "mod-order"
    ENGINE_RESTARTS = "engine-restarts"
    BESIDE_THE_STRATEGY = "beside-the-strategy"
    SEVERAL_RUNS = "several-runs"
    SAMPLING = "sampling"
    SEEDED_NOISE = "seeded-noise"
    NOISE_MISSING = "noise-missing"
    NOISE_SMALL = "noise-small"
    UNCLIPPED = "unclipped"
    MOVEMENT = "movement"
    WEIGHTS_HEAVY = "weights/heavy"
    WEIGHTS_DIFFERENT = "weights/different"
    EPSILON = "epsilon"
    NAN_UPLOAD = "nan/upload"
    NAN_MODEL = "nan/model"
    NAN_ENDING = "nan/ending"
    ZERO = "zero"
    ABSENCE = "absence"
    FAILURES_SEEN = "failures-seen"
    INFLUENCE = "influence"
    METRICS = "metrics"
    RECORDS = "records"
    INTEGERS = "integers"
    SCALARS = "scalars"
    NAMES = "names"
    EVALUATION = "evaluation"

    @property
    def code(self) -> str:
        """The part of the name before the slash, which several cases may share."""
        return self.value.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class CaseText:
    """A table of ``findings.toml``; names in braces stand for values."""

    text: str
    remedy: str
    refutes: bool = True
    client_calls: Sequence[str] = ()
    """Calls in the ClientApp's source that the remedy may change; empty for the ServerApp."""

    @classmethod
    def read_all(cls, path: Path) -> dict[Case, CaseText]:
        """Return the texts of all cases; refuse a file that lacks a case, or has another one."""
        tables = read_toml(path)
        if differing := sorted(tables.keys() ^ set(Case)):
            raise ValueError(f"{path} and `Case` differ in {differing[0]!r}")
        return {case: from_table(cls, tables[case], f"{path}: {case}") for case in Case}


TEXTS = CaseText.read_all(Path(__file__).with_suffix(".toml"))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of an app, or one limit of the app's guarantee, that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool
    """True if the finding leaves no ε provable; False if it names what the guarantee omits."""
    place: str
    """``path:line`` of the app's call that the remedy changes; "" if the app makes no such call."""


@dataclass(kw_only=True)
class Findings:
    """The findings about one app; of several with the same code, only the first is kept."""

    app: AppFolder
    traits: AppTraits
    by_code: dict[str, Finding] = field(default_factory=dict)

    def add(self, case: Case, *, refutes: bool = True, **values: Any) -> None:
        """Add the finding of a case; ``values`` fill in the names in braces of its text."""
        texts = TEXTS[case]
        finding = Finding(
            code=case.code,
            text=texts.text.format(**values),
            remedy=texts.remedy.format(**values),
            refutes=refutes and texts.refutes,
            place=self._place(case),
        )
        self.by_code.setdefault(case.code, finding)

    def _place(self, case: Case) -> str:
        if client_calls := TEXTS[case].client_calls:
            return self.app.call_of("clientapp", *client_calls)
        if self.traits.local_mod:
            return self.app.call_of("clientapp", LOCAL_MOD)
        classes = [part.name for part in self.traits.strategies]
        loops = ("send_and_receive", "push_messages") if case is Case.BESIDE_THE_STRATEGY else ()
        return self.app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")

    def ordered(self) -> list[Finding]:
        """Return all findings, beginning with those that leave no ε provable."""
        return sorted(self.by_code.values(), key=lambda finding: not finding.refutes)
