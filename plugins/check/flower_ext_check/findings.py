"""The findings of a check. A finding *refutes* if it leaves no ε of the app provable.

``findings.toml`` has the texts and the remedies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_ext.files import read_toml
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.recognise import LOCAL_MOD, AppTraits

_TEXTS = read_toml(Path(__file__).with_suffix(".toml"))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of an app, or one limit of the app's guarantee, that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool
    """True if the finding leaves no ε provable; False if it names what the guarantee omits."""
    place: str
    """``path:line`` of the app's call that the remedy changes; "" if the app has none."""


@dataclass(kw_only=True)
class Findings:
    """The findings about one app; of several with the same code, only the first is kept."""

    app: AppFolder
    traits: AppTraits
    by_code: dict[str, Finding] = field(default_factory=dict)

    def add(self, case: str, *, refutes: bool = True, **values: Any) -> None:
        """Add the finding that ``findings.toml`` describes under the name ``case``.

        Its code is the part of ``case`` before the slash. ``values`` fill in the names in braces.
        """
        texts, code = _TEXTS[case], case.partition("/")[0]
        finding = Finding(
            code=code,
            text=texts["text"].format(**values),
            remedy=texts["remedy"].format(**values),
            refutes=refutes and texts.get("refutes", True),
            place=self._place(code, texts.get("client-calls")),
        )
        self.by_code.setdefault(code, finding)

    def _place(self, code: str, client_calls: list[str] | None) -> str:
        if client_calls:
            return self.app.call_of("clientapp", *client_calls)
        if self.traits.local:
            return self.app.call_of("clientapp", LOCAL_MOD)
        classes = [part.name for part in self.traits.strategies]
        loops = ("send_and_receive", "push_messages") if code == "beside-the-strategy" else ()
        return self.app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")

    def ordered(self) -> list[Finding]:
        """Return all findings, beginning with those that refute."""
        return sorted(self.by_code.values(), key=lambda finding: not finding.refutes)
