"""Turn what was recognised and measured into findings, each with its remedy.

A finding that *refutes* leaves no ε provable. All others name what the guarantee does not cover.

=============  ============================================================================
module         finds
=============  ============================================================================
`structure`    what strategies, mods and rounds leave open, before anything is measured
`influence`    noise and bounds other than promised, and what one client does to the others
`messages`     what leaves clients beside the protected update
=============  ============================================================================
"""

from __future__ import annotations

from dataclasses import replace

from flower_ext.check import recognise
from flower_ext.check.app_folder import AppFolder
from flower_ext.check.findings.finding import Finding
from flower_ext.check.findings.influence import (
    changed_clients,
    compared_noise,
    exceeded_bounds,
    other_epsilon,
)
from flower_ext.check.findings.messages import unprotected_values
from flower_ext.check.findings.structure import requests, structure
from flower_ext.check.measured import Measured
from flower_ext.check.probes import REAL, Probes
from flower_ext.check.recognise import Facts

__all__ = ["Finding", "findings"]


def findings(probes: Probes, app: AppFolder, second: Measured | None) -> list[Finding]:
    """Return all findings of a check, those that refute first.

    ``second`` is the ε that was computed from measurements.
    """
    real = probes.runs[REAL]
    assert real is not None
    facts: Facts = real.facts
    every_finding = [
        *structure(facts),
        *requests(real, facts),
        *compared_noise(probes, facts),
        *exceeded_bounds(probes, facts),
        *other_epsilon(second),
        *changed_clients(probes, facts),
        *unprotected_values(real, facts, app),
    ]
    once: dict[str, Finding] = {}
    for finding in every_finding:
        once.setdefault(finding.code, replace(finding, place=_place(finding.code, facts, app)))
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
"""By finding, the calls of the client's source that its remedy changes."""


def _place(code: str, facts: Facts, app: AppFolder) -> str:
    """Return where the app makes the mod, the strategy or the reply that a remedy changes."""
    if names := _CLIENT_CALLS.get(code):
        return app.call_of("clientapp", *names)
    if facts.local:
        return app.call_of("clientapp", recognise.LOCAL_MOD)
    classes = [part.name for part in facts.strategies]
    loops = ("send_and_receive", "push_messages") if code == "beside-the-strategy" else ()
    return app.call_of("serverapp", *loops, *classes, "start", "send_and_receive", "main")
