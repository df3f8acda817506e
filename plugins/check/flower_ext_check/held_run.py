"""Held runs: runs of an app in which no client learns from its data.

A held run shows what mods and noise do. The check does not call the app's training function.
Instead, each client answers with the received model plus a small public update. The messages of the
client then depend on mods and noise alone, and on nobody's data. One client, the target, may answer
with another update, for example a huge one. This shows how far a single client moves the result.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from flower_ext.data import SiloData, trees
from flower_ext.federation import ClientWork
from flower_ext.federation.client import upload
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.federation.messages.failures import CLIENT_APP_RAISED
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.protections import ClipSteps, Protection
from flower_ext.training import LocalTraining
from flower_ext_check.vectors import direction, held_step
from flower_ext_check.wrapping import Patch

Change = Literal["", "huge", "heavy", "nan", "zero", "raise"]
"""Misbehaviour of the target in each round; "" means none. A heavy update is huge, and has a huge
weight."""
_HUGE_CHANGES = ("huge", "heavy")
HUGE, HEAVY = 1e4, 1000
"""Norm of a huge update, and factor on the metrics of a heavy one, such as its weight."""
_SLOW = 1e-6
"""Factor on the learning rate of slow steps."""
TRAIN = "train"


@dataclass(kw_only=True)
class HeldRun:
    """Answer requests in place of the clients, in a held run."""

    template: Mapping[str, RecordDict]
    """Content that the app's function returned in the first run, by category of messages."""
    planned_change: Change = ""
    """Misbehaviour of the target, which is also called the changed client."""
    quiet: bool = False
    """If True, this package adds no noise, so that the run shows how an update is clipped."""
    answering: int = -1
    """Partition of the client that answers."""
    _kind: str = ""
    _target: int = -1
    _unit: int | None = None

    def patches(self) -> list[Patch]:
        """Return the functions of this package to replace, so that clients do not learn."""
        noises = ("add_gaussian", "gaussian", "add_discrete_gaussian") if self.quiet else ()
        return [
            (
                upload,
                "result_hiding_failures",
                lambda run, work: run(self.keep_from_learning(work)),
            ),
            (upload, "protected", self._protected),
            *((NoiseSource, name, partial(_without_noise, name)) for name in noises),
        ]

    def begin(self, kind: str, *, target: int) -> None:
        """Begin a batch of messages of one kind; ``target`` is the changed client's partition."""
        self._kind, self._target = kind, target

    def answer(self, message: Message) -> Message:
        """Answer in place of the app's function."""
        category = category_of(message)
        content = deepcopy(self.template[category])
        if category == TRAIN:
            # Messages that only look like training, such as a rehearsal, are answered unchanged.
            change = self.current_change if self._kind == TRAIN else ""
            if change == "raise":
                raise RuntimeError("the check makes this client fail on purpose")
            for name, record in content.array_records.items():
                if (received := received_like(record, message.content)) is not None:
                    content[name] = _moved(received, change)
            if change == "heavy":
                for metrics in content.metric_records.values():
                    for name, value in metrics.items():
                        if isinstance(value, int | float):
                            metrics[name] = value * HEAVY
        return Message(content, reply_to=message)

    def changed_reply(self, message: Message, reply: Message) -> Message:
        """Return the reply of a client of this package, or NaN or an error in its place.

        `_protected` makes all other changes, such as a huge update, because the check cannot
        replace the training function of a client of this package.
        """
        change = self.current_change
        if self._kind != TRAIN or change not in ("nan", "raise"):
            return reply
        if change == "raise" or not reply.has_content():
            return Message(Error(code=CLIENT_APP_RAISED, reason=""), reply_to=message)
        content = reply.content.copy()
        for name, record in content.array_records.items():
            content[name] = _moved(record, change)
        return Message(content, reply_to=message)

    def _protected(
        self, protect: Any, update: Any, received: Any, protection: Protection, noise: NoiseSource
    ) -> Any:
        """Protect a public update where a client of this package would protect its own.

        The client's own update stays if the noise is inside the training, or if the upload is a sum
        over privacy units. `keep_from_learning` has then changed the records or the training.
        """
        if not protection.hides_failures or not isinstance(update, Mapping):
            return protect(update, received, protection, noise)
        numbers = {name: np.asarray(part) for name, part in update.items()}
        start = {name: np.zeros_like(part) for name, part in numbers.items()}
        if protection.bounds_models:
            start |= {name: np.asarray(received[name]) for name in numbers.keys() & received.keys()}
        moved = moved_arrays(start, self.current_change)
        public = {
            name: torch.as_tensor(moved[name]) if torch.is_tensor(part) else moved[name]
            for name, part in update.items()
        }
        return protect(public, received, protection, noise)

    def keep_from_learning(self, work: ClientWork) -> ClientWork:
        """Return a client's work, changed by the first of these rules that fits.

        * In a run that shows one unit's influence: one huge step on the records of one unit.
        * The client protects its whole upload: no data.
        * The client adds noise in each local step: a tiny learning rate. In a quiet run, one step
          with the usual learning rate; a huge first record then makes a huge update.
        """
        protection, phase = work.protection, work.method.upload_phase
        if self.shows_unit(protection):
            return self._limit_to_one_unit(work)
        if protection.hides_failures:
            return replace(work, data=NO_DATA)
        if not isinstance(protection, ClipSteps) or phase is None:
            return work
        return self._limit_to_one_step(work, phase) if self.quiet else _with_slow_steps(work, phase)

    def shows_unit(self, protection: Protection) -> bool:
        """Return True if one unit makes a huge update, to show how far this moves the result.

        Several clients may hold records of the unit.
        """
        return protection.of_units and self.quiet and self.planned_change in _HUGE_CHANGES

    def _limit_to_one_step(self, work: ClientWork, phase: str) -> ClientWork:
        """Return work with a single local step; in a huge change, its first record is huge."""
        training, data = work.training[phase], work.data
        size = min(training.batch_size, len(data.train))
        examples = data.train.subset(range(size))
        if self.current_change in _HUGE_CHANGES:
            features = trees.mapped(_with_huge_record, examples.features)
            examples = replace(examples, features=features)
        training = replace(training, steps=1, batch_size=size)
        return replace(_with_one_phase(work, phase, training), data=replace(data, train=examples))

    def _limit_to_one_unit(self, work: ClientWork) -> ClientWork:
        """Return work that takes a huge step on one unit's records; all clients use this unit."""
        data = work.data
        if not isinstance(data, SiloData) or not len(data.owners):
            return work
        if self._unit is None:
            self._unit = int(data.owners[0])
        rows = np.flatnonzero(data.owners.cpu().numpy() == self._unit)
        data = replace(data, train=data.train.subset(rows), owners=data.owners[rows])
        phases = {
            name: replace(t, steps=1, learning_rate=t.learning_rate * HUGE, tolerance=0.0)
            for name, t in work.training.items()
        }
        return replace(work, data=data, training=phases)

    @property
    def current_change(self) -> Change:
        """The misbehaviour of the client that answers; "" unless it is the target."""
        return self.planned_change if self.answering == self._target else ""


