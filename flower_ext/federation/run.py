"""A run: its method, its plan, its sums, and everything that changes between two rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Clients
from flower_ext.federation.method import Method, State, groups_under
from flower_ext.federation.model_checks import shared_arrays
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.progress import Progress
from flower_ext.federation.spending import Spending
from flower_ext.federation.state.checkpoint import BegunRound, Checkpoints
from flower_ext.federation.state.folder import StateFolder, read_key
from flower_ext.federation.state.noise_stream import NoiseStream
from flower_ext.federation.state.sealed import Packed
from flower_ext.federation.stragglers import Stragglers
from flower_ext.federation.sums.summation import Summation
from flower_ext.privacy import (
    Budget,
    Guarantee,
    NoiseSource,
    PrivacyPlan,
    SecureNoise,
    SeededNoise,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum, QuerySum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.plans.spaced_release import SpacedRelease
from flower_ext.privacy.randomness import derived_seed
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.runs import RunWriter
from flower_ext.training import matches

MODEL = "model"
"""Group of the shared model in a checkpoint."""
_WRAPPER = "wrapper."
"""Prefix, in a checkpoint, of the groups that a wrapper of the strategy keeps."""
_ROUNDS_ALONE = "the published claim covers training rounds only"


@dataclass(kw_only=True, eq=False)
class Run:
    """One run of a method.

    Parameters
    ----------
    method : Method
    plan : PrivacyPlan
        The plan that the user gave.
    summation : Summation
        Adds up the clients' contributions. Its ``mechanism`` is the privacy mechanism that the
        plan made for the method.
    population : Population
        The clients to ask and the units to count.
    spending : Spending
    directory, timeout, stragglers, seed, seeded_noise, evaluate_every, training_loss, \
    diagnostics, frozen, state_key_file
        As in `FederatedStrategy`; ``directory`` is its ``run``.
    """

    method: Method
    plan: PrivacyPlan
    summation: Summation
    population: Population
    spending: Spending
    directory: InitVar[RunWriter | None]
    timeout: InitVar[float]
    stragglers: Stragglers | None
    seed: int | None
    seeded_noise: bool
    evaluate_every: int
    training_loss: bool
    diagnostics: bool
    frozen: str
    state_key_file: Path | None

    # What changes between two rounds, in addition to the participations.
    state: State | None = field(default=None, init=False)
    """The method's state; None before the first round."""
    model: records.Arrays = field(default_factory=dict, init=False)
    """The shared model that the server sent last; empty before the first round."""
    num_examples: dict[int, int] = field(default_factory=dict, init=False)
    """Numbers of training examples by partition, as far as clients reported them."""
    client_metrics: dict[int, dict[str, float]] = field(default_factory=dict, init=False)
    """Newest scores by partition."""
    remembered: dict[int, int] = field(default_factory=dict, init=False)
    """By partition, the last training round that the client answered and has memory of."""
    answers: dict[str, Mapping[str, float]] = field(default_factory=dict, init=False)
    """Newest answers to queries outside training, by the queries' names."""
    ever_answered: bool = field(default=False, init=False)
    """True once a client sent a usable update."""
    last_round: int | None = field(default=None, init=False)
    """Number of the last round, which is always evaluated; None outside `RunLoop.start`."""
    stopped: str | None = field(default=None, init=False)
    """The reason why a budget ended the run; None if none did."""
    _shared: dict[str, tuple[Any, ...]] = field(default_factory=dict, init=False)
    _stream: NoiseStream | None = field(default=None, init=False)
    companions: dict[str, records.Arrays] = field(default_factory=dict, init=False)
    """Groups of arrays, by name, that a wrapper of the strategy keeps in the run's checkpoints."""

    def __post_init__(self, directory: RunWriter | None, timeout: float) -> None:
        self.spending.check_plan(self.mechanism)
        self.progress = Progress()
        self.clients = Clients(self.method.client.name, self.progress, timeout=timeout)
        self._write_to(directory)

    def shared_part(self, arrays: ArrayRecord) -> records.Arrays:
        """Return the arrays of a model that clients share.

        The run's first model determines their names, shapes and types.

        Raises
        ------
        InvalidValue, UnshareableModel
            The first model does not fit the method (see `shared_arrays`), or ``arrays`` are not of
            the same model.
        """
        if not self._shared:
            first = shared_arrays(arrays, self.method.personal)
            self.method.check_model(first)
            self._shared = {name: (array.shape, array.dtype) for name, array in first.items()}
        personal = self.method.personal
        model = {
            name: records.read_array(array)
            for name, array in arrays.items()
            if name in self._shared or not matches(name, personal)
        }
        self.check_model(model)
        return model

    def evaluated(self, arrays: ArrayRecord) -> records.Arrays:
        """Return the model that the run evaluates and returns if its last round gave ``arrays``."""
        return self.method.evaluated(self.shared_part(arrays), self.state or State())

    def check_model(self, model: records.Arrays) -> None:
        """Refuse a model, such as a checkpoint's, whose arrays differ from the first model's."""
        if {name: (array.shape, array.dtype) for name, array in model.items()} != self._shared:
            raise InvalidValue(
                f"the model differs from the run's first one: arrays {sorted(model)}, expected "
                f"{sorted(self._shared)} with the same shapes and types"
            )

    @property
    def mechanism(self) -> RoundMechanism:
        """The next round's mechanism, which the plan made and earlier releases may have changed."""
        return self.summation.mechanism

    @property
    def query_sums(self) -> Sequence[QuerySum]:
        """The plan's queries, each with the mechanism of its answers."""
        mechanism = self.mechanism
        return mechanism.query_sums if isinstance(mechanism, MaskedNoisedSum) else ()

    @property
    def participations(self) -> Participations:
        """Participations of each unit in the rounds so far."""
        return self.population.participations

    @property
    def method_state(self) -> State:
        """The method's state, which is the initial one before the first round."""
        if self.state is None:
            self.state = self.method.init(self.model, self.plan.sampling.population)
        return self.state

    @property
    def repeats(self) -> bool:
        """True if a repeated round equals the first attempt, because a seed fixes all draws."""
        noiseless = self.mechanism.delta is None
        seeded = self.seed is not None and (self.seeded_noise or noiseless)
        return seeded and self.summation.repeats and self.population.repeats

    def generator(self, *path: str | int) -> np.random.Generator:
        """Return the generator for a purpose: seeded if the run has a seed, else secure."""
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def noise(self, *path: str | int) -> NoiseSource:
        """Return the server's source of noise for a purpose."""
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()

    def release_identity(self, kind: str, number: int) -> int | None:
        """Return a number that identifies the ``number``-th release of a kind.

        Return None if a repeated round would release other numbers than the first attempt.
        """
        if not self.repeats:
            return None
        return derived_seed(self.seed or 0, kind, self.checkpoints.run_id, number)

    def round_noise(self, number: int) -> NoiseSource:
        """Return the server's noise for a training round; call it before asking any client."""
        fresh = partial(self.noise, "server-noise")
        if self._stream is None:
            return fresh(number)
        like = self.mechanism.upload_like(self.model)
        return self._stream.at(number, like, fresh, repeats=self.repeats)

    def round_record(self, training_round: int, **more: Any) -> ConfigRecord:
        """Return the record that tells clients the run and the round, with the entries ``more``."""
        return ConfigRecord(
            {
                "run": self.checkpoints.run_id,
                "number": training_round,
                "seed": self.seed or 0,
                "diagnostics": self.diagnostics,
                **more,
            }
        )

    # Guarantees ---------------------------------------------------------------------------------

    @property
    def summary(self) -> RunSummary:
        """Everything that a plan may know about the run so far."""
        method = self.method
        weights = [training.proximal_weight for training in method.training.values()]
        roster = self.clients.roster
        traits = method.traits
        if roster is not None and roster.foreign:  # such clients may remember anything
            traits = replace(traits, keeps_memory=True)
        summary = RunSummary(
            method=traits,
            participations=self.participations,
            num_examples=self.num_examples,
            training=method.training,
            proximal_weight=min(weights, default=0.0) + method.added_proximal_weight,
            sent=self.model,
            secure_noise=not self.seeded_noise,
            secure_cohorts=not self.repeats,
            not_covered=self.not_covered(),
        )
        return method.complete_summary(summary, self.state or State())

    def claims(self, summary: RunSummary) -> list[Guarantee]:
        """Return the guarantees that the method claims for a run with this summary."""
        return self.method.claims(self.plan, summary, self.state or State(), self.summation)

    def guarantees(self) -> list[Guarantee]:
        """Return the guarantees after the rounds so far, published and provable."""
        if not self.participations.rounds:
            return []
        units = self.plan.num_units(self.summary)
        claims = [replace(claim, units=units) for claim in self.claims(self.summary)]
        if not (answered := self.participations.answers):
            return claims
        beside = f"noised sums of {', '.join(answered)}: {_ROUNDS_ALONE}"
        return [
            replace(claim, not_covered=(*claim.not_covered, beside))
            if claim.basis == "published"
            else claim
            for claim in claims
        ]

    def spent(self) -> dict[str, float]:
        """Return the ε spent so far and its δ, for the log and the report's figures."""
        summary, mechanism = self.summary, self.mechanism
        spent = mechanism.spent(summary)
        if spent and mechanism.delta is not None:
            spent["delta"] = mechanism.delta
            if units := self.plan.num_units(summary):
                spent["privacy_units"] = units
        if mechanism.release is not None:  # other plans have it in `spent` already
            for claim in self.claims(summary):
                if claim.basis == "published":
                    spent["epsilon_published"] = claim.epsilon
        return spent

    def not_covered(self) -> list[str]:
        """Return, one per line, what leaves the clients in this run without a guarantee."""
        exposed = ["whether and when each client answered"]
        noised = any(sums.query.schedule == "in evaluations" for sums in self.query_sums)
        if self.evaluate_every and not noised:
            exposed.append(
                "scores and test-set sizes that clients report un-noised at evaluation "
                "(evaluate_every=0 turns this off)"
            )
        if self.evaluate_every and self.training_loss:
            exposed.append(
                "losses on training records that clients report un-noised at evaluation "
                "(training_loss=False turns this off)"
            )
        if self.diagnostics:
            exposed.append("norms of updates before clipping (diagnostics=False turns this off)")
        return [*exposed, *self.spending.exposed, *self.method.disclosures(self.summation)]

    def check_training(self) -> None:
        """Refuse local training that the plan does not cover; every round calls this check.

        Raises
        ------
        InvalidValue
            A setting does not fit; the message names it, and the value that the plan expects.
        """
        self.mechanism.check_training(self.summary)

    def check_budget(self, server_round: int, cohort: Cohort) -> None:
        """Refuse a round after which the provable ε would exceed the budget.

        A budget that several runs share is charged at once.

        Raises
        ------
        BudgetExhausted
            The message says by how much.
        """
        if self.spending.budget is not None:
            # Assume that every client answers: even then, ε must not exceed the budget.
            population_after, size = deepcopy(self.population), len(cohort.partitions)
            population_after.count(cohort.units, size, requests=size)
            self.charge_release(server_round, population_after.participations)

    def charge_release(
        self, server_round: int, participations: Participations, *, answered: QuerySum | None = None
    ) -> None:
        """Check the budget for a release after which units have these ``participations``.

        If runs share the budget, the release is charged to their account.

        Raises
        ------
        BudgetExhausted
            The provable ε would exceed the budget; the message says by how much.
        """
        run_after = replace(self.summary, participations=participations)
        self.spending.charge_round(
            self.mechanism, server_round, run_after, self.claims, answered=answered
        )

    def count_abandoned(self, begun: BegunRound) -> None:
        """Count a round that the server began and never finished: clients may have uploaded."""
        self.population.count_abandoned(begun.units, begun.most_uploads, requests=begun.requests)

    def count_unnoted(self) -> None:
        """Count a round whose noise is on disk but which ``begun.jsonl`` does not record.

        Either the process ended before it asked a client, or somebody restored an older copy of the
        checkpoints, which lacks the record. `SpacedSampling` is deterministic: drawing again gives
        the cohort to count.
        """
        if self._stream is not None and self._stream.has_unnoted(self.participations.rounds):
            drawn = self.population.draw(secure_generator())
            size = len(drawn.partitions)
            self.population.count_abandoned(drawn.units, size, requests=size)

    # Files --------------------------------------------------------------------------------------

    def attach(self, directory: RunWriter, *, limit: Budget | None = None) -> None:
        """Let a run that has not begun write its files and its ledger to ``directory``.

        Parameters
        ----------
        directory : RunWriter
        limit : Budget, optional
            Budget of the new ledger. A plan that makes no releases has no ledger: ``limit`` then
            becomes the budget of the run, unless the run has one already.

        Raises
        ------
        InvalidValue
            The run writes to another directory already, or has begun.
        """
        if (other := self.checkpoints.directory) is not None:
            raise InvalidValue(
                f"run={str(other.path)!r}: the strategy already writes to this directory; create "
                "the strategy without the option run="
            )
        if self.participations.rounds:
            raise InvalidValue(
                f"strategy={self.method.name}: expected a strategy that has not run yet; create a "
                "new one for a new run"
            )
        self._write_to(directory)
        spending = self.spending
        if self.mechanism.release is not None:
            spending.ledger = spending.ledger or directory.open_ledger(budget=limit)
        elif spending.budget is None:
            spending.budget = limit

    def _write_to(self, directory: RunWriter | None) -> None:
        self.progress.directory = directory
        self.checkpoints = Checkpoints(directory, repeats=self.repeats)
        self._open_stream(directory)
        self.spending.repeatable = self.repeats
        self.spending.identity = {
            "run": self.checkpoints.run_id,
            "method": self.method.name,
            "name": "" if directory is None else directory.path.name,
        }

    def _open_stream(self, directory: RunWriter | None) -> None:
        """Begin the correlated noise of a run, or continue it in a resumed run."""
        mechanism, folder = self.mechanism, None
        if not isinstance(mechanism, SpacedRelease) or mechanism.strategy == StrategyMatrix():
            return
        if directory is not None and not self.repeats:
            key = None if self.state_key_file is None else read_key(self.state_key_file)
            folder = StateFolder(path=directory.path, sync=True, key=key)
        self._stream = NoiseStream(mechanism.strategy, folder)
        # A resumed run keeps its first matrix: another computer may find another optimum.
        self.summation.mechanism = replace(mechanism, strategy=self._stream.matrix)

    def save(self, server_round: int, model: records.Arrays) -> None:
        """Write a checkpoint after a round: everything that changes between two rounds."""
        values = {
            "round": server_round,
            "participations": self.participations.to_dict(),
            "num_examples": [*self.num_examples.items()],  # JSON has no integers as keys
            "client_metrics": [*self.client_metrics.items()],
            "remembered": [*self.remembered.items()],
            "refusals": self.clients.refusals,
            "mechanism": self.mechanism.state,
            "plan": self._terms,
        }
        groups = {
            MODEL: model,
            **(self.state or State()).groups(),
            **self.summation.state(),
            **{_WRAPPER + name: group for name, group in self.companions.items()},
        }
        self.checkpoints.save(server_round, values, groups)

    @property
    def _terms(self) -> list[Any]:
        """The plan's description and its `Release`; a resumed run must have the same ones."""
        release = self.mechanism.release
        return [self.plan.describe(), None if release is None else release.to_dict()]

    def restore(self, kept: Packed) -> None:
        """Restore a checkpoint, except for the state of the sums.

        Raises
        ------
        InvalidValue
            The run began under another plan.
        """
        values = kept.values
        if values["plan"] != self._terms:
            raise InvalidValue(
                f"plan={self.plan.describe()!r} of a resumed run: expected the plan with which it "
                f"began, {values['plan'][0]!r}, because the guarantee counts all rounds under one "
                "plan; begin a new run"
            )
        self.population.participations = Participations.from_dict(values["participations"])
        self.num_examples = dict(values["num_examples"])
        self.client_metrics = dict(values["client_metrics"])
        self.remembered = dict(values["remembered"])
        self.clients.refusals.extend(values["refusals"])
        self.summation.mechanism = self.mechanism.restored(values["mechanism"])
        self.state = State.of_groups(kept.arrays)
        self.companions = groups_under(_WRAPPER, kept.arrays)

    def save_guarantees(self, *, in_account: bool = True) -> None:
        """Write the guarantees after the rounds so far to ``guarantee.json``.

        If ``in_account`` is True, write them to the population's account, too. Each round charges
        the account anyway, so it needs the guarantees only when the run ends.
        """
        guarantees = self.guarantees()
        if in_account:
            self.spending.note(guarantees)
        if self.checkpoints.directory is not None:
            self.checkpoints.directory.save_guarantees(guarantees)
