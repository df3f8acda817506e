"""Files that a run needs to go on after its process ended, at whatever point that was.

``checkpoints/`` in the run directory holds the two last checkpoints, each of them the whole state
between two rounds, and ``asked.jsonl``, which says who was asked before anybody is. What is drawn
comes from the seed and the number of the round, so there is no generator to store.

A round that was asked for and never finished is done again. If it is the same one, bit for bit
(``repeats``), it counts once. Under secure noise it is another release: the one that was given up
counts for all whose data went into it, and training numbers go on after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any
from uuid import uuid4

from flower_ext.federation.arrays import Arrays
from flower_ext.federation.state.sealed import Damaged, Packed, pack, unpack
from flower_ext.privacy.participations import Participations
from flower_ext.runs import RunDirectory
from flower_ext.runs.files import append_line, sync_to_disk, whole_lines, write_whole

log = getLogger("flwr")

FOLDER, ASKED, MODEL = "checkpoints", "asked.jsonl", "model"
_METHOD = "method."
"""Prefix of the arrays that a method holds on the server."""
_KEPT = 2
EVALUATION = "evaluation"
"""Name in ``asked.jsonl`` of an evaluation's number."""


@dataclass(kw_only=True)
class RunState:
    """The whole state of a run between two rounds.

    Parameters
    ----------
    round : int
        The last one that is done; 0 before the first.
    model : Mapping[str, array]
        The part that clients share.
    participations : Participations
        The units whose data went into the rounds so far.
    num_examples : Mapping[int, int]
        By partition, where clients told.
    client_metrics : Mapping[int, Mapping[str, float]]
        Newest scores by partition.
    remembered : Mapping[int, int]
        By partition, the training round whose memory the client has, as far as it answered.
    refusals : Sequence[str]
        Replies that were not used, and why.
    method : Mapping[str, Mapping[str, array]]
        What the method holds on the server, in named groups.
    """

    round: int = 0
    model: Arrays = field(default_factory=dict)
    participations: Participations = field(default_factory=Participations)
    num_examples: Mapping[int, int] = field(default_factory=dict)
    client_metrics: Mapping[int, dict[str, float]] = field(default_factory=dict)
    remembered: Mapping[int, int] = field(default_factory=dict)
    refusals: Sequence[str] = ()
    method: Mapping[str, Arrays] = field(default_factory=dict)


@dataclass
class Asked:
    """A training round that was asked for: whose data, from how many, and how many could be used.

    ``answered`` is None as long as nothing was made of the answers.
    """

    training: int
    participants: Sequence[int]
    asked: int
    answered: int | None = None

    @property
    def may_have_answered(self) -> int:
        """The number of uploads that somebody may have seen."""
        return self.asked if self.answered is None else self.answered


