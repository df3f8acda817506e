"""A run: its method, its plan, its sums, and everything that changes between two rounds.

The guarantees of a run are in `claims`, and its files in `run_files`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Clients
from flower_ext.federation.method import Method, State
from flower_ext.federation.model_checks import shared_arrays
from flower_ext.federation.population import Population
from flower_ext.federation.progress import Progress
from flower_ext.federation.spending import Spending
from flower_ext.federation.state.checkpoint import BegunRound, Checkpoints
from flower_ext.federation.state.folder import StateFolder, read_key
from flower_ext.federation.state.noise_stream import NoiseStream
from flower_ext.federation.stragglers import Stragglers
from flower_ext.federation.sums.summation import Summation
from flower_ext.privacy import (
    NoiseSource,
    PrivacyPlan,
    SecureNoise,
    SeededNoise,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum, QuerySum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.plans.release_mechanism import SpacedRelease
from flower_ext.privacy.randomness import derived_seed
from flower_ext.runs import RunWriter
from flower_ext.training import matches


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
        self.write_to(directory)

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
        return mechanism.query_sums if isinstance(mechanism, NoisedSum) else ()

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

    def write_to(self, directory: RunWriter | None) -> None:
        """Let a run that has not begun write its files to ``directory``.

        If ``directory`` is None, the run writes no files.
        """
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
