"""Record-level DP for a client that uploads its whole local model in every round: DP-Ditto.

Source: Zhao et al., Convergence-Privacy-Fairness Trade-Off in Personalized Federated Learning.

====================  =====================================================
paper                 here
====================  =====================================================
C                     ``clipping_norm`` of the local model
σ_u                   ``noise_stddev`` of each weight of an upload
Δs                    2C/|D_n| (Eqn 7)
q                     1/``num_clients`` (Eqn 8)
T, |D_n|              ``rounds``, ``num_examples``
η_G                   ``ClippedSteps.learning_rate``
====================  =====================================================

Eqns 7 and 8 ask for σ_u = Δs √(2 q T ln(1/δ)) / ε. Three steps of that do not hold: every client
takes part in every round, so 1/N samples nothing; a clipped model is moved by one record up to 2C,
not 2C/|D_n|; and the closed form leaves out the term ε²/(4 ln(1/δ)) of composed Gaussians, which
matters at a large ε. What does hold bounds each record's gradient inside the local steps, and
composes Gaussians without amplification. Every guarantee comes as a pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flower_ext.privacy.accounting import EXACT_GAUSSIAN, gaussian_loss
from flower_ext.privacy.calibration import calibrate_noise_multiplier
from flower_ext.privacy.guarantee import LOADS, ON_A_GRID, Condition, Guarantee, noise_assumption
from flower_ext.privacy.sampling import FullParticipation
from flower_ext.privacy.theorems.upcycled import OutputPerturbation
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

# What bounds one record ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClippedSteps:
    """The local steps of one client in one round, each record's gradient clipped.

    A step is u ← u − η (1/B) Σ clip(∇F̂(u; record), G), the sum being over B records. With noise in
    every step, the whole round is protected; without, the two neighbouring models may run apart
    from the second step on.

    Parameters
    ----------
    learning_rate : float
        η_G.
    gradient_clipping_norm : float
        G, of a single record's gradient.
    num_examples : int
        |D_n|, public.
    local_steps : int
    batch_size : int, optional
        B; by default all records. Smaller batches run through the records in passes, in an order
        that does not depend on them, and each round begins a new pass.
    """

    learning_rate: float
    gradient_clipping_norm: float
    num_examples: int
    local_steps: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        _positive("learning_rate", self.learning_rate)
        _positive("gradient_clipping_norm", self.gradient_clipping_norm)
        _at_least_one("num_examples", self.num_examples)
        _at_least_one("local_steps", self.local_steps)
        if self.batch_size is not None and not 1 <= self.batch_size <= self.num_examples:
            raise ValueError(
                f"batch_size={self.batch_size!r}: expected an integer from 1 to num_examples="
                f"{self.num_examples}"
            )

    @property
    def sensitivity(self) -> float:
        """How far replacing one record moves a step that uses it (L2): 2ηG/B."""
        return self._step * 2 / (self.batch_size or self.num_examples)

    @property
    def uses_per_round(self) -> int:
        """The most steps of a round that use any one record."""
        per_pass = math.ceil(self.num_examples / (self.batch_size or self.num_examples))
        return math.ceil(self.local_steps / per_pass)

    @property
    def upload_sensitivity(self) -> float:
        """How far replacing one record moves the uploaded model, without noise in the steps (L2).

        One step is `sensitivity`. After it nothing keeps the neighbours together, but no step moves
        a model further than ηG.
        """
        return self.sensitivity if self.local_steps == 1 else 2 * self.local_steps * self._step

    def upload_stddev(self, step_stddev: float) -> float:
        """Standard deviation of each weight of the upload when every step adds ``step_stddev``.

        Later steps on a convex loss only shrink what earlier ones added.
        """
        return math.sqrt(self.local_steps) * step_stddev

    @property
    def _step(self) -> float:
        return self.learning_rate * self.gradient_clipping_norm


# As published -------------------------------------------------------------------------------------


def dp_ditto_noise_stddev(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    num_clients: int,
    num_examples: int,
    clipping_norm: float,
) -> float:
    """σ_u of Eqns 7–8, as published: Δs √(2 T ln(1/δ) / N) / ε with Δs = 2C/|D_n|.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    _check_budget(epsilon, delta, rounds)
    return _published(delta, rounds, num_clients, num_examples, clipping_norm) / epsilon


