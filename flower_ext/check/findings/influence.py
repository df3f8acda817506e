"""Find noise and bounds that differ from what the parameters promise, and clients that end a run.

All measurements come from held runs (`held_run`). There each client sends a public update in place
of what it learned from data, so the check knows each update before clipping and noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from flower_ext.check import recognise
from flower_ext.check.findings.finding import Finding, Rule, findings_of
from flower_ext.check.held_run import TRAIN
from flower_ext.check.measured import Measured, release_gap, upload_gap
from flower_ext.check.mechanisms import Noise
from flower_ext.check.observe import Observed
from flower_ext.check.probes import AGAIN, QUIET, Probes, exceeds, spread
from flower_ext.check.vectors import HELD


def compared_noise(probes: Probes) -> Iterator[Finding]:
    """Compare the measured noise with the noise that the app's parameters promise."""
    again, noise = probes.runs.get(AGAIN), probes.traits.noise
    if again is None or noise is None:
        return
    for number in probes.comparable:
        of_uploads: list[Finding] = []
        if (gap := upload_gap(probes, number)) is not None:
            size = _largest(again, number)
            of_uploads = list(_compared(gap, size, f"uploads of round {number}"))
            yield from of_uploads
        changed = probes.target_noise("huge", "huge, other", number)
        stddev = noise.of_upload(probes.cohort(AGAIN, number))
        if stddev and not of_uploads and changed is not None:
            what = f"a changed client's upload in round {number}"
            # If the noise comes from this package, only one of the two runs adds it.
            stddev *= 1.0 if probes.traits.has(recognise.OUR_MOD) else 2**0.5
            yield from _compared(changed / stddev, np.inf, what)
        if (gap := release_gap(probes, number)) is not None:
            step = again.step(number)
            size = 0.0 if step is None else step.norm
            yield from _compared(gap, size, f"the model of round {number}")


def _largest(run: Observed, number: int) -> float:
    return max((upload.norm for upload in run.uploads(number).values()), default=0.0)


def _compared(gap: np.ndarray, size: float, what: str) -> Iterator[Finding]:
    measured = spread(gap)
    if measured.value < 1e-3 and size > 2 * HELD and np.isfinite(size):
        yield Finding(
            code="seeded-noise",
            text=f"the noise in {what} is the same in two runs with different random numbers: "
            "the code fixes the seed, and anyone who knows the seed can remove the noise",
            remedy="draw the noise from the operating system's randomness",
        )
    elif measured.value < 1e-3:
        yield Finding(
            code="noise-missing",
            text=f"there is no noise in {what}",
            remedy="add noise in every round",
        )
    elif measured.high < 1:
        yield Finding(
            code="noise-small",
            text=f"the noise in {what} has {measured.value:.3g} times the promised standard "
            f"deviation (at most {measured.high:.3g} times, except with probability 1e-6)",
            remedy="clip first and add the noise last, scaled by the clipping norm",
        )


def exceeded_bounds(probes: Probes) -> Iterator[Finding]:
    """Find where one client moves its upload or the model farther than clipping permits."""
    if probes.traits.noise is None or not probes.traits.holds:
        return
    is_exact, past = probes.is_exact, set[str]()
    for number, run in product(probes.comparable, ("huge", "heavy")):
        for what, moved, bound, stddev in _movements(probes, probes.traits.noise, run, number):
            if what in past or moved is None:
                continue
            if exceeds(abs(moved), bound, 0.0 if is_exact else stddev):
                past.add(what)
                yield _unbounded(what, number, abs(moved), bound, weighs=run == "heavy")


