"""Judge an app: say which ε is provable, and whether each ε that the app claims is provable."""

import math
from collections.abc import Iterator, Sequence

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
from flower_ext_check.repair import suggest_diff
from flower_ext_check.verdict import ConditionalEpsilon, JudgedClaim, ProvableEpsilon, Verdict

DELTA = 1e-5
"""δ for an app that states none."""
_EPSILON = 8.0
"""ε of the suggested change for an app that states none."""
_SLACK = 1.001
"""Factor by which a claimed ε or δ may be too small, because apps round."""


def judge(probes: Probes) -> Verdict:
    """Return the verdict on an app whose runs have all been made."""
    real, traits, request = probes.real, probes.traits, probes.request
    measured_epsilon = measure_epsilon(probes)
    findings = _find_faults(probes, measured_epsilon)
    refuting = next((finding for finding in findings if finding.refutes), None)
    stated = [
        *traits.claims,
        *claims_of_settings(request.config, traits.planned_rounds),
        *claims_of_output(real),
    ]
    claims = [
        JudgedClaim(claim=claim, provable=refuting is None and _follows(claim, traits))
        for claim in stated
    ]
    # The claim with the largest δ is the easiest one to prove.
    weakest = max(stated, key=lambda claim: claim.delta, default=None)
    delta = (0.0 if weakest is None else weakest.delta) or DELTA
    diff = ""
    if refuting is not None or not all(claim.provable for claim in claims):
        diff = suggest_diff(
            probes.app,
            epsilon=_EPSILON if weakest is None else weakest.epsilon,
            delta=delta,
            clipping_norm=1.0 if traits.noise is None else traits.noise.clipping_norm,
            clients=request.clients,
        )
    return Verdict(
        strategies=[f"{part.name} ({part.origin})" for part in traits.strategies],
        mods=[f"{part.name} ({part.origin})" for part in traits.mods],
        protection=promised(traits.noise),
        rounds=real.rounds,
        planned_rounds=traits.planned_rounds,
        clients=request.clients,
        provable=list(_provable(traits, refuting, delta)),
        measured=measured_epsilon,
        unmeasured=unmeasured_reason(probes) if measured_epsilon is None else "",
        conditional=_conditional(traits, delta),
        claims=claims,
        findings=findings,
        messages=list(_described_messages(real, probes.app)),
        diff=diff,
    )


def _find_faults(probes: Probes, measured_epsilon: MeasuredEpsilon | None) -> Sequence[Finding]:
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
    traits: AppTraits, refuting: Finding | None, delta: float
) -> Iterator[ProvableEpsilon]:
    """Yield, for each privacy unit, every provable ε, or the reason why there is none."""
    for unit in (PrivacyUnit.RECORD, PrivacyUnit.CLIENT, PrivacyUnit.USER):
        reason = "no mechanism of the app bounds what one such unit contributes"
        if refuting is not None:
            reason = refuting.text
        elif proved := [*_proved_by_guarantees(unit, traits)] or [
            *_proved_by_noise(unit, traits, delta)
        ]:
            yield from proved
            continue
        text = f"nothing: {reason}"
        yield ProvableEpsilon(unit=unit.value, epsilon=None, delta=None, text=text)


def _proved_by_guarantees(unit: PrivacyUnit, traits: AppTraits) -> Iterator[ProvableEpsilon]:
    """Yield every ε that a guarantee of this package proves for a privacy unit."""
    for claim in traits.guarantees:
        # A guarantee for a client or a user covers each of its records too.
        covers_unit = unit in (claim.unit, PrivacyUnit.RECORD)
        if not (covers_unit and is_proved(claim) and claim.conditions_hold):
            continue
        warning = f"; {claim.large_delta}" if claim.large_delta else ""
        yield ProvableEpsilon(
            unit=unit.value,
            epsilon=claim.epsilon,
            delta=claim.delta,
            text=f"under the relation {claim.relation.value}, against an adversary who sees "
            f"{claim.view.sees} ({claim.basis}; {claim.accountant}){warning}",
        )


def _proved_by_noise(
    unit: PrivacyUnit, traits: AppTraits, delta: float
) -> Iterator[ProvableEpsilon]:
    """Yield the ε of Flower's mechanism for a privacy unit, if the app uses this mechanism.

    The mechanism bounds what one client contributes, but not what a user of several clients does.
    """
    if unit is not PrivacyUnit.USER and (
        epsilon := traits.flower_epsilon(traits.planned_rounds, delta)
    ):
        yield ProvableEpsilon(
            unit=unit.value,
            epsilon=epsilon,
            delta=delta,
            text="under the relation replace-special (a client's update becomes zero), against an "
            "adversary who sees the released models (provable; exact Gaussian composition)",
        )


def _conditional(traits: AppTraits, delta: float) -> ConditionalEpsilon | None:
    one_release, all_rounds = (
        traits.flower_epsilon(rounds, delta) for rounds in (1, traits.planned_rounds)
    )
    if one_release is None or all_rounds is None:
        return None
    return ConditionalEpsilon(delta=delta, one_release=one_release, all_rounds=all_rounds)


def _follows(claim: Claim, traits: AppTraits) -> bool:
    """Return True if the claimed ε is at least a provable ε for the same number of rounds."""
    limit = claim.epsilon * _SLACK
    if traits.flower_release is not None:
        epsilon = traits.flower_epsilon(claim.rounds, claim.delta or DELTA)
        return epsilon is not None and epsilon <= limit
    guarantees = (
        traits.guarantees if claim.rounds >= traits.planned_rounds else traits.guarantees_so_far
    )
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


def _described_messages(real: Observed, app: AppFolder) -> Iterator[str]:
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