def dp_ditto_epsilon(
    *,
    noise_stddev: float,
    delta: float,
    rounds: int,
    num_clients: int,
    num_examples: int,
    clipping_norm: float,
) -> float:
    """ε of Eqns 7–8 for a given σ_u, as published.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    _positive("noise_stddev", noise_stddev)
    _check_budget(1.0, delta, rounds)
    return _published(delta, rounds, num_clients, num_examples, clipping_norm) / noise_stddev


def _published(
    delta: float, rounds: int, num_clients: int, num_examples: int, clipping_norm: float
) -> float:
    _at_least_one("num_clients", num_clients)
    _at_least_one("num_examples", num_examples)
    _positive("clipping_norm", clipping_norm)
    sensitivity = 2 * clipping_norm / num_examples
    return sensitivity * math.sqrt(2 * rounds * math.log(1 / delta) / num_clients)


# What is provable ---------------------------------------------------------------------------------


def composed_noise_stddev(
    *, sensitivity: float, epsilon: float, delta: float, releases: int
) -> float:
    """Noise of each of ``releases`` Gaussians that one record moves by ``sensitivity`` (L2).

    Exact composition, no amplification; never less than the target needs.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    _positive("sensitivity", sensitivity)
    _check_budget(epsilon, delta, releases)
    return sensitivity * math.sqrt(releases) * _one_gaussian(epsilon, delta)


def composed_epsilon(
    *, sensitivity: float, noise_stddev: float, delta: float, releases: int
) -> float:
    """ε of ``releases`` Gaussians of ``noise_stddev`` that one record moves by ``sensitivity``.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    _positive("sensitivity", sensitivity)
    _positive("noise_stddev", noise_stddev)
    _check_budget(1.0, delta, releases)
    return gaussian_loss(noise_stddev / sensitivity, releases=releases, delta=delta).epsilon


def clipped_steps_noise_stddev(
    steps: ClippedSteps, *, epsilon: float, delta: float, rounds: int
) -> float:
    """Noise that every local step must add to each weight for (ε, δ) over ``rounds`` rounds."""
    _check_budget(epsilon, delta, rounds)
    return composed_noise_stddev(
        sensitivity=steps.sensitivity,
        epsilon=epsilon,
        delta=delta,
        releases=rounds * steps.uses_per_round,
    )


def clipped_steps_epsilon(
    steps: ClippedSteps, *, noise_stddev: float, delta: float, rounds: int
) -> float:
    """ε of ``rounds`` rounds in which every local step adds ``noise_stddev`` to each weight."""
    _check_budget(1.0, delta, rounds)
    return composed_epsilon(
        sensitivity=steps.sensitivity,
        noise_stddev=noise_stddev,
        delta=delta,
        releases=rounds * steps.uses_per_round,
    )


# Guarantees of a run ------------------------------------------------------------------------------


def dp_ditto_guarantees(
    perturbation: OutputPerturbation,
    *,
    num_clients: int,
    num_examples: int,
    rounds: int,
    delta: float,
    steps: ClippedSteps | None = None,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """What protects one record when clients upload models clipped to C with noise σ_u.

    As published, and provable. ``steps`` says that each record's gradient was clipped in training;
    without it only the clipping of the model is left, and one record may move it by 2C.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    clip, stddev = perturbation.clipping_norm, perturbation.noise_stddev
    published = dp_ditto_epsilon(
        noise_stddev=stddev,
        delta=delta,
        rounds=rounds,
        num_clients=num_clients,
        num_examples=num_examples,
        clipping_norm=clip,
    )
    sensitivity, source = _moved(clip, num_examples, steps)
    provable = composed_epsilon(
        sensitivity=sensitivity, noise_stddev=stddev, delta=delta, releases=rounds
    )
    return [
        _published_guarantee(
            published, sensitivity, clip, stddev, num_clients, num_examples, rounds, delta
        ),
        _provable_guarantee(
            provable, delta, f"{rounds} uploads, {source}", secure_noise, not_covered
        ),
    ]


