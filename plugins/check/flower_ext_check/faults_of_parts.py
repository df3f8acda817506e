"""Find faults in what the check recognised: strategy, mods, their parameters, and the rounds."""

from scipy.stats import binom

from flower_ext.privacy import PrivacyUnit
from flower_ext_check import recognise
from flower_ext_check.findings import Case, Findings
from flower_ext_check.measured import DECISION_ERROR
from flower_ext_check.probes import Probes
from flower_ext_check.recognise import APP, AppTraits, Part

_MODS_OF_STRATEGIES = {
    recognise.CLIENT_SIDE: recognise.FIXED_MOD,
    recognise.CLIENT_ADAPTIVE: recognise.ADAPTIVE_MOD,
}


def add_unknown_parts(traits: AppTraits, findings: Findings) -> None:
    """Find parts that this check does not know, so that it cannot prove anything about them."""
    for part in traits.strategies:
        if part.origin == APP:
            findings.add(Case.UNKNOWN_STRATEGY, name=part.name)
    if traits.replaced_parts:
        findings.add(Case.FOREIGN_PARTS, names=", ".join(traits.replaced_parts))
    if not traits.strategies:
        findings.add(Case.UNKNOWN_LOOP)
    if traits.noise is None and not traits.guarantees:
        findings.add(Case.NO_MECHANISM)
    if any(map(traits.has, recognise.SECURE_SUM_MODS)):
        findings.add(Case.SECURE_SUM)


def add_wrong_parts(traits: AppTraits, findings: Findings) -> None:
    """Find strategies and mods whose parameters or order break the promised privacy."""
    noise, local = traits.noise, traits.local_mod
    for strategy, mod in _MODS_OF_STRATEGIES.items():
        if traits.has(strategy) and not traits.has(mod):
            findings.add(Case.MOD_MISSING, mod=mod)
    if traits.has(recognise.SERVER_ADAPTIVE) or traits.has(recognise.CLIENT_ADAPTIVE):
        findings.add(Case.ADAPTIVE_CLIPPING)
    if noise is not None and not (noise.release_stddev or any(noise.upload_stddev.values())):
        findings.add(Case.NO_NOISE)
    if traits.strategies and not traits.is_ours and noise is not None and noise.divisor:
        # Flower's private strategies wrap another. They bound a client's effect only on a mean.
        last = traits.strategies[-1]
        if last.origin == "flwr" and last.name not in recognise.AVERAGES:
            findings.add(Case.NOT_A_MEAN, name=last.name)
    if local and local["sensitivity"] < local["clipping_norm"]:
        sensitivity, norm = local["sensitivity"], local["clipping_norm"]
        findings.add(Case.SENSITIVITY, sensitivity=sensitivity, clipping_norm=norm)
    _add_mods_before_protection(traits, findings)
    if traits.engines_per_client > 1:
        findings.add(Case.ENGINE_RESTARTS, times=traits.engines_per_client)


def _add_mods_before_protection(traits: AppTraits, findings: Findings) -> None:
    """Find mods that get an upload after its protection, because they stand before it."""
    outer: list[Part] = []
    for part in traits.mods:
        if part.origin != APP and part.name in recognise.PROTECTING_MODS:
            protection = part.name
            break
        outer.append(part)
    else:
        if not traits.has_task:
            return  # nothing protects uploads on the client
        protection = "the client side of flower_ext"  # inside all mods
    for part in outer:
        if part.origin != "flwr" or part.name not in recognise.SILENT_MODS:
            findings.add(Case.MOD_ORDER, name=part.name, protection=protection)


def add_uncounted_messages(probes: Probes, findings: Findings) -> None:
    """Find messages and runs that the guarantee does not count."""
    real, traits, stated = probes.real, probes.traits, probes.traits.stated_guarantee
    if traits.strategies and real.outside_strategy:
        findings.add(Case.BESIDE_THE_STRATEGY, kinds=", ".join(sorted(real.outside_strategy)))
    if real.strategy_starts > 1:
        findings.add(Case.SEVERAL_RUNS, starts=real.strategy_starts)
    # If the plan draws users or records, no message shows which of them were drawn.
    if traits.mechanism.declared and stated is not None and stated.unit is PrivacyUnit.CLIENT:
        sampling, rounds = traits.mechanism.declared.release.sampling, real.rounds
        requests = sum(map(len, real.cohorts.values()))
        draws = rounds * sampling.population
        if binom.sf(requests - 1, draws, sampling.sampling_rate) < DECISION_ERROR:
            described = sampling.describe()
            findings.add(Case.SAMPLING, requests=requests, rounds=rounds, sampling=described)
