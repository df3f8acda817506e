"""Say which ε is provable, which ε the app claims, and whether each claim is provable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flower_ext.privacy import Guarantee, PrivacyUnit, privacy_loss_of
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.claims import Claim, claims_of_output, claims_of_settings, is_proved
from flower_ext_check.faults_of_clients import add_effects_of_one_client, add_unprotected_values
from flower_ext_check.faults_of_noise import add_exceeded_bounds, add_wrong_epsilon, add_wrong_noise
from flower_ext_check.faults_of_parts import (
    add_uncounted_messages,
    add_unknown_parts,
    add_wrong_parts,
)
from flower_ext_check.findings import Finding, Findings
from flower_ext_check.measured import MeasuredEpsilon, measure_epsilon, unmeasured_reason
from flower_ext_check.mechanisms import promised
from flower_ext_check.observed import Observed
from flower_ext_check.probes import Probes
from flower_ext_check.recognise import AppTraits
from flower_ext_check.repair import repaired

DELTA = 1e-5
"""δ for an app that states none."""
_SLACK = 1.001
"""Factor by which a claimed ε or δ may be too small, because apps round."""


def verdict(probes: Probes) -> dict[str, Any]:
    """Return the result of a check after all runs, ready for JSON. It holds no data of the app."""
    real, traits, measured_epsilon = probes.real, probes.traits, measure_epsilon(probes)
    planned, config = traits.planned, probes.request.config
    every_finding = _findings(probes, measured_epsilon)
    refuted = next((finding for finding in every_finding if finding.refutes), None)
    stated = [*traits.claims, *claims_of_settings(config, planned), *claims_of_output(real)]
    claims = [
        {**asdict(claim), "provable": not refuted and _follows(claim, traits)} for claim in stated
    ]
    unproven = any(not claim["provable"] for claim in claims)
    # The claim with the largest δ is the easiest one to prove.
    weakest = max(stated, key=lambda claim: claim.delta, default=None)
    delta = (weakest.delta if weakest is not None else 0.0) or DELTA
    diff, conditional = "", {}
    if unproven or refuted:
        diff = repaired(
            probes.app,
            epsilon=8.0 if weakest is None else weakest.epsilon,
            delta=delta,
            clipping_norm=1.0 if traits.noise is None else traits.noise.clipping_norm,
            clients=probes.request.clients,
        )
    if traits.release is not None:
        # ε of Flower's mechanism, provided its conditions hold.
        conditional = {
            "delta": delta,
            "one release": traits.epsilon(1, delta) or math.inf,
            "all rounds": traits.epsilon(planned, delta) or math.inf,
        }
    return {
        "strategies": [f"{part.name} ({part.origin})" for part in traits.strategies],
        "mods": [f"{part.name} ({part.origin})" for part in traits.mods],
        "protection": promised(traits.noise),
        "rounds": real.rounds,
        "planned_rounds": planned,
        "clients": probes.request.clients,
        "provable": list(_provable(traits, refuted, delta)),
        "measured": measured_epsilon
        and {**asdict(measured_epsilon), "agrees": measured_epsilon.agrees},
        "unmeasured": "" if measured_epsilon is not None else unmeasured_reason(probes),
        "conditional": conditional,
        "claims": claims,
        "findings": [asdict(finding) for finding in every_finding],
        "messages": list(_messages(real, probes.app)),
        "unproven": unproven,
        "diff": diff,
    }


def _findings(probes: Probes, measured_epsilon: MeasuredEpsilon | None) -> list[Finding]:
    """Return all findings of a check, beginning with those that leave no ε provable."""
    findings = Findings(app=probes.app, traits=probes.traits)
    add_unknown_parts(probes.traits, findings)
    add_wrong_parts(probes.traits, findings)
    add_uncounted_messages(probes, findings)
    add_wrong_noise(probes, findings)
    add_exceeded_bounds(probes, findings)
    add_wrong_epsilon(measured_epsilon, findings)
    add_effects_of_one_client(probes, findings)
    add_unprotected_values(probes, findings)
    return findings.ordered()


def _provable(
    traits: AppTraits, refuted: Finding | None, delta: float
) -> Iterator[dict[str, str | float | None]]:
    """Yield, for each privacy unit, every provable ε, or the reason why there is none."""

    def entry(text: str, epsilon: float | None = None, delta: float | None = None) -> Any:
        return {"unit": unit.value, "epsilon": epsilon, "delta": delta, "text": text}

    for unit in (PrivacyUnit.RECORD, PrivacyUnit.CLIENT, PrivacyUnit.USER):
        if refuted is not None:
            yield entry(f"nothing: {refuted.text}")
            continue
        # A guarantee for a client or a user covers each of its records too.
        fitting = [
            claim
            for claim in traits.guarantees
            if is_proved(claim)
            and claim.conditions_hold
            and unit in (claim.unit, PrivacyUnit.RECORD)
        ]
        for claim in fitting:
            warning = f"; {claim.large_delta}" if claim.large_delta else ""
            text = (
                f"under the relation {claim.relation.value}, against an adversary who sees "
                f"{claim.view.sees} ({claim.basis}; {claim.accountant}){warning}"
            )
            yield entry(text, claim.epsilon, claim.delta)
        if fitting:
            continue
        if unit is not PrivacyUnit.USER and (epsilon := traits.epsilon(traits.planned, delta)):
            text = (
                "under the relation replace-special (a client's update becomes zero), against an "
                "adversary who sees the released models (provable; exact Gaussian composition)"
            )
            yield entry(text, epsilon, delta)
        else:
            yield entry("nothing: no mechanism of the app bounds what one such unit contributes")


def _follows(claim: Claim, traits: AppTraits) -> bool:
    """Return True if the claimed ε is at least a provable ε for the same number of rounds."""
    limit = claim.epsilon * _SLACK
    if traits.release is not None:
        epsilon = traits.epsilon(claim.rounds, claim.delta or DELTA)
        return epsilon is not None and epsilon <= limit
    guarantees = traits.guarantees if claim.rounds >= traits.planned else traits.guarantees_now
    return any(
        guarantee.basis == "provable"
        and guarantee.conditions_hold
        and _epsilon_at(guarantee, claim.delta) <= limit
        for guarantee in guarantees
    )


def _epsilon_at(guarantee: Guarantee, delta: float) -> float:
    """Return ε of a guarantee at ``delta``, or at the guarantee's δ if ``delta`` is 0."""
    if not delta or guarantee.delta <= delta * _SLACK:
        return guarantee.epsilon
    if guarantee.releases is None:
        return math.inf
    return privacy_loss_of(dict(guarantee.releases), delta=delta).epsilon


def _messages(real: Observed, app: AppFolder) -> Iterator[str]:
    """Describe each kind of message that leaves a client."""
    kinds = dict.fromkeys(reply.kind for reply in real.replies)
    for kind in kinds:
        replies = [reply for reply in real.replies if reply.kind == kind]
        errors = sum(reply.error for reply in replies)
        records = dict.fromkeys(
            f"{record} {app.shown(name)!r}" for reply in replies for record, name in reply.records
        )
        sent = ", ".join(records) or "nothing"
        yield f"{kind}: {len(replies)} replies ({errors} errors) with {sent}"
