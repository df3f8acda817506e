"""The plan of DP-Ditto and its baselines: every client uploads a whole local model each round."""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.sampling import Sampling
from flower_ext.privacy.base_plan import PlainAverage
from flower_ext.privacy.guarantee import Basis, Guarantee
from flower_ext.privacy.mechanisms.protections import ClipSteps, OutputPerturbation, Protection
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.theorems.dp_ditto_theorem import (
    ClippedSteps,
    RecordLevelTerms,
    composed_noise_stddev,
    dp_ditto_noise_stddev,
    noised_values,
    record_level_guarantees,
)


@dataclass(frozen=True, kw_only=True)
class RecordLevelPlan(RecordLevelTerms, PlainAverage):
    """A plan in which each client clips and noises the local model that it uploads in every round.

    Privacy unit: one record of one client, replaced by another. The server sees every upload.

    Guarantees
    ----------
    Without ``steps``, an upload is the local model, clipped to C, plus N(0, σ² I). One record moves
    the clipped model by at most 2C, whatever the published theorem says. With ``steps``, each local
    step clips the gradient of every record to G and adds N(0, σ² I) to the weights. The upload is
    the model after these steps, clipped to C; this clipping costs no privacy.

    Parameters
    ----------
    sampling : FullParticipation
        All clients take part in every round, as the published theorem assumes.
    clipping_norm : float
        Norm bound C of the whole local model.
    noise_stddev : float
        σ. Without ``steps``, the stddev of the noise on each weight of an upload. With ``steps``,
        the stddev of the noise that each local step adds to each weight.
    num_examples : int
        |D_n|: number of training examples, public and the same for every client. A client with
        another number refuses to train.
    rounds : int
        Planned number of rounds T.
    delta : float
    steps : ClippedSteps, optional
        Bounds the influence of one record in each local step.
    """

    client_protects = True

    @classmethod
    def for_target(
        cls,
        *,
        epsilon: float,
        delta: float,
        sampling: Sampling,
        num_examples: int,
        rounds: int,
        clipping_norm: float,
        basis: Basis = "provable",
        steps: ClippedSteps | None = None,
    ) -> RecordLevelPlan:
        """Return the plan whose ε is ``epsilon`` after ``rounds`` rounds.

        ``basis`` says whether ``epsilon`` is the ε of the published theorem or the provable ε.
        """
        if basis == "published":
            stddev = dp_ditto_noise_stddev(
                epsilon=epsilon,
                delta=delta,
                rounds=rounds,
                num_clients=sampling.population,
                num_examples=num_examples,
                clipping_norm=clipping_norm,
            )
            if steps is not None:
                stddev /= steps.upload_noise
        else:
            require_at_least_one("rounds", rounds)
            sensitivity, uses = noised_values(clipping_norm, steps)
            stddev = composed_noise_stddev(
                sensitivity=sensitivity, epsilon=epsilon, delta=delta, releases=rounds * uses
            )
        return cls(
            sampling=sampling,
            clipping_norm=clipping_norm,
            noise_stddev=stddev,
            num_examples=num_examples,
            rounds=rounds,
            delta=delta,
            steps=steps,
        )

    def describe(self) -> str:
        """Describe the plan in words, for the log."""
        noise = f"noise stddev {self.noise_stddev:.4g}"
        if self.steps is not None:
            bound = self.steps.gradient_clipping_norm
            noise += f" in each local step, records' gradients clipped to {bound:g}"
        return (
            f"{self.sampling.describe()} · local models clipped to {self.clipping_norm:g}, {noise}"
        )

    def num_units(self, run: RunSummary) -> int:
        """Return the number of records on all clients."""
        return self.sampling.population * self.num_examples

    def mechanism(self, method: MethodTraits) -> RoundMechanism:
        """Return this plan itself, because it is also the mechanism of its runs.

        With ``steps``, noise is added in the local steps only, so refuse a method whose upload
        depends on records in any other way.
        """
        if self.steps and method.upload_phase is None:
            raise InvalidValue(
                f"plan.steps: expected None, because {method.name} also uses records outside the "
                "local steps to compute an upload, and only the local steps add noise"
            )
        return self

    def check_training(self, run: RunSummary) -> None:
        """Refuse local training whose settings differ from ``steps``, on which ε relies."""
        steps, size, phase = self.steps, self.num_examples, run.method.upload_phase
        if steps is None:
            return
        assert phase is not None
        training = run.training[phase]
        settings = {
            "learning_rate": (training.learning_rate, steps.learning_rate),
            "batch_size": (min(training.batch_size, size), steps.batch_size or size),
            "steps": (training.num_steps(size), steps.local_steps),
            "momentum": (training.momentum, 0.0),
            "sam_radius": (training.sam_radius, 0.0),
            "tolerance": (training.tolerance, 0.0),
            "optimizer": (training.optimizer, "SGD"),
        }
        for name, (chosen, planned) in settings.items():
            if chosen != planned:
                raise InvalidValue(
                    f"{phase}.{name}={chosen!r}: expected {planned!r}, the value that the plan's "
                    "steps require"
                )

    def protection(self, run: RunSummary, cohort_size: int) -> Protection | None:
        """Return the protection that adds noise to a model or, with ``steps``, to local steps."""
        if self.steps is None:
            return OutputPerturbation(
                clipping_norm=self.clipping_norm,
                noise_stddev=self.noise_stddev,
                num_examples=self.num_examples,
            )
        return ClipSteps(
            clipping_norm=self.clipping_norm,
            gradient_clipping_norm=self.steps.gradient_clipping_norm,
            noise_stddev=self.noise_stddev,
            num_examples=self.num_examples,
        )

    def guarantees(self, run: RunSummary) -> list[Guarantee]:
        """Return the published and the provable guarantee for one record of any client."""
        return record_level_guarantees(self, run)