def clipped_steps_guarantee(
    steps: ClippedSteps,
    *,
    noise_stddev: float,
    rounds: int,
    delta: float,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> Guarantee:
    """What protects one record when every clipped local step adds its own noise."""
    epsilon = clipped_steps_epsilon(steps, noise_stddev=noise_stddev, delta=delta, rounds=rounds)
    source = (
        f"{rounds} rounds of {steps.local_steps} noised steps, {steps.uses_per_round} of them with "
        f"any one record, sensitivity 2ηG/B = {steps.sensitivity:.4g} of a step"
    )
    return _provable_guarantee(epsilon, delta, source, secure_noise, not_covered)


def _moved(clip: float, num_examples: int, steps: ClippedSteps | None) -> tuple[float, str]:
    """How far one record moves an upload, and why. Clipping projects onto a ball."""
    if steps is not None and steps.num_examples != num_examples:
        raise ValueError(
            f"num_examples={num_examples!r}: expected {steps.num_examples}, as in the clipped steps"
        )
    ball = 2 * clip
    if steps is None or steps.upload_sensitivity >= ball:
        return ball, f"sensitivity 2C = {ball:.4g}"
    bound = "2ηG/B" if steps.local_steps == 1 else "2KηG (K steps without noise)"
    return steps.upload_sensitivity, f"sensitivity {bound} = {steps.upload_sensitivity:.4g}"


def _published_guarantee(
    epsilon: float,
    sensitivity: float,
    clip: float,
    stddev: float,
    num_clients: int,
    num_examples: int,
    rounds: int,
    delta: float,
) -> Guarantee:
    claimed = 2 * clip / num_examples
    # Sampling by q = 1/N, were there any, is taken to thin T releases out to qT.
    thinned = gaussian_loss(stddev / claimed, releases=rounds / num_clients, delta=delta).epsilon
    return Guarantee(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        view=AdversaryView.EACH_UPLOAD,
        epsilon=epsilon,
        delta=delta,
        basis="published",
        accountant="closed form (moments accountant)",
        source="Zhao et al., DP-Ditto, Eqns 7–8",
        conditions=(
            Condition(
                f"1/N is a sampling rate (q = 1/{num_clients}; every client takes part in every "
                "round, so q = 1)",
                num_clients == 1,
            ),
            Condition(
                f"one record moves a clipped local model by at most 2C/|D_n| = {claimed:.4g} (what "
                f"holds is {sensitivity:.4g})",
                sensitivity <= claimed,
            ),
            Condition(
                f"the closed form covers qT Gaussians of its own sensitivity (exactly ε = "
                f"{thinned:.4g}, claimed {epsilon:.4g})",
                thinned <= epsilon,
            ),
        ),
    )


def _provable_guarantee(
    epsilon: float, delta: float, source: str, secure_noise: bool, not_covered: Sequence[str]
) -> Guarantee:
    return Guarantee(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        view=AdversaryView.EACH_UPLOAD,
        epsilon=epsilon,
        delta=delta,
        basis="provable",
        accountant=EXACT_GAUSSIAN,
        source=source,
        assumptions=(
            "clients train, clip and add noise as told",
            "personal models, and whatever else depends on a client's records, stay on the client",
            "the planned rounds and each client's number of examples are public",
            "arithmetic in floating point stays within the margins of clipping",
            LOADS,
            ON_A_GRID,
            noise_assumption(secure_noise),
        ),
        not_covered=tuple(not_covered),
    )


@lru_cache(maxsize=1024)
def _one_gaussian(epsilon: float, delta: float) -> float:
    """Noise multiplier of one Gaussian release of sensitivity 1."""
    return calibrate_noise_multiplier(
        epsilon=epsilon,
        delta=delta,
        sampling=FullParticipation(1),
        rounds=1,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        tolerance=1e-9,
    )


def _check_budget(epsilon: float, delta: float, rounds: int) -> None:
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon!r}: expected a finite number > 0")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: expected a number in (0, 1)")
    _at_least_one("rounds", rounds)


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number > 0")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer >= 1")