class Checkpoints:
    """The checkpoints of one run; none are written without a run directory.

    Parameters
    ----------
    run : RunDirectory, optional
    repeats : bool
        A round that is done again is the same one, bit for bit: nothing has to be on the disk
        before somebody is asked.
    """

    def __init__(self, run: RunDirectory | None, *, repeats: bool) -> None:
        self.run = run
        self.repeats = repeats
        self.run_id = (run.id if run is not None else "") or uuid4().hex
        self.open: Asked | None = None
        """The round that was asked for, until its answers are counted."""

    # While the run goes on ----------------------------------------------------------------

    def asked(self, asked: Asked) -> None:
        """Note, durably, who is about to be asked.

        Raises
        ------
        OSError
            It could not be written: nobody may be asked.
        """
        self.open = asked
        self._note(**vars(asked))
        if self.run is not None:
            self.run.accounted = False

    def evaluating(self, number: int) -> None:
        """Note, durably, that evaluation ``number`` is about to be asked for.

        Raises
        ------
        OSError
            It could not be written: nobody may be asked.
        """
        self._note(**{EVALUATION: number})

    def answered(self, number: int) -> None:
        """Note, durably, how many answers can be used, before anything is made of them.

        Raises
        ------
        OSError
            It could not be written: nothing may be made of them.
        """
        if self.open is not None:
            self.open.answered = number
            self._note(training=self.open.training, answered=number)
            self.open = None  # the strategy counts it now

    def save(self, state: RunState) -> None:
        """Write the state after a round; the checkpoint before it is kept as well.

        Raises
        ------
        OSError
            It could not be written; what was written before is still there.
        """
        if self.run is None:
            return
        own = {_METHOD + group: members for group, members in state.method.items()}
        packed = pack(_facts_of(state), {MODEL: state.model, **own})
        if not self.repeats and self.run.metrics_path.exists():
            sync_to_disk(self.run.metrics_path)
        folder = self._folder()
        write_whole(folder / f"{state.round}.checkpoint", packed, sync=not self.repeats)
        for old in self._rounds()[:-_KEPT]:
            (folder / f"{old}.checkpoint").unlink()

    # When it goes on ----------------------------------------------------------------------

    def newest(self) -> RunState | None:
        """Read the newest sound checkpoint; None where there never was one.

        Raises
        ------
        Damaged
            No checkpoint is sound.
        """
        damage: list[str] = []
        for number in reversed(self._rounds()):
            file = self._folder() / f"{number}.checkpoint"
            try:
                found = unpack(file.read_bytes())
            except Damaged as error:
                damage.append(f"{file}: {error}")
                log.warning("%s; the one before it is used", damage[-1])
            else:
                return _state_of(found)
        if damage:
            raise Damaged(f"no checkpoint can be used ({'; '.join(damage)}): begin a new run")
        return None

    def abandoned(self, *, after: int) -> list[Asked]:
        """Training rounds ``after`` those that are counted, which count although none was finished.

        None where rounds repeat: the same one, done again, counts once.
        """
        if self.repeats:
            return []
        file = self._folder() / ASKED
        lines = whole_lines(file)
        if file.exists():  # a torn last line was never durable, so nobody was asked
            write_whole(file, b"".join(line + b"\n" for line in lines))
        found: dict[int, Asked] = {}
        for facts in map(json.loads, lines):
            if EVALUATION in facts:
                continue
            if "asked" in facts:
                found[facts["training"]] = Asked(**facts)
            else:
                found[facts["training"]].answered = facts["answered"]
        return [one for number, one in sorted(found.items()) if number > after]

    def evaluations(self) -> int:
        """Return the number of the last evaluation that was asked for; 0 where rounds repeat."""
        if self.repeats:
            return 0
        noted = map(json.loads, whole_lines(self._folder() / ASKED))
        return max((facts.get(EVALUATION, 0) for facts in noted), default=0)

    # Parts --------------------------------------------------------------------------------

    def _folder(self) -> Path:
        assert self.run is not None
        folder = self.run.path / FOLDER
        if not folder.exists():
            folder.mkdir(mode=0o700)
            sync_to_disk(self.run.path)
        return folder

    def _rounds(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder().glob("[0-9]*.checkpoint"))

    def _note(self, **facts: Any) -> None:
        if self.run is not None and not self.repeats:
            append_line(self._folder() / ASKED, json.dumps(facts).encode())


def _facts_of(state: RunState) -> dict[str, Any]:
    return {
        "round": state.round,
        "participations": state.participations.to_dict(),
        "num_examples": list(state.num_examples.items()),
        "client_metrics": list(state.client_metrics.items()),
        "remembered": list(state.remembered.items()),
        "refusals": list(state.refusals),
    }


def _state_of(packed: Packed) -> RunState:
    facts, arrays = packed.facts, dict(packed.arrays)
    return RunState(
        round=int(facts["round"]),
        model=arrays.pop(MODEL),
        participations=Participations.from_dict(facts["participations"]),
        num_examples=dict(facts["num_examples"]),
        client_metrics=dict(facts["client_metrics"]),
        remembered=dict(facts["remembered"]),
        refusals=facts["refusals"],
        method={
            name.removeprefix(_METHOD): group
            for name, group in arrays.items()
            if name.startswith(_METHOD)
        },
    )
