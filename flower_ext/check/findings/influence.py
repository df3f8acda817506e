"""Find noise and bounds that differ from what the parameters promise, and clients that end a run.

Everything here was measured in held runs, in which the check knows what each client learned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flower_ext.check import recognise
from flower_ext.check.findings.finding import Finding
from flower_ext.check.held_run import TRAIN
from flower_ext.check.measured import Measured, release_gap, upload_gap
from flower_ext.check.observe import Observed, Reply
from flower_ext.check.probes import AGAIN, QUIET, Probes, exceeds, spread
from flower_ext.check.recognise import Facts
from flower_ext.check.vectors import HELD


def compared_noise(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Compare the noise with the one that the parameters promise."""
    again, noise = probes.runs.get(AGAIN), facts.noise
    if again is None or noise is None:
        return
    for number in facts.comparable(probes.request.rounds):
        of_uploads: list[Finding] = []
        if (gap := upload_gap(probes, facts, number)) is not None:
            size = _largest(again, number)
            of_uploads = list(_compared(gap, size, f"uploads of round {number}"))
            yield from of_uploads
        changed = probes.target_noise("huge", "huge, other", number)
        stddev = noise.of_upload(probes.cohort(AGAIN, number))
        if stddev and not of_uploads and changed is not None:
            what = f"a changed client's upload in round {number}"
            # Noise of this package is in one of these runs only.
            stddev *= 1.0 if facts.has(recognise.OUR_MOD) else 2**0.5
            yield from _compared(changed / stddev, np.inf, what)
        if (gap := release_gap(probes, facts, number)) is not None:
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
            text=f"the noise in {what} is the same under other random numbers: the code fixes "
            "its seed, and who knows the seed removes the noise",
            remedy="draw the noise from the operating system's randomness",
        )
    elif measured.value < 1e-3:
        yield Finding(
            code="noise-missing", text=f"there is no noise in {what}", remedy="add noise each round"
        )
    elif measured.high < 1:
        yield Finding(
            code="noise-small",
            text=f"the noise in {what} has {measured.value:.3g} times the promised standard "
            f"deviation (at most {measured.high:.3g} times, but for luck of 1e-6)",
            remedy="clip first and add the noise last, scaled by the clipping norm",
        )


def exceeded_bounds(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Compare what one changed client moves with what clipping permits."""
    if (noise := facts.noise) is None or not facts.holds:
        return
    clients_clip = facts.has(recognise.CLIENT_SIDE) or facts.has(recognise.CLIENT_ADAPTIVE)
    clients_clip = clients_clip or bool(facts.local) or any(noise.upload_stddev.values())
    noisy, past = not probes.is_exact, set()
    largest = noise.clipping_norm * (2 if noise.bounds_models else 1)
    for number in facts.comparable(probes.request.rounds):
        size = probes.cohort(QUIET, number)
        for name in ("huge", "heavy"):
            grown = probes.upload_growth(name, number) if clients_clip else None
            moved = probes.movement(name, number) if noise.cohort else None
            limits = (
                (grown, largest, noise.of_upload(size), "its upload"),
                (
                    moved,
                    noise.clipping_norm / (noise.cohort or 1),
                    noise.release_stddev,
                    "the model",
                ),
            )
            for value, bound, stddev, what in limits:
                if value is None or what in past:
                    continue
                if exceeds(abs(value), bound, noisy * stddev):
                    past.add(what)
                    yield _unbounded(what, number, abs(value), bound, weighs=name == "heavy")


def other_epsilon(second: Measured | None) -> Iterator[Finding]:
    """Find a stated ε that differs from the one that was computed from measurements."""
    if second is not None and not second.agrees:
        yield Finding(
            code="epsilon",
            text=f"the app states ε = {second.stated:.3g}, but {second.text}",
            remedy="let one plan set bound, noise and accounting, and change none of its parts",
        )


def _unbounded(what: str, number: int, value: float, bound: float, *, weighs: bool) -> Finding:
    text = f"one client moves {what} in round {number} by {value:.3g}, past the bound {bound:.3g}"
    if weighs:
        return Finding(
            code="weights",
            text=f"{text}, by the numbers that it reports",
            remedy="weigh all clients equally, and divide by a public constant",
        )
    return Finding(
        code="unclipped" if what == "its upload" else "movement",
        text=text,
        remedy="clip after everything that changes the update, and before the noise",
    )


def changed_clients(probes: Probes, facts: Facts) -> Iterator[Finding]:
    """Find what a client does to others, and to the run, by its NaN, its zero or its absence."""
    again = probes.runs.get(AGAIN)
    if again is None or again.ended:
        return
    nan, zero, absent = (probes.runs.get(name) for name in ("nan", "zero", "raise"))
    if nan is not None and not facts.has_task:
        number = next((r.round for r in nan.replies if _is_nan(r)), None)
        clients_protect = facts.has(recognise.OUR_MOD) or bool(facts.local)
        if number is not None and clients_protect:
            yield _nan(f"a NaN leaves the client in round {number}")
    if nan is not None and not all(release.finite for release in nan.releases):
        yield _nan("one client's NaN reaches the model")
    for name, run, what in (
        ("nan", nan, "an update of NaN"),
        ("zero", zero, "an update of zeros"),
        ("absence", absent, "one client's failure"),
    ):
        if name in ("nan", "absence") and run is None and facts.has_task:
            continue
        if run is None and name != "zero":
            yield _ends(name, f"{what} hangs the run")
        elif run is not None and run.ended:
            yield _ends(name, f"{what} ends the run ({run.ended})")
        elif name == "absence" and facts.has_task and facts.ours.holds:
            continue  # only the network keeps such a client's reply away: its failures are hidden
        elif run is not None and len(run.releases) < len(again.releases):
            yield _ends(name, f"{what} keeps the model of a round from being released")
    if zero is not None and any(reply.error for reply in zero.replies if reply.kind == TRAIN):
        yield _ends("zero", "an update of zeros makes a mod fail, which the server sees")
    failed = [] if absent is None or facts.has_task else absent.replies
    if any(reply.error for reply in failed if reply.kind == TRAIN):
        yield Finding(
            code="failures-seen",
            text="the server sees that a client failed, and Flower sends the error's text",
            remedy="answer with zeros and noise when training fails",
            refutes=False,
        )
    if nan is not None and not facts.secure_noise and not facts.has_task:
        target = nan.target(1)
        one, other = nan.uploads(1), again.uploads(1)
        if any(
            not np.array_equal(one[client].sample, other[client].sample)
            for client in one.keys() & other.keys() - {target}
        ):
            yield Finding(
                code="influence",
                text="one client's update changes what other clients send in the same round",
                remedy="keep no state in module variables, which clients of one process share",
            )


def _is_nan(reply: Reply) -> bool:
    return reply.kind == TRAIN and reply.upload is not None and not reply.upload.finite


def _nan(text: str) -> Finding:
    return Finding(
        code="nan",
        text=text,
        remedy="replace an update that is not finite by zeros before the noise",
    )


def _ends(code: str, text: str) -> Finding:
    return Finding(
        code=code,
        text=f"{text}: whether a model is released depends on one client's data",
        remedy="let no single reply end a round; sum what arrived, with noise for all",
    )
