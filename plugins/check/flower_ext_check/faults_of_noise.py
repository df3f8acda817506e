"""Compare measured noise, bounds and ε with what the app promises.

All measurements come from held runs (`held_run`). There each client sends a public update in place
of what it learned from data, so the check knows each update before clipping and noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from flower_ext_check import recognise
from flower_ext_check.findings import Findings
from flower_ext_check.measured import Measured, release_gap, spread, upload_gap
from flower_ext_check.mechanisms import Noise
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.vectors import HELD

_DEVIATIONS = 6.5
"""A Gaussian exceeds so many standard deviations with a probability below `measured.LUCK` / 100."""


def add_wrong_noise(probes: Probes, findings: Findings) -> None:
    """Compare the measured noise with the noise that the app's parameters promise."""
    again, noise = probes.runs.get(RunName.AGAIN), probes.traits.noise
    if again is None or noise is None:
        return
    for number in probes.comparable:
        is_wrong = False
        if (gap := upload_gap(probes, number)).size:
            size = max((upload.norm for upload in again.uploads(number).values()), default=0.0)
            is_wrong = _compare(gap, size, f"uploads of round {number}", findings)
        one, other = (
            probes.seen(name).target_upload(number) for name in (RunName.HUGE, RunName.HUGE_OTHER)
        )
        stddev = noise.of_upload(len(again.cohort(number)))
        if stddev and not is_wrong and one and other and one.finite and other.finite:
            # If the noise comes from this package, only one of the two runs adds it.
            stddev *= 1.0 if probes.traits.has(recognise.OUR_MOD) else 2**0.5
            what = f"a changed client's upload in round {number}"
            _compare((one.sample - other.sample) / stddev, np.inf, what, findings)
        if (gap := release_gap(probes, number)).size:
            step = again.step(number)
            size = 0.0 if step is None else step.norm
            _compare(gap, size, f"the model of round {number}", findings)


def _compare(gap: np.ndarray, size: float, what: str, findings: Findings) -> bool:
    """Add a finding and return True if the noise in ``gap`` is smaller than promised.

    ``gap`` is the difference between two runs, in promised standard deviations. ``what`` names
    the value that carries the noise, and ``size`` is the norm of this value.
    """
    measured = spread(gap)
    if measured.value < 1e-3 and size > 2 * HELD and np.isfinite(size):
        findings.add("seeded-noise", what=what)
    elif measured.value < 1e-3:
        findings.add("noise-missing", what=what)
    elif measured.high < 1:
        findings.add("noise-small", what=what, **measured._asdict())
    else:
        return False
    return True


def add_exceeded_bounds(probes: Probes, findings: Findings) -> None:
    """Find where one client moves its upload or the model farther than clipping permits."""
    if probes.traits.noise is None or not probes.traits.holds:
        return
    is_exact, past = probes.is_exact, set[str]()
    for number, run in product(probes.comparable, (RunName.HUGE, RunName.HEAVY)):
        for what, moved, bound, stddev in _movements(probes, probes.traits.noise, run, number):
            # Neither noise nor rounding may count as a movement.
            slack = 2 * HELD + (0.0 if is_exact else _DEVIATIONS * stddev * 2**0.5)
            if what in past or moved is None or not abs(moved) > bound * 1.01 + slack:
                continue
            past.add(what)
            case = "unclipped" if what == "its upload" else "movement"
            case = "weights/heavy" if run is RunName.HEAVY else case
            findings.add(case, what=what, number=number, moved=abs(moved), bound=bound)


def _movements(
    probes: Probes, noise: Noise, run: RunName, number: int
) -> Iterator[tuple[str, float | None, float, float]]:
    """Yield the name of each value that the changed client moves, and three numbers.

    The numbers are how far the client moved the value along `direction` (None if this was not
    measured), how far clipping lets the client move it, and the standard deviation of the noise on
    the value.
    """
    traits, held = probes.traits, probes.seen(RunName.QUIET)
    clients_clip = traits.has(recognise.CLIENT_SIDE) or traits.has(recognise.CLIENT_ADAPTIVE)
    if clients_clip or traits.local or any(noise.upload_stddev.values()):
        upload, moved = probes.seen(run).target_upload(number), None
        usual = [each.along for each in held.uploads(number).values()]
        if upload is not None and upload.finite and usual:
            moved = upload.along - float(np.median(usual))
        bound = noise.clipping_norm * (2 if noise.bounds_models else 1)
        yield "its upload", moved, bound, noise.of_upload(len(held.cohort(number)))
    if noise.cohort:
        bound = noise.clipping_norm / noise.cohort
        yield "the model", probes.movement(run, number), bound, noise.release_stddev


def add_wrong_epsilon(second: Measured | None, findings: Findings) -> None:
    """Find a stated ε that is smaller than the ε that the check computed from measurements."""
    if second is not None and not second.agrees:
        findings.add("epsilon", stated=second.stated, text=second.text)
