"""The verdict of a check: which ε is provable, which ε the app claims, and what the check found."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flower_ext_check.claims import Claim
from flower_ext_check.findings import Finding
from flower_ext_check.measured import MeasuredEpsilon


@dataclass(frozen=True, kw_only=True)
class ProvableEpsilon:
    """One provable ε for a privacy unit, or the reason why there is none."""

    unit: str
    epsilon: float | None
    """None if nothing is provable for this unit."""
    delta: float | None
    text: str
    """The relation, the adversary and the proof of ``epsilon``; if it is None, the reason."""


@dataclass(frozen=True, kw_only=True)
class JudgedClaim:
    """An ε that the app states, and the judgement whether it is provable."""

    claim: Claim
    provable: bool


@dataclass(frozen=True, kw_only=True)
class ConditionalEpsilon:
    """The ε of Flower's mechanism, provided that no finding refutes it."""

    delta: float
    one_release: float
    all_rounds: float

    def to_dict(self) -> dict[str, float]:
        """Return the values under their names in the JSON."""
        return {
            "delta": self.delta,
            "one release": self.one_release,
            "all rounds": self.all_rounds,
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a check. It holds no data of the app."""

    strategies: Sequence[str]
    """The strategy that runs the rounds, and those that it wraps, each with its origin."""
    mods: Sequence[str]
    """The mods of training messages, the outermost first, each with its origin."""
    protection: str
    """The clipping and the noise that the app's parameters promise."""
    rounds: int
    planned_rounds: int
    clients: int
    provable: Sequence[ProvableEpsilon]
    measured: MeasuredEpsilon | None
    unmeasured: str
    """The reason why ``measured`` is None; "" if the app states no ε to compare with."""
    conditional: ConditionalEpsilon | None
    """None if the app does not use the noise of Flower."""
    claims: Sequence[JudgedClaim]
    findings: Sequence[Finding]
    """All findings, beginning with those that leave no ε provable."""
    messages: Sequence[str]
    """A description of each kind of message that leaves a client."""
    diff: str
    """A change of the app's source that makes ε provable; "" if no change is needed or known."""

    @property
    def unproven(self) -> bool:
        """True if the app claims an ε that is not provable; the command then exits with 3."""
        return not all(claim.provable for claim in self.claims)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``--json``. ``templates/check.md.jinja`` reads the same values."""
        measured = self.measured
        return {
            "strategies": list(self.strategies),
            "mods": list(self.mods),
            "protection": self.protection,
            "rounds": self.rounds,
            "planned_rounds": self.planned_rounds,
            "clients": self.clients,
            "provable": [asdict(entry) for entry in self.provable],
            "measured": measured and {**asdict(measured), "agrees": measured.agrees},
            "unmeasured": self.unmeasured,
            "conditional": {} if self.conditional is None else self.conditional.to_dict(),
            "claims": [{**asdict(one.claim), "provable": one.provable} for one in self.claims],
            "findings": [asdict(finding) for finding in self.findings],
            "messages": list(self.messages),
            "unproven": self.unproven,
            "diff": self.diff,
        }
