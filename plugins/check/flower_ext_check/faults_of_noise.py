"""Compare measured noise, bounds and ε with what the app promises.

All measurements come from held runs (`held_run`). There each client sends a public update in place
of what it learned from data, so the check knows each update before clipping and noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from flower_ext_check import recognise
from flower_ext_check.findings import Case, Findings
from flower_ext_check.measured import (
    MeasuredEpsilon,
    scaled_release_difference,
    scaled_upload_difference,
    spread,
)
from flower_ext_check.mechanisms import Noise
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.vectors import HELD_NORM

_DEVIATIONS = 6.5
"""A Gaussian exceeds this many standard deviations with a probability below 1e-10."""


def add_wrong_noise(probes: Probes, findings: Findings) -> None:
    """Compare the measured noise with the noise that the app's parameters promise."""
    held = probes.runs.get(RunName.HELD)
    if held is None or probes.traits.noise is None:
        return
    for number in probes.comparable:
        norm = max((upload.norm for upload in held.uploads(number).values()), default=0.0)
        differences = scaled_upload_difference(probes, number)
        if not _add_too_little_noise(differences, norm, f"uploads of round {number}", findings):
            what = f"a changed client's upload in round {number}"
            differences = _scaled_changed_upload_difference(probes, number)
            _add_too_little_noise(differences, np.inf, what, findings)
        step = held.step(number)
        norm = 0.0 if step is None else step.norm
        differences = scaled_release_difference(probes, number)
        _add_too_little_noise(differences, norm, f"the model of round {number}", findings)


def _scaled_changed_upload_difference(probes: Probes, number: int) -> np.ndarray:
    """Return the difference between two huge uploads, divided by its promised standard deviation.

    A huge upload shows whether noise precedes the clipping, which then shrinks the noise. The array
    is empty if uploads carry no noise, or if one of the two is missing or not finite.
    """
    noise = probes.traits.noise
    assert noise is not None
    one, other = (
        probes.seen(name).changed_upload(number) for name in (RunName.HUGE, RunName.HUGE_OTHER_SEED)
    )
    stddev = noise.of_upload(len(probes.seen(RunName.HELD).cohort(number)))
    if not stddev or one is None or other is None or not (one.finite and other.finite):
        return np.empty(0)
    # The first of the two runs is quiet: this package then adds no noise, but Flower does.
    noises = 1 if probes.traits.has(recognise.OUR_MOD) else 2
    return np.asarray((one.sample - other.sample) / (stddev * noises**0.5))


def _add_too_little_noise(
    differences: np.ndarray, norm: float, what: str, findings: Findings
) -> bool:
    """Add a finding and return True if the noise in ``differences`` is smaller than promised.

    ``differences`` are between two runs, in promised standard deviations. ``what`` names the value
    that carries the noise, and ``norm`` is the norm of this value.
    """
    if not differences.size:
        return False
    measured = spread(differences)
    if measured.value < 1e-3 and 2 * HELD_NORM < norm < np.inf:
        findings.add(Case.SEEDED_NOISE, what=what)
    elif measured.value < 1e-3:
        findings.add(Case.NOISE_MISSING, what=what)
    elif measured.high < 1:
        findings.add(Case.NOISE_SMALL, what=what, value=measured.value, high=measured.high)
    else:
        return False
    return True


def add_exceeded_bounds(probes: Probes, findings: Findings) -> None:
    """Find where one client moves its upload or the model farther than clipping permits."""
    if probes.traits.noise is None or not probes.traits.protects_public_update:
        return
    is_exact, exceeded = probes.is_exact, set[str]()
    # A heavy update is huge, too. Its weight is at fault only where a huge update is clipped.
    for number, run in product(probes.comparable, (RunName.HUGE, RunName.HEAVY)):
        for movement in _movements(probes, probes.traits.noise, run, number):
            # Neither noise nor rounding may count as a movement.
            noise = 0.0 if is_exact else _DEVIATIONS * movement.noise_stddev * 2**0.5
            limit = movement.bound * 1.01 + 2 * HELD_NORM + noise
            if movement.what in exceeded or not movement.distance > limit:
                continue
            exceeded.add(movement.what)
            findings.add(
                Case.WEIGHTS_HEAVY if run is RunName.HEAVY else movement.case,
                what=movement.what,
                number=number,
                moved=movement.distance,
                bound=movement.bound,
            )


@dataclass(frozen=True, kw_only=True)
class _Movement:
    """The distance by which a changed client moves a value, and the most that clipping permits."""

    what: str
    case: Case
    """The finding if the distance exceeds the bound."""
    distance: float
    """Distance along `direction`."""
    bound: float
    noise_stddev: float
    """Standard deviation of the noise on the value."""


def _movements(probes: Probes, noise: Noise, run: RunName, number: int) -> Iterator[_Movement]:
    """Yield the movements of the changed client's upload and of the model, if they are measured."""
    traits, quiet = probes.traits, probes.seen(RunName.QUIET)
    clients_clip = traits.has(recognise.CLIENT_SIDE) or traits.has(recognise.CLIENT_ADAPTIVE)
    if clients_clip or traits.local_mod or any(noise.upload_stddev.values()):
        upload = probes.seen(run).changed_upload(number)
        usual = [each.along for each in quiet.uploads(number).values()]
        if upload is not None and upload.finite and usual:
            yield _Movement(
                what="its upload",
                case=Case.UNCLIPPED,
                distance=abs(upload.along - float(np.median(usual))),
                bound=noise.clipping_norm * (2 if noise.bounds_models else 1),
                noise_stddev=noise.of_upload(len(quiet.cohort(number))),
            )
    moved = probes.movement(run, number)
    if noise.divisor and moved is not None:
        yield _Movement(
            what="the model",
            case=Case.MOVEMENT,
            distance=abs(moved),
            bound=noise.clipping_norm / noise.divisor,
            noise_stddev=noise.release_stddev,
        )


def add_wrong_epsilon(measured_epsilon: MeasuredEpsilon | None, findings: Findings) -> None:
    """Find a stated ε that is smaller than the ε that the check computed from measurements."""
    if measured_epsilon is not None and not measured_epsilon.agrees:
        findings.add(Case.EPSILON, stated=measured_epsilon.stated, text=measured_epsilon.text)
