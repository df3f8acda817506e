"""A run: its options, and everything that changes between two rounds.

The guarantees of a run are in `run_guarantees`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.checks import Checked, CountOrZero, Flag
from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.model_checks import shared_arrays
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.federation.method import Method
from flower_ext.federation.method_state import State, groups_under, prefixed
from flower_ext.federation.population import Population
from flower_ext.federation.progress import Progress
from flower_ext.federation.server.spending import Spending
from flower_ext.federation.server.stragglers import Stragglers
from flower_ext.federation.storage.checkpoint import BegunRound, Checkpoints
from flower_ext.federation.storage.folder import StateFolder, Stored, read_state_key
from flower_ext.federation.storage.noise_stream import NoiseStream
from flower_ext.federation.sums.summation import Summation
from flower_ext.privacy import (
    Budget,
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

MODEL = "model"
"""Group of the shared model in a checkpoint."""
_AVERAGE = "average."
"""Prefix, in a method's state, of the groups of the average of models."""
_WRAPPER = "wrapper."
"""Prefix, in a checkpoint, of the groups that a wrapper of the strategy keeps."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(Checked):
    """Options of a `FederatedStrategy`; its docstring describes them."""

    seed: int | None
    seeded_noise: Flag
    evaluate_every: CountOrZero
    training_loss: Flag
    diagnostics: Flag
    stragglers: Stragglers | None
    timeout: float
    frozen: str
    state_key_file: Path | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeded_noise and self.seed is None:
            raise InvalidValue("seeded_noise=True: expected a seed as well; give seed=")

    def generator(self, *path: str | int) -> np.random.Generator:
        """Return the generator for a purpose: seeded if there is a seed, else secure."""
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def noise(self, *path: str | int) -> NoiseSource:
        """Return the server's source of noise for a purpose."""
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()


