"""Find what an app's strategies, mods and rounds leave open, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scipy.stats import binom

from flower_ext.check import recognise
from flower_ext.check.findings.finding import Finding
from flower_ext.check.observe import Observed
from flower_ext.check.probes import LUCK
from flower_ext.check.recognise import APP, Facts
from flower_ext.privacy import PrivacyUnit


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A finding, and the facts that it follows from."""

    code: str
    when: Callable[[Facts], Any]
    """Returns anything that is true if the finding follows; text and remedy may use it as {}."""
    text: str
    remedy: str
    refutes: bool = True

    def finding(self, value: Any) -> Finding:
        """Return the finding that follows from a true value of `when`."""
        text, remedy = self.text.format(value), self.remedy.format(value)
        return Finding(code=self.code, text=text, remedy=remedy, refutes=self.refutes)


def _apps_strategy(facts: Facts) -> str:
    return next((part.name for part in facts.strategies if part.origin == APP), "")


def _missing_mod(facts: Facts) -> str:
    """Return the mod of the ClientApp that the strategy relies on and that is not there."""
    pairs = {
        recognise.CLIENT_SIDE: recognise.FIXED_MOD,
        recognise.CLIENT_ADAPTIVE: recognise.ADAPTIVE_MOD,
    }
    missing = (mod for kind, mod in pairs.items() if facts.has(kind) and not facts.has(mod))
    return next(missing, "")


def _has_no_noise(facts: Facts) -> bool:
    noise = facts.noise
    return noise is not None and not (noise.release_stddev or any(noise.upload_stddev.values()))


def _other_than_mean(facts: Facts) -> str:
    """Return the innermost strategy of Flower's private ones if it releases no mean."""
    if not facts.strategies or facts.is_ours or facts.noise is None or not facts.noise.cohort:
        return ""
    last = facts.strategies[-1]
    return last.name if last.origin == "flwr" and not recognise.is_average(last) else ""


def _low_sensitivity(facts: Facts) -> Any:
    local = facts.local
    return local if local and local["sensitivity"] < local["clipping_norm"] else None


_PROTECTING = (
    recognise.LOCAL_MOD,
    recognise.FIXED_MOD,
    recognise.ADAPTIVE_MOD,
    recognise.OUR_MOD,
)


def _mod_outside(facts: Facts) -> dict[str, str] | None:
    """Return a mod that may change the protected upload, and the protection inside it."""
    names = [part.name if part.origin != APP else "" for part in facts.mods]
    none = len(names) if facts.has_task else 0
    first = min((names.index(name) for name in _PROTECTING if name in names), default=none)
    outside = [part.name for part in facts.mods[:first] if not recognise.is_silent(part)]
    protection = [*names, "the client side of flower_ext"][first]
    return {"mod": outside[0], "protection": protection} if outside else None


RULES = (
    Rule(
        code="unknown-strategy",
        when=_apps_strategy,
        text="the strategy {} is the app's; its methods may do anything",
        remedy="use a strategy of Flower or of flower_ext without overriding its methods",
    ),
    Rule(
        code="foreign-parts",
        when=lambda facts: ", ".join(facts.foreign),
        text="the app replaces parts on which the guarantee rests: {}",
        remedy="let the guarantee's parts come from flower_ext alone",
    ),
    Rule(
        code="unknown-loop",
        when=lambda facts: not facts.strategies,
        text="no strategy of flwr.serverapp runs the rounds; the app's loop may do anything",
        remedy="run the rounds by strategy.start of a known strategy",
    ),
    Rule(
        code="no-mechanism",
        when=lambda facts: facts.noise is None and not facts.guarantees,
        text="no mechanism that this check knows bounds and noises what leaves",
        remedy="protect uploads by FederatedStrategy with a ReleasePlan",
    ),
    Rule(
        code="secure-sum",
        when=lambda facts: any(map(facts.has, recognise.SECURE_SUM_MODS)),
        text="a secure sum hides single uploads from the server, but the sum itself is exact",
        remedy="add noise to the sum: it may reveal one client's data",
        refutes=False,
    ),
    Rule(
        code="mod-missing",
        when=_missing_mod,
        text="the strategy relies on {}, but the ClientApp lacks it: nobody clips",
        remedy="add {} to the mods of the ClientApp, or clip on the server",
    ),
    Rule(
        code="adaptive-clipping",
        when=lambda facts: any(
            map(facts.has, (recognise.SERVER_ADAPTIVE, recognise.CLIENT_ADAPTIVE))
        ),
        text="Flower scales the noise by the clipping norm after its update, not by the norm "
        "that bounded the updates",
        remedy="use fixed clipping, or a ReleasePlan with clipping=AdaptiveClipping()",
    ),
    Rule(
        code="no-noise",
        when=_has_no_noise,
        text="the noise multiplier is 0",
        remedy="set a noise multiplier",
    ),
    Rule(
        code="not-a-mean",
        when=_other_than_mean,
        text="{} releases no mean of the updates: one client may move it by "
        "more than clipping norm / number of clients",
        remedy="put FedAvg inside the private strategy",
    ),
    Rule(
        code="sensitivity",
        when=_low_sensitivity,
        text="LocalDpMod scales its noise by sensitivity={0[sensitivity]:g}, but "
        "clips to {0[clipping_norm]:g}: one client moves its upload by that much",
        remedy="set sensitivity to the clipping norm at least",
    ),
    Rule(
        code="mod-order",
        when=_mod_outside,
        text="the mod {0[mod]} stands before {0[protection]} and may change the protected upload",
        remedy="put {0[protection]} first, and all other mods after it",
    ),
    Rule(
        code="engine-restarts",
        when=lambda facts: facts.engines_per_client if facts.engines_per_client > 1 else 0,
        text="a client makes a new Opacus engine {} times: each counts its own round "
        "only, so the printed ε leaves out all other rounds",
        remedy="keep the accountant's history in context.state, and add up all rounds",
    ),
)


def structure(facts: Facts) -> Iterator[Finding]:
    """Find what follows from the app's strategies and mods alone."""
    for rule in RULES:
        if value := rule.when(facts):
            yield rule.finding(value)


def requests(real: Observed, facts: Facts) -> Iterator[Finding]:
    """See who is asked, and by whom."""
    if facts.strategies and real.beside:
        yield Finding(
            code="beside-the-strategy",
            text=f"the app asks clients for {', '.join(sorted(real.beside))} beside its strategy, "
            "which no guarantee counts",
            remedy="let strategy.start send all messages",
        )
    if real.starts > 1:
        yield Finding(
            code="several-runs",
            text=f"the app starts strategies {real.starts} times, each with a guarantee of its own",
            remedy="start one strategy, or charge all to one ledger",
        )
    if (
        facts.ours.declared is None
        or facts.stated is None
        or facts.stated.unit is not PrivacyUnit.CLIENT
    ):
        return  # no message shows which users were drawn
    sampling = facts.ours.declared.release.sampling
    requests, draws = sum(map(len, real.trainings.values())), real.rounds * sampling.population
    if binom.sf(requests - 1, draws, sampling.sampling_rate) < LUCK:
        yield Finding(
            code="sampling",
            text=f"{requests} requests in {real.rounds} rounds are more than {sampling.describe()}",
            remedy="ask the cohort that the plan's sampling draws",
        )
