"""Every ε that an app states: in a report, by a mod or accountant, in a setting, or in words."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flwr.clientapp.mod import LocalDpMod

from flower_ext.privacy import Guarantee
from flower_ext_check.observed import Observed

_EPSILON_KEY = re.compile(r"((target|dp|privacy|local|ldp|max|total)[-_])?(eps|epsilon)")
_DELTA_KEY = re.compile(r"((target|dp|privacy|local|ldp)[-_])?delta")
_NUMBER = r"[^\w\n.]{1,8}([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_PRINTED = re.compile(r"(?:\bepsilon|\beps|ε)" + _NUMBER, re.IGNORECASE)
_PRINTED_DELTA = re.compile(r"(?:\bdelta|δ)" + _NUMBER, re.IGNORECASE)


@dataclass(frozen=True)
class Claim:
    """An ε that the app states for ``rounds`` rounds.

    ``delta`` is 0 if the app states no δ, or a number that is no δ. No accountant accepts such a
    number, so it would end the check.
    """

    source: str
    epsilon: float
    delta: float
    rounds: int

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            object.__setattr__(self, "delta", 0.0)


def claims_of_objects(
    chain: Sequence[Any],
    local: LocalDpMod | None,
    guarantees: Sequence[Guarantee],
    rounds: int,
    planned: int,
) -> list[Claim]:
    """Return each ε that a guarantee, a mod or an accountant states.

    ``chain`` has the app's strategies, and ``local`` its `LocalDpMod`. The app has run for
    ``rounds`` rounds of ``planned``.
    """
    claims = []
    for claim in filter(is_proved, guarantees):
        source = f"report for a {claim.unit.value} against {claim.view.sees}"
        claims.append(Claim(source, claim.epsilon, claim.delta, planned))
    if local is not None:
        claims.append(Claim(LocalDpMod.__name__, local.epsilon, local.delta, rounds=1))
    for strategy in chain:
        with suppress(Exception):  # an app's own strategy may call any object its accountant
            spent, name = (
                strategy.accountant.get_privacy_spent(),
                type(strategy.accountant).__name__,
            )
            claims.append(Claim(name, float(spent.epsilon), float(spent.delta), rounds))
    return claims


def is_proved(claim: Guarantee) -> bool:
    """Return True for a provable guarantee with a finite ε."""
    return claim.basis == "provable" and math.isfinite(claim.epsilon)


def claims_of_settings(config: Mapping[str, Any], planned: int) -> Iterator[Claim]:
    """Yield a claim, for ``planned`` rounds, for each setting of the app that is an ε."""
    numbers = {
        name: float(value)
        for name, value in config.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
    delta = next((v for name, v in numbers.items() if _DELTA_KEY.fullmatch(name)), 0.0)
    for name, value in numbers.items():
        if _EPSILON_KEY.fullmatch(name):
            yield Claim(f"setting {name}", value, delta, planned)


def claims_of_output(real: Observed) -> Iterator[Claim]:
    """Yield the largest ε in the replies' metrics, and the largest ε that the app printed."""
    metrics = [
        float(value)
        for reply in real.replies
        for name, value in reply.metrics.items()
        if _EPSILON_KEY.fullmatch(name) and isinstance(value, int | float) and value > 0
    ]
    lines = [line for line in real.log.splitlines() if "published" not in line]
    printed = [float(number) for line in lines for number in _PRINTED.findall(line)]
    deltas = [float(number) for line in lines for number in _PRINTED_DELTA.findall(line)]
    delta = max((value for value in deltas if 0 < value < 1), default=0.0)
    for source, values in (("metric epsilon", metrics), ("printed", [*filter(None, printed)])):
        if values:
            yield Claim(source, max(values), delta, real.rounds)