@dataclass(kw_only=True, eq=False)
class Run:
    """One run of a method.

    Parameters
    ----------
    plan : PrivacyPlan
        The plan that the user gave.
    summation : Summation
        Adds up the clients' contributions. Its ``mechanism`` is the privacy mechanism that the
        plan made for the method.
    directory : RunWriter, optional
        The run writes its files there; without a directory, it writes none.
    """

    method: Method
    plan: PrivacyPlan
    summation: Summation
    population: Population
    spending: Spending
    options: StrategyOptions
    directory: RunWriter | None

    progress: Progress = field(init=False)
    clients: Clients = field(init=False)
    checkpoints: Checkpoints = field(init=False)
    noise_stream: NoiseStream | None = field(init=False)
    """The noise of the rounds, if it is correlated; otherwise None."""

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
    """By partition, the last round in which the client stored memory and its reply was used."""
    answers: dict[str, Mapping[str, float]] = field(default_factory=dict, init=False)
    """Newest answers to queries outside training, by the queries' names."""
    ever_answered: bool = field(default=False, init=False)
    """True once a client sent a usable update."""
    last_round: int | None = field(default=None, init=False)
    """Number of the last round, which is always evaluated; None outside `RunLoop.start`."""
    stopped: str | None = field(default=None, init=False)
    """The reason why a budget ended the run; None if no budget did."""
    companions: dict[str, records.Arrays] = field(default_factory=dict, init=False)
    """Groups of arrays, by name, that a wrapper of the strategy keeps in the run's checkpoints."""
    _shared: dict[str, tuple[Any, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.spending.check_plan(self.mechanism)
        self.progress = Progress(self.directory)
        self.clients = Clients(self.method.client.name, self.progress, timeout=self.options.timeout)
        self.checkpoints = Checkpoints(self.directory, repeats=self.repeats)
        self.noise_stream, mechanism = None, self.mechanism
        if isinstance(mechanism, SpacedRelease) and mechanism.strategy != StrategyMatrix():
            self.noise_stream = NoiseStream(mechanism.strategy, self._noise_folder())
            # A resumed run keeps its first matrix: another computer may find another optimum.
            self.summation.mechanism = replace(mechanism, strategy=self.noise_stream.matrix)

    def _noise_folder(self) -> StateFolder | None:
        """Return the folder for the noise of earlier rounds; None if the noise is not on disk."""
        if self.directory is None or self.repeats:
            return None
        path = self.options.state_key_file
        key = None if path is None else read_state_key(path)
        return StateFolder(path=self.directory.path, sync=True, key=key)

    def recorded_in(self, directory: RunWriter, *, limit: Budget | None) -> Run:
        """Return the run that writes to ``directory``; see `FederatedStrategy.record_in`."""
        if (other := self.directory) is not None:
            raise InvalidValue(
                f"directory={str(other.path)!r}: the strategy already writes to this directory; "
                "create the strategy without the option directory="
            )
        has_answers = self.participations.answers.total() > 0
        if self.participations.rounds or has_answers or self.checkpoints.open is not None:
            raise InvalidValue(
                f"strategy={self.method.name}: expected a strategy that has not run yet; create a "
                "new one for a new run"
            )
        spending = self.spending
        if self.mechanism.release is None:
            spending = replace(spending, budget=spending.budget or limit)
        elif spending.ledger is None:
            spending = replace(spending, ledger=directory.open_ledger(budget=limit))
        # Everything that changes between rounds begins anew, because no round has begun.
        return replace(self, directory=directory, spending=spending)

    def shared_part(self, arrays: ArrayRecord) -> records.Arrays:
        """Return the arrays of a model that clients share.

        The run's first model, which must fit the method (see `shared_arrays`), determines their
        names, shapes and types.
        """
        personal = self.method.personal
        if not self._shared:
            first = shared_arrays(arrays, personal)
            self.method.check_model(first)
            self._shared = {name: (array.shape, array.dtype) for name, array in first.items()}
        model = {
            name: records.read_array(array)
            for name, array in arrays.items()
            if name in self._shared or not matches(name, personal)
        }
        self.check_model(model)
        return model

    def evaluated(self, arrays: ArrayRecord) -> records.Arrays:
        """Return the model to evaluate or return: the average so far, or the newest, ``arrays``."""
        model, average = self.shared_part(arrays), self.method.average
        kept = groups_under(_AVERAGE, (self.state or State()).server)
        return average.average(kept) if average is not None and kept else model

    def keep(self, model: records.Arrays, state: State) -> None:
        """Keep the state after a step to ``model``, with the average of the models so far."""
        if (average := self.method.average) is not None:
            # A method's `step` may return a state without the average, so take it from before.
            kept = average.add(model, groups_under(_AVERAGE, self.method_state.server))
            state = state.updated(server=prefixed(_AVERAGE, kept))
        self.state = state

    def check_model(self, model: records.Arrays) -> None:
        """Refuse a model (for example a checkpoint's) if its arrays do not fit the first model."""
        if {name: (array.shape, array.dtype) for name, array in model.items()} != self._shared:
            raise InvalidValue(
                f"the model differs from the run's first model: it has the arrays {sorted(model)}; "
                f"expected {sorted(self._shared)} with the shapes and types of the first model"
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
        """Counts of the releases so far to which each unit contributed."""
        return self.population.participations

    @property
    def method_state(self) -> State:
        """The method's state; before the first round, its initial state."""
        if self.state is None:
            self.state = self.method.init(self.model, self.plan.sampling.population)
        return self.state

    @property
    def withdrawn(self) -> frozenset[int]:
        """Numbers of the units that withdrew, as the run last read them from the account.

        A round reads them once, so that a withdrawal takes effect in a whole round or not at all.
        """
        return self.checkpoints.withdrawn

    @property
    def repeats(self) -> bool:
        """True if a repeated round equals the first attempt, because a seed fixes all draws."""
        noiseless = self.mechanism.delta is None
        seeded = self.options.seed is not None and (self.options.seeded_noise or noiseless)
        return seeded and self.summation.repeats and self.population.repeats

    @property
    def identity(self) -> Mapping[str, str]:
        """Names of the run, its method and its directory in the population's account."""
        name = "" if self.directory is None else self.directory.path.name
        return {"run": self.checkpoints.run_id, "method": self.method.name, "name": name}

    def release_identity(self, kind: str, number: int) -> int | None:
        """Return one number for a release and its repetition; None if the two would differ."""
        if not self.repeats:
            return None
        return derived_seed(self.options.seed or 0, kind, self.checkpoints.run_id, number)

    def round_noise(self, training_round: int) -> NoiseSource:
        """Return the server's noise for a training round; call it before asking any client."""
        fresh = partial(self.options.noise, "server-noise")
        if self.noise_stream is None:
            return fresh(training_round)
        like = self.mechanism.upload_like(self.model)
        return self.noise_stream.at(training_round, like, fresh, repeats=self.repeats)

    def round_record(self, training_round: int, **more: Any) -> ConfigRecord:
        """Return the record of a round for clients; ``more`` are fields of `RoundEntries`."""
        # Silos drop the records of users that withdrew: the server may not know which users are
        # drawn.
        withdrawn = sorted(self.withdrawn) if self.method.traits.num_silos else []
        entries = RoundEntries(
            run=self.checkpoints.run_id,
            number=training_round,
            seed=self.options.seed or 0,
            diagnostics=self.options.diagnostics and "query" not in more,
            withdrawn=withdrawn or (),
            seeded_noise=self.options.seeded_noise,
            **more,
        )
        return entries.to_record()

    def note_size(self, partition: int, num_examples: int) -> None:
        """Keep the smallest num_examples of a client: a larger one would make ε too small."""
        smallest = min(num_examples, self.num_examples.get(partition, num_examples))
        self.num_examples[partition] = smallest

    def count_abandoned(self, begun: BegunRound) -> None:
        """Count a round that the server began and never finished: clients may have uploaded."""
        most_uploads = begun.needed if begun.uploads is None else begun.uploads
        self.population.count_abandoned(begun.units, most_uploads, needed=begun.needed)

    def count_unnoted(self) -> None:
        """Count a round whose noise is on disk but which ``begun.jsonl`` does not record."""
        # Either the process ended before it asked a client, or somebody restored an older copy of
        # the checkpoints. `SpacedSampling` is deterministic: drawing again gives the cohort.
        stream = self.noise_stream
        if stream is not None and stream.has_unnoted(self.participations.rounds):
            drawn = self.population.draw(secure_generator())
            size = len(drawn.partitions)
            self.population.count_abandoned(drawn.units, size, needed=size)

    def save(self, server_round: int, model: records.Arrays) -> None:
        """Write a checkpoint after a round: everything that changes between two rounds."""
        values = {
            "round": server_round,
            "participations": self.participations.to_dict(),
            "num_examples": [*self.num_examples.items()],  # JSON has no integers as keys
            "client_metrics": [*self.client_metrics.items()],
            "remembered": [*self.remembered.items()],
            "refusals": self.clients.refusals,
            "refused": self.clients.refused,
            "mechanism": self.mechanism.state,
        }
        groups = {
            MODEL: model,
            **(self.state or State()).groups(),
            **self.summation.state(),
            **{_WRAPPER + name: group for name, group in self.companions.items()},
        }
        self.checkpoints.save(server_round, values, groups)

    def restore(self, checkpoint: Stored) -> None:
        """Restore a checkpoint of the same terms and model, except for the state of the sums."""
        values = checkpoint.values
        self.population.participations = Participations.from_dict(values["participations"])
        self.num_examples = dict(values["num_examples"])
        self.client_metrics = dict(values["client_metrics"])
        self.remembered = dict(values["remembered"])
        self.clients.refusals.extend(values["refusals"])
        self.clients.refused = values["refused"]
        self.summation.mechanism = self.mechanism.restored(values["mechanism"])
        self.state = State.of_groups(checkpoint.arrays)
        self.companions = groups_under(_WRAPPER, checkpoint.arrays)