def _movements(
    probes: Probes, noise: Noise, run: str, number: int
) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield the name of each value that the changed client moves, and three numbers.

    The numbers are how far the client moved the value (None if this was not measured), how far
    clipping lets the client move it, and the standard deviation of the noise on the value.
    """
    traits = probes.traits
    clients_clip = traits.has(recognise.CLIENT_SIDE) or traits.has(recognise.CLIENT_ADAPTIVE)
    if clients_clip or traits.local or any(noise.upload_stddev.values()):
        bound = noise.clipping_norm * (2 if noise.bounds_models else 1)
        stddev = noise.of_upload(probes.cohort(QUIET, number))
        yield "its upload", probes.upload_growth(run, number), bound, stddev
    if noise.cohort:
        bound = noise.clipping_norm / noise.cohort
        yield "the model", probes.movement(run, number), bound, noise.release_stddev


def other_epsilon(second: Measured | None) -> Iterator[Finding]:
    """Find a stated ε that is smaller than the ε that the check computed from measurements."""
    if second is not None and not second.agrees:
        yield Finding(
            code="epsilon",
            text=f"the app states ε = {second.stated:.3g}, but {second.text}",
            remedy="let one plan set the clipping bound, the noise and the accounting, and change "
            "none of its parts",
        )


def _unbounded(what: str, number: int, value: float, bound: float, *, weighs: bool) -> Finding:
    text = f"one client moves {what} in round {number} by {value:.3g}, past the bound {bound:.3g}"
    if weighs:
        return Finding(
            code="weights",
            text=f"{text}, because it reports the weight of its own update",
            remedy="weigh all clients equally, and divide by a public constant",
        )
    return Finding(
        code="unclipped" if what == "its upload" else "movement",
        text=text,
        remedy="clip after everything that changes the update, and before the noise",
    )


def _sent_nan(probes: Probes) -> int | None:
    """Return the first round in which a client sends a NaN although a mod protects its upload.

    None if no client does, or if no mod protects uploads.
    """
    traits = probes.traits
    if traits.has_task or not (traits.has(recognise.OUR_MOD) or traits.local):
        return None
    uploads = ((r.round, r.upload) for r in probes.seen("nan").replies if r.kind == TRAIN)
    return next((number for number, upload in uploads if upload and not upload.finite), None)


def _ending(change: str, probes: Probes) -> str:
    """Say how a changed client disturbs the run ``change``; "" if it does not.

    Such a client may hang or end the run, keep a model from being released, or let the server
    see that its mod failed.
    """
    run, traits = probes.runs.get(change), probes.traits
    if run is None:
        return "" if change == "zero" or traits.has_task else "hangs the run"
    if run.ended:
        if traits.has_task and all(len(cohort) == 1 for cohort in run.trainings.values()):
            return ""  # the draws asked the changed client alone, so no reply was usable
        return f"ends the run ({run.ended})"
    if change == "raise" and traits.has_task and traits.ours.holds:
        return ""  # such a client hides its failures: only the network can lose its reply
    if run.unreleased > probes.seen(AGAIN).unreleased:
        return "keeps the model of a round from being released"
    is_seen = change == "zero" and _fails(change, probes)
    return "makes a mod fail, which the server sees" if is_seen else ""


def _fails(change: str, probes: Probes) -> bool:
    """Return True if, in the run ``change``, a client answers a training request with an error."""
    replies = probes.seen(change).replies
    return any(reply.error for reply in replies if reply.kind == TRAIN)


def _influences_others(probes: Probes) -> bool:
    """Return True if a client's NaN changes what other clients send in the same round."""
    if probes.traits.secure_noise or probes.traits.has_task:
        return False
    run = probes.seen("nan")
    uploads, usual = run.uploads(1), probes.seen(AGAIN).uploads(1)
    others = uploads.keys() & usual.keys() - {run.target(1)}
    return any(not np.array_equal(uploads[c].sample, usual[c].sample) for c in others)


_NO_NAN = "replace an update that is not finite by zeros before the noise"
_CHANGES = {
    "nan": ("nan", "an update of NaN"),
    "zero": ("zero", "an update of zeros"),
    "raise": ("absence", "one client's failure"),
}
"""Code and words of a finding for each `Change` that may end a run."""
RULES = (
    Rule(
        code="nan",
        when=_sent_nan,
        text="a NaN leaves the client in round {}",
        remedy=_NO_NAN,
    ),
    Rule(
        code="nan",
        when=lambda probes: any(not release.finite for release in probes.seen("nan").releases),
        text="one client's NaN reaches the model",
        remedy=_NO_NAN,
    ),
    *(
        Rule(
            code=code,
            when=partial(_ending, change),
            text=f"{words} {{}}: whether a model is released depends on one client's data",
            remedy="let no single reply end a round: sum the replies that arrived, and add noise "
            "that does not depend on their number",
        )
        for change, (code, words) in _CHANGES.items()
    ),
    Rule(
        code="failures-seen",
        when=lambda probes: not probes.traits.has_task and _fails("raise", probes),
        text="the server sees that a client failed, and Flower sends the error's text",
        remedy="answer with zeros and noise when training fails",
        refutes=False,
    ),
    Rule(
        code="influence",
        when=_influences_others,
        text="one client's update changes what other clients send in the same round",
        remedy="keep no state in module variables, which clients of one process share",
    ),
)


def changed_clients(probes: Probes) -> Iterator[Finding]:
    """Find what one client's NaN, zero update or failure does to other clients and to the run."""
    usual = probes.runs.get(AGAIN)
    if usual is not None and not usual.ended:
        yield from findings_of(RULES, probes)
