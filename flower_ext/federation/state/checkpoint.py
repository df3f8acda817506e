"""What a run needs to go on after its process ended, at whatever point that was.

``checkpoints/`` in the run directory holds the two last checkpoints, each of them the whole state
between two rounds, and ``asked.jsonl``, which says who was asked before anybody is. What is drawn
comes from the seed and the number of the round, so there is no generator to store.

A round that was asked for and never finished is done again. If it is the same one, bit for bit
(`FederatedStrategy.repeats`), it counts once. Under secure noise it is another release: the one
that was given up counts for all whose data went into it, and training numbers go on after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_ext.federation import records
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.state.sealed import Damaged, Packed, pack, unpack
from flower_ext.privacy import LedgerCorrupt
from flower_ext.privacy.participations import Participations
from flower_ext.runs import RunDirectory
from flower_ext.runs.files import (
    append_line,
    sync_to_disk,
    whole_lines,
    write_whole,
)

if TYPE_CHECKING:
    from flower_ext.federation.strategy import FederatedStrategy

log = getLogger("flwr")

FOLDER, ASKED, MODEL = "checkpoints", "asked.jsonl", "model"
_OWN = "method."
"""Prefix of the arrays that a method holds on the server."""
_KEPT = 2


@dataclass
class Asked:
    """A training round that was asked for: whose data, from how many, and how many could be used.

    ``answered`` is None as long as nothing was made of the answers.
    """

    training: int
    participants: Sequence[int]
    asked: int
    answered: int | None = None


class Checkpoints:
    """The checkpoints of one run; none are written without a run directory."""

    def __init__(self, run: RunDirectory | None) -> None:
        self.run = run
        self.run_id = (run.id if run is not None else "") or uuid4().hex
        self._open: Asked | None = None

    # While the run goes on ----------------------------------------------------------------

    def asked(self, strategy: FederatedStrategy) -> None:
        """Note, durably, who is about to be asked.

        Raises
        ------
        OSError
            It could not be written: nobody may be asked.
        """
        self._open = Asked(
            training=strategy.next_training,
            participants=list(strategy.participants),
            asked=strategy.num_asked,
        )
        self._note(strategy, **vars(self._open))
        if self.run is not None:
            self.run.accounted = False

    def answered(self, strategy: FederatedStrategy, number: int) -> None:
        """Note, durably, how many answers can be used, before anything is made of them.

        Raises
        ------
        OSError
            It could not be written: nothing may be made of them.
        """
        if self._open is not None:
            self._open.answered = number
            self._note(strategy, training=self._open.training, answered=number)
            self._open = None  # the strategy counts it now

    def save(self, strategy: FederatedStrategy, server_round: int, arrays: ArrayRecord) -> None:
        """Write the state after a round; the checkpoint before it is kept as well.

        Raises
        ------
        OSError
            It could not be written; what was written before is still there.
        """
        if self.run is None:
            return
        facts = {"round": server_round, **_facts_of(strategy)}
        own = {_OWN + group: members for group, members in strategy.state().items()}
        packed = pack(facts, {MODEL: records.to_arrays(arrays), **own})
        if not strategy.repeats and self.run.metrics_path.exists():
            sync_to_disk(self.run.metrics_path)
        folder = self._folder()
        write_whole(folder / f"{server_round}.checkpoint", packed, sync=not strategy.repeats)
        for old in self._rounds()[:-_KEPT]:
            (folder / f"{old}.checkpoint").unlink()

    @contextmanager
    def guarding(self, strategy: FederatedStrategy) -> Iterator[None]:
        """If the block fails, leave a guarantee that covers what was asked for until then."""
        try:
            yield
        except BaseException as error:
            try:
                self._give_up(strategy, f"{type(error).__name__}: {error}")
            except Exception:  # what ended the run is what counts
                log.exception("no guarantee could be written")
            raise

    def save_guarantees(self, strategy: FederatedStrategy) -> None:
        """Write ``guarantee.json``: what holds after the rounds so far."""
        if self.run is not None and (guarantees := strategy.guarantees()):
            self.run.save_guarantees(guarantees)

    # When it goes on ----------------------------------------------------------------------

    def resume(
        self, strategy: FederatedStrategy, initial: ArrayRecord, grid: Grid, num_rounds: int
    ) -> tuple[ArrayRecord, int]:
        """(model, rounds done) from which to go on; (``initial``, 0) where nothing was done.

        Raises
        ------
        Damaged
            No checkpoint is sound.
        ValueError
            The model is another one.
        FederationNotReady
            Clients have lost the memory that the method needs.
        LedgerCorrupt
            The ledger lacks releases that were made.
        """
        if self.run is None or not self.run.resumed:
            return initial, 0
        found = self._newest()
        done = 0 if found is None else int(found.facts["round"])
        arrays, strangers = initial, False
        if found is not None:
            arrays = _same_model(found.arrays[MODEL], initial)
            _take_facts(strategy, found.facts)
            if done < num_rounds:  # else nobody is needed any more
                strangers = not strategy.reconnect(grid, arrays)
            own = {n: a for n, a in found.arrays.items() if n.startswith(_OWN)}
            strategy.restore({name.removeprefix(_OWN): group for name, group in own.items()})
        abandoned = [] if strategy.repeats else self._abandoned(strategy.participations)
        for one in abandoned:
            answered = one.asked if one.answered is None else one.answered
            strategy.count_abandoned(one.participants, answered, asked=one.asked)
        if strangers:
            strategy.participations.level(range(strategy.plan.sampling.population))
        self.save_guarantees(strategy)
        _check_ledger(strategy)
        if found is not None and done < num_rounds:
            self._check_memory(strategy, grid)
        self.run.forget_rounds(after=done)
        log.info(
            "resumed after round %d; %d training rounds were asked for and not finished",
            done,
            len(abandoned),
        )
        return arrays, done

    # Parts --------------------------------------------------------------------------------

    def _check_memory(self, strategy: FederatedStrategy, grid: Grid) -> None:
        """Ask all clients whether they remember what they knew at the checkpoint."""
        if not strategy.client.keeps_memory:
            return
        known = ConfigRecord({"run": self.run_id, "number": strategy.participations.rounds})
        everyone = {partition: {records.ROUND: known} for partition in range(strategy.num_nodes)}
        told = strategy.ask_each(grid, everyone, _read_version)
        needed = strategy.remembered
        lost = [p for p, version in sorted(told.items()) if version < needed.get(p, 0)]
        if lost:
            raise FederationNotReady(
                f"partitions {lost[:10]}{' …' if len(lost) > 10 else ''} no longer have the memory "
                f"that {type(strategy).__name__} needs (partition {lost[0]} had it from training "
                f"round {needed[lost[0]]}, now from {told[lost[0]] or 'none'}): the run cannot go "
                "on. Memory outlives a process where SuperNodes, or a simulation's settings, name "
                "a state-folder; a method that keeps none says ClientMethod(keeps_memory=False)"
            )

    def _folder(self) -> Path:
        assert self.run is not None
        folder = self.run.path / FOLDER
        if not folder.exists():
            folder.mkdir(mode=0o700)
            sync_to_disk(self.run.path)
        return folder

    def _rounds(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder().glob("[0-9]*.checkpoint"))

    def _newest(self) -> Packed | None:
        """The newest sound checkpoint; None where there never was one."""
        damage: list[str] = []
        for number in reversed(self._rounds()):
            file = self._folder() / f"{number}.checkpoint"
            try:
                found = unpack(file.read_bytes())
            except Damaged as error:
                damage.append(f"{file}: {error}")
                log.warning("%s; the one before it is used", damage[-1])
            else:
                return found
        if damage:
            raise Damaged(f"no checkpoint can be used ({'; '.join(damage)}): begin a new run")
        return None

    def _note(self, strategy: FederatedStrategy, **facts: Any) -> None:
        if self.run is not None and not strategy.repeats:
            append_line(self._folder() / ASKED, json.dumps(facts).encode())

    def _abandoned(self, participations: Participations) -> list[Asked]:
        """Training rounds after those that are counted."""
        file = self._folder() / ASKED
        lines = whole_lines(file)
        if file.exists():  # a torn last line was never durable, so nobody was asked
            write_whole(file, b"".join(line + b"\n" for line in lines))
        found: dict[int, Asked] = {}
        for facts in map(json.loads, lines):
            if "asked" in facts:
                found[facts["training"]] = Asked(**facts)
            else:
                found[facts["training"]].answered = facts["answered"]
        return [one for number, one in sorted(found.items()) if number > participations.rounds]

    def _give_up(self, strategy: FederatedStrategy, reason: str) -> None:
        strategy.give_up(reason)
        if (one := self._open) is not None:
            answered = one.asked if one.answered is None else one.answered
            strategy.count_abandoned(one.participants, answered, asked=one.asked)
        self.save_guarantees(strategy)


def _check_ledger(strategy: FederatedStrategy) -> None:
    made, ledger = strategy.participations.rounds, strategy.ledger
    if ledger is not None and ledger.releases < made:
        raise LedgerCorrupt(
            f"{ledger.path} holds {ledger.releases} releases of a run that made {made}: lines are "
            "missing, and with them what was spent; put the ledger back, or begin a new run"
        )


def _facts_of(strategy: FederatedStrategy) -> dict[str, Any]:
    return {
        "participations": strategy.participations.to_dict(),
        "num_examples": list(strategy.num_examples.items()),
        "client_metrics": list(strategy.client_metrics.items()),
        "remembered": list(strategy.remembered.items()),
        "refusals": strategy.refusals,
    }


def _take_facts(strategy: FederatedStrategy, facts: dict[str, Any]) -> None:
    strategy.participations = Participations.from_dict(facts["participations"])
    strategy.num_examples = dict(facts["num_examples"])
    strategy.client_metrics = dict(facts["client_metrics"])
    strategy.remembered = dict(facts["remembered"])
    strategy.refusals.extend(facts["refusals"])


def _same_model(kept: records.Arrays, initial: ArrayRecord) -> ArrayRecord:
    shapes = {name: (array.shape, str(array.dtype)) for name, array in kept.items()}
    expected = {name: (tuple(array.shape), array.dtype) for name, array in initial.items()}
    if shapes != expected:
        raise ValueError(
            f"the checkpoint holds another model than the one that starts: arrays {sorted(shapes)}"
            f", expected {sorted(expected)} in the same shapes and types"
        )
    return records.to_record(kept)


def _read_version(reply: Message) -> int:
    told = records.read_answer(reply).get("version")
    if told is None or told.shape or not np.issubdtype(told.dtype, np.integer) or told < 0:
        raise records.RefusedReply("'version': expected the number of a training round")
    return int(told)
