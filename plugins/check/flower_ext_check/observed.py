"""Everything that one run of an app showed: messages to clients, their replies, and the models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import RecordDict

from flower_ext_check.held_run import TRAIN
from flower_ext_check.vectors import Vector


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One message that left a client."""

    kind: str
    round: int
    partition: int
    error: bool
    records: tuple[tuple[str, str], ...]
    """Kind and name of each record."""
    metrics: Mapping[str, Any]
    upload: Vector | None
    """Sent model minus received model; None if no array record fits the received model."""
    integers: bool
    """True if the client sent arrays of integers."""
    scalars: bool
    """True if the client sent floating-point arrays without axes."""


@dataclass(kw_only=True)
class Observed:
    """Everything that one run showed."""

    cohorts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each training round, the partitions to which its first batch of messages went.

    The keys are the group ids of the messages, or ``batch N`` for messages without such an id.
    """
    outside_strategy: set[str] = field(default_factory=set)
    """Kinds of messages that the app sent while no strategy ran the rounds."""
    strategy_starts: int = 0
    replies: list[Reply] = field(default_factory=list)
    releases: list[Vector] = field(default_factory=list)
    """The initial model, and each model that followed it."""
    means: dict[int, Vector] = field(default_factory=dict)
    """For each training round, the mean from which a strategy of this package makes the model."""
    planned_rounds: int = 0
    """Number of training rounds for which strategies were started."""
    error: str = ""
    """Type and place of the error that ended the run; "" if no error did."""
    client_errors: list[str] = field(default_factory=list)
    template: dict[str, RecordDict] = field(default_factory=dict)
    log: str = ""

    def successful_replies(self, kind: str) -> list[Reply]:
        """Return the replies to messages of a kind, except errors."""
        return [reply for reply in self.replies if reply.kind == kind and not reply.error]

    def uploads(self, round: int) -> dict[int, Vector]:
        """Return the uploads of a training round, by partition."""
        return {
            reply.partition: reply.upload
            for reply in self.replies
            if reply.kind == TRAIN and reply.round == round and reply.upload is not None
        }

    def changed_client(self, round: int) -> int:
        """Return the partition of the client that may be changed in a held run; −1 if none is."""
        return next(iter(self.cohort(round)), -1)

    def changed_upload(self, round: int) -> Vector | None:
        """Return the upload of the client that the check may change in this round of a held run."""
        return self.uploads(round).get(self.changed_client(round))

    def cohort(self, round: int) -> tuple[int, ...]:
        """Return the partitions that got a message in a training round."""
        return [*self.cohorts.values()][round - 1] if round <= self.rounds else ()

    def step(self, round: int) -> Vector | None:
        """Return the step of the model in a training round; None if it is not known or not finite.

        For a strategy of this package, this is the released mean. For any other strategy, it is
        the model after the round minus the model before it.
        """
        step = self.means.get(round)
        if not self.means and round < len(self.releases):
            step = self.releases[round].minus(self.releases[round - 1])
        return step if step is not None and step.finite else None

    @property
    def rounds(self) -> int:
        """Number of training rounds."""
        return len(self.cohorts)

    @property
    def rounds_without_model(self) -> int:
        """Number of training rounds that left the model unchanged.

        Rounds that ask no client are not counted.
        """
        return self.rounds + 1 - len(self.releases)
