"""Find what one client can do to a run, and what clients send besides the update."""

from collections.abc import Collection, Sequence

import numpy as np

from flower_ext.federation import FederatedStrategy
from flower_ext_check import recognise
from flower_ext_check.findings import Case, Findings
from flower_ext_check.held_run import TRAIN
from flower_ext_check.observed import Observed, Reply
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.recognise import AppTraits

_MOST_SHOWN = 6
_ENDINGS = {
    RunName.NAN: Case.NAN_ENDING,
    RunName.ZERO: Case.ZERO,
    RunName.RAISE: Case.ABSENCE,
}
"""The finding for each run that one changed client may end."""


def add_effects_of_one_client(probes: Probes, findings: Findings) -> None:
    """Find what one client's NaN, zero update or failure does to other clients and to the run."""
    unchanged = probes.runs.get(RunName.HELD)
    if unchanged is None or unchanged.error:
        return
    _add_spread_of_nan(probes, findings)
    for name, case in _ENDINGS.items():
        if ending := _ending(name, probes, unchanged):
            findings.add(case, ending=ending)
    if not probes.traits.has_task and _fails(RunName.RAISE, probes):
        findings.add(Case.FAILURES_SEEN)
    _add_influence(probes, unchanged, findings)


def _add_spread_of_nan(probes: Probes, findings: Findings) -> None:
    """Find where one client's NaN leaves the client, or reaches the model."""
    traits, nan = probes.traits, probes.seen(RunName.NAN)
    clients_protect = traits.has(recognise.OUR_MOD) or traits.local_mod
    if clients_protect and not traits.has_task:
        for reply in nan.replies:
            if reply.kind == TRAIN and reply.upload and not reply.upload.finite:
                findings.add(Case.NAN_UPLOAD, round=reply.round)
    if any(not release.finite for release in nan.releases):
        findings.add(Case.NAN_MODEL)


def _ending(name: RunName, probes: Probes, unchanged: Observed) -> str:
    """Say how a changed client disturbs the run ``name``; "" if it does not.

    In the run ``unchanged``, no client is changed.
    """
    run, traits = probes.runs.get(name), probes.traits
    if run is None:
        return "" if name is RunName.ZERO or traits.has_task else "hangs the run"
    if run.error:
        if traits.has_task and all(len(cohort) == 1 for cohort in run.cohorts.values()):
            return ""  # each round asked the changed client alone, so no reply was usable
        return f"ends the run ({run.error})"
    if name is RunName.RAISE and traits.has_task and traits.protects_public_update:
        return ""  # this client replies even if training fails; only the network can lose a reply
    if run.rounds_without_model > unchanged.rounds_without_model:
        return "keeps the model of a round from being released"
    if name is RunName.ZERO and _fails(name, probes):
        return "makes a mod fail, which the server sees"
    return ""


def _add_influence(probes: Probes, unchanged: Observed, findings: Findings) -> None:
    """Find whether one client's NaN changes what the other clients of its round send."""
    if probes.traits.secure_noise or probes.traits.has_task:
        return  # uploads of two runs differ anyway, by noise that no seed of the check determines
    nan = probes.seen(RunName.NAN)
    uploads, expected = nan.uploads(1), unchanged.uploads(1)
    others = uploads.keys() & expected.keys() - {nan.changed_client(1)}
    if any(not np.array_equal(uploads[c].sample, expected[c].sample) for c in others):
        findings.add(Case.INFLUENCE)


def _fails(name: RunName, probes: Probes) -> bool:
    """Return True if, in the run ``name``, a client answers a training request with an error."""
    return any(reply.error and reply.kind == TRAIN for reply in probes.seen(name).replies)


def add_unprotected_values(probes: Probes, findings: Findings) -> None:
    """Find what clients send besides the update, such as metrics and integer arrays."""
    traits, noise = probes.traits, probes.traits.noise
    if traits.has_task:
        return
    replies = probes.real.successful_replies(TRAIN)
    allowed = {traits.weight_key} if traits.weight_key and not traits.is_ours else set()
    if traits.has(recognise.CLIENT_ADAPTIVE):
        allowed.add("norm_bit")
    if names := _metrics(probes, TRAIN, allowed):
        refutes = not traits.is_ours or traits.has(recognise.OUR_MOD)
        findings.add(Case.METRICS, names=names, refutes=refutes)
    _add_unprotected_arrays(traits, replies, findings)
    layouts = {(reply.records, tuple(reply.metrics)) for reply in replies}
    if traits.strategies and len(layouts) > 1:
        findings.add(Case.NAMES)
    weights = {reply.metrics.get(traits.weight_key) for reply in replies}
    if noise and noise.divisor and not traits.is_ours and len(weights) > 1:
        findings.add(Case.WEIGHTS_DIFFERENT)
    if names := _metrics(probes, "evaluate"):
        refutes = not traits.has(FederatedStrategy.__name__)
        findings.add(Case.EVALUATION, names=names, refutes=refutes)


def _add_unprotected_arrays(
    traits: AppTraits, replies: Sequence[Reply], findings: Findings
) -> None:
    """Find arrays in training replies that clipping or noise leaves out."""
    if traits.strategies:  # an app's own loop may send several kinds of messages
        counts = {sum(kind == "ArrayRecord" for kind, _ in reply.records) for reply in replies}
        if counts - {1}:
            findings.add(Case.RECORDS, count=max(counts))
    if traits.noise is None:
        return
    if any(reply.integers for reply in replies):
        findings.add(Case.INTEGERS)
    if not traits.is_ours and any(reply.scalars for reply in replies):
        findings.add(Case.SCALARS)


def _metrics(probes: Probes, kind: str, allowed: Collection[str] = ()) -> str:
    """Return a list of the metrics in replies of one kind that are not allowed."""
    names = {
        name for reply in probes.real.successful_replies(kind) for name in reply.metrics
    } - set(allowed)
    shown = list(dict.fromkeys(map(probes.app.shown, sorted(names))))
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more
