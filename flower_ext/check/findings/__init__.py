"""Turn what the check recognised and measured in an app into findings, each with its remedy.

Some findings *refute*: with such a finding, no ε of the app is provable. Every other finding names
something that the guarantee does not cover.

=============  ============================================================================
module         finds
=============  ============================================================================
`structure`    faults of strategies, mods and rounds, which show without any measurement
`influence`    measured noise or bounds that break the promise, and clients that change
               other clients' uploads or end the run
`messages`     what clients send besides the protected update
=============  ============================================================================
"""

from __future__ import annotations

from dataclasses import replace

from flower_ext.check import recognise
from flower_ext.check.findings import structure
from flower_ext.check.findings.finding import Finding, findings_of
from flower_ext.check.findings.influence import (
    changed_clients,
    compared_noise,
    exceeded_bounds,
    other_epsilon,
)
from flower_ext.check.findings.messages import unprotected_values
from flower_ext.check.measured import Measured
from flower_ext.check.probes import Probes

__all__ = ["Finding", "findings"]


def findings(probes: Probes, second: Measured | None) -> list[Finding]:
    """Return all findings of a check, beginning with those that leave no ε provable.

    ``second`` holds the ε that the check computed from its measurements.
    """
    every_finding = [
        *findings_of(structure.RULES, probes),
        *compared_noise(probes),
        *exceeded_bounds(probes),
        *other_epsilon(second),
        *changed_clients(probes),
        *unprotected_values(probes),
    ]
    once: dict[str, Finding] = {}
    for finding in every_finding:
        place = _place(finding.code, probes)
        once.setdefault(finding.code, replace(finding, place=place))
    return sorted(once.values(), key=lambda finding: not finding.refutes)


_CLIENT_CALLS = {
    **dict.fromkeys(("mod-missing", "mod-order"), ("ClientApp", "train")),
    **dict.fromkeys(("sensitivity", "secure-sum"), ("LocalDpMod", "ClientApp")),
    **dict.fromkeys(
        ("metrics", "records", "integers", "scalars", "names", "weights", "influence"),
        ("train", "ClientApp"),
    ),
    "failures-seen": ("train", "ClientApp"),
    "engine-restarts": ("make_private",),
}
"""For each code of a finding, the calls in the client's source that the remedy changes."""


def _place(code: str, probes: Probes) -> str:
    """Return ``path:line`` of the call that the remedy changes; "" if the app has no such call."""
    app, traits = probes.app, probes.traits
    if names := _CLIENT_CALLS.get(code):
        return app.call_of("clientapp", *names)
    if traits.local:
        return app.call_of("clientapp", recognise.LOCAL_MOD)
    classes = [part.name for part in traits.strategies]
    loops = ("send_and_receive", "push_messages") if code == "beside-the-strategy" else ()
    return app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")
