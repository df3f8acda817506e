"""Find faults of an app's strategies, mods and rounds, which show without any measurement."""

from __future__ import annotations

from typing import Any

from scipy.stats import binom

from flower_ext.check import recognise
from flower_ext.check.findings.finding import Rule
from flower_ext.check.probes import LUCK, Probes
from flower_ext.check.recognise import APP
from flower_ext.privacy import PrivacyUnit


def _apps_strategy(probes: Probes) -> str:
    """Return the name of a strategy that the app defines; "" if it defines none."""
    return next((part.name for part in probes.traits.strategies if part.origin == APP), "")


def _missing_mod(probes: Probes) -> str:
    """Return the name of a mod that the strategy needs and the ClientApp lacks; "" if none."""
    has = probes.traits.has
    pairs = {
        recognise.CLIENT_SIDE: recognise.FIXED_MOD,
        recognise.CLIENT_ADAPTIVE: recognise.ADAPTIVE_MOD,
    }
    missing = (mod for kind, mod in pairs.items() if has(kind) and not has(mod))
    return next(missing, "")


def _has_no_noise(probes: Probes) -> bool:
    noise = probes.traits.noise
    return noise is not None and not (noise.release_stddev or any(noise.upload_stddev.values()))


def _other_than_mean(probes: Probes) -> str:
    """Return the name of Flower's strategy inside a private strategy if it computes no mean.

    "" otherwise. A private strategy of Flower bounds only what one client adds to a mean.
    """
    traits = probes.traits
    if not traits.strategies or traits.is_ours or traits.noise is None or not traits.noise.cohort:
        return ""
    last = traits.strategies[-1]
    return last.name if last.origin == "flwr" and not recognise.is_average(last) else ""


def _low_sensitivity(probes: Probes) -> Any:
    """Return the arguments of the app's `LocalDpMod` if its sensitivity is below its clipping norm.

    None otherwise.
    """
    local = probes.traits.local
    return local if local and local["sensitivity"] < local["clipping_norm"] else None


_PROTECTING = (
    recognise.LOCAL_MOD,
    recognise.FIXED_MOD,
    recognise.ADAPTIVE_MOD,
    recognise.OUR_MOD,
)


def _mod_outside(probes: Probes) -> dict[str, str] | None:
    """Return the name of a mod that may change uploads after another part has protected them.

    The result also names the part that protects them. None if there is no such mod.
    """
    traits = probes.traits
    names = [part.name if part.origin != APP else "" for part in traits.mods]
    none = len(names) if traits.has_task else 0
    first = min((names.index(name) for name in _PROTECTING if name in names), default=none)
    outside = [part.name for part in traits.mods[:first] if not recognise.is_silent(part)]
    protection = [*names, "the client side of flower_ext"][first]
    return {"mod": outside[0], "protection": protection} if outside else None


def _unplanned_requests(probes: Probes) -> dict[str, Any] | None:
    """Return the number of training requests if the plan's sampling would rarely draw so many.

    None otherwise.
    """
    real, traits = probes.real, probes.traits
    if (
        traits.ours.declared is None
        or traits.stated is None
        or traits.stated.unit is not PrivacyUnit.CLIENT
    ):
        return None  # no message shows which users or records the plan drew
    sampling = traits.ours.declared.release.sampling
    requests, draws = sum(map(len, real.trainings.values())), real.rounds * sampling.population
    if binom.sf(requests - 1, draws, sampling.sampling_rate) >= LUCK:
        return None
    return {"requests": requests, "rounds": real.rounds, "sampling": sampling.describe()}


RULES = (
    Rule(
        code="unknown-strategy",
        when=_apps_strategy,
        text="the strategy {} is the app's own, so its methods may do anything",
        remedy="use a strategy of Flower or of flower_ext without overriding its methods",
    ),
    Rule(
        code="foreign-parts",
        when=lambda probes: ", ".join(probes.traits.foreign),
        text="the app replaces parts on which the guarantee rests: {}",
        remedy="let the guarantee's parts come from flower_ext alone",
    ),
    Rule(
        code="unknown-loop",
        when=lambda probes: not probes.traits.strategies,
        text="no strategy of flwr.serverapp runs the rounds; the app's loop may do anything",
        remedy="run the rounds by strategy.start of a known strategy",
    ),
    Rule(
        code="no-mechanism",
        when=lambda probes: probes.traits.noise is None and not probes.traits.guarantees,
        text="no mechanism that this check knows bounds what clients send and adds noise to it",
        remedy="protect uploads by FederatedStrategy with a ReleasePlan",
    ),
    Rule(
        code="secure-sum",
        when=lambda probes: any(map(probes.traits.has, recognise.SECURE_SUM_MODS)),
        text="a secure sum hides single uploads from the server, but the sum itself is exact",
        remedy="add noise to the sum: it may reveal one client's data",
        refutes=False,
    ),
    Rule(
        code="mod-missing",
        when=_missing_mod,
        text="the strategy relies on {}, but the ClientApp lacks it, so no client clips",
        remedy="add {} to the mods of the ClientApp, or clip on the server",
    ),
    Rule(
        code="adaptive-clipping",
        when=lambda probes: any(
            map(probes.traits.has, (recognise.SERVER_ADAPTIVE, recognise.CLIENT_ADAPTIVE))
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
        when=lambda probes: (
            probes.traits.engines_per_client > 1 and probes.traits.engines_per_client
        ),
        text="a client makes a new Opacus engine {} times: each counts its own round "
        "only, so the printed ε leaves out all other rounds",
        remedy="keep the accountant's history in context.state, and add up all rounds",
    ),
    Rule(
        code="beside-the-strategy",
        when=lambda probes: probes.traits.strategies and ", ".join(sorted(probes.real.beside)),
        text="the app sends clients messages ({}) outside its strategy, and no guarantee counts "
        "them",
        remedy="let strategy.start send all messages",
    ),
    Rule(
        code="several-runs",
        when=lambda probes: probes.real.starts > 1 and probes.real.starts,
        text="the app starts strategies {} times, each with a guarantee of its own",
        remedy="start one strategy, or charge all strategies to one ledger",
    ),
    Rule(
        code="sampling",
        when=_unplanned_requests,
        text="{0[requests]} requests in {0[rounds]} rounds are more than the plan's sampling "
        "({0[sampling]}) draws",
        remedy="ask the cohort that the plan's sampling draws",
    ),
)