def category_of(message: Message) -> str:
    """Return the category of a message's type, such as "train"."""
    return message.metadata.message_type.partition(".")[0]


def received_like(record: ArrayRecord, content: RecordDict) -> ArrayRecord | None:
    """Return the array record of ``content`` with the same names and shapes, if there is one."""
    shapes = {key: tuple(array.shape) for key, array in record.items()}
    for received in content.array_records.values():
        if shapes == {key: tuple(array.shape) for key, array in received.items()}:
            return received
    return None


def _with_slow_steps(work: ClientWork, phase: str) -> ClientWork:
    """Return work whose local steps are so small that only their noise shows."""
    training = work.training[phase]
    slow = replace(training, learning_rate=training.learning_rate * _SLOW)
    return _with_one_phase(work, phase, slow)


def _with_one_phase(work: ClientWork, phase: str, training: LocalTraining) -> ClientWork:
    """Return work that trains in one phase only."""
    skipped = {name: replace(t, epochs=0, steps=None) for name, t in work.training.items()}
    return replace(work, training={**skipped, phase: training})


def _moved(record: ArrayRecord, change: Change) -> ArrayRecord:
    moved = moved_arrays({key: array.numpy() for key, array in record.items()}, change)
    return ArrayRecord({key: Array(np.asarray(array)) for key, array in moved.items()})


def _without_noise(name: str, add: Any, source: NoiseSource, value: Any, *_: Any, **__: Any) -> Any:
    return add(source, value, 0.0) if name == "gaussian" else dict(value)


def _with_huge_record(part: torch.Tensor) -> torch.Tensor:
    """Return a copy of features; the floating-point features of the first record are huge."""
    part = part.clone()
    if part.is_floating_point():
        part[0] = HUGE * torch.where(part[0] == 0, 1, part[0])
    return part


def moved_arrays(arrays: Mapping[str, np.ndarray], change: Change) -> dict[str, np.ndarray]:
    """Return arrays plus a public update: `held_step`, unless ``change`` names another one."""
    size = sum(array.size for array in arrays.values() if array.dtype.kind == "f")
    move = np.zeros(size) if change == "zero" or not size else held_step(size)
    if change in _HUGE_CHANGES:
        move = HUGE * direction(size)
    elif change == "nan":
        move = np.full(size, np.nan)
    start, moved = 0, {}
    for key, array in arrays.items():
        if array.dtype.kind == "f":
            part = move[start : start + array.size].reshape(array.shape)
            start += array.size
            array = np.asarray(array + part, array.dtype)
        moved[key] = array
    return moved
