"""Files that a run needs to resume after its process ended at any point.

``checkpoints/`` in the run directory holds the last two checkpoints and ``begun.jsonl``. A
checkpoint is the whole state between two rounds. ``begun.jsonl`` records the cohort of each round
before the server asks it. Random draws follow from the seed and the number of the round, so no
generator needs to be stored.

A resumed run repeats a round that was not finished. If the second attempt equals the first, bit for
bit (``repeats``), the round counts once. Under secure noise, the second attempt is another release,
so both attempts count. Each unit whose data the first attempt used has then taken part in one round
more, and the second attempt gets the next round number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any
from uuid import uuid4

from flower_ext.federation.messages.records import Arrays
from flower_ext.federation.storage.folder import Damaged, Stored, deserialised, serialised
from flower_ext.files import append_line, sync_to_disk, whole_lines, write_whole
from flower_ext.runs import RunWriter

log = getLogger("flwr")

FOLDER, BEGUN = "checkpoints", "begun.jsonl"
_KEPT = 2
QUERY = "query"
"""Key of the entries in ``begun.jsonl`` that record a query, not a training round."""


@dataclass
class BegunRound:
    """A training round that the server began: its number, and the units whose data it uses.

    ``needed`` is how many uploads carry all the noise of the plan (`UploadCounts.needed`).
    ``uploads`` is how many uploads of honest clients are in the sum (`UploadCounts.honest`), or
    None as long as this is unknown.
    """

    training_round: int
    units: Sequence[int]
    needed: int
    uploads: int | None = None


class Checkpoints:
    """The checkpoints of one run. Without a run directory, no method writes a file.

    ``repeats`` means that a repeated round equals the first attempt, bit for bit. The server then
    asks clients without first recording the round on disk.
    """

    def __init__(self, directory: RunWriter | None, *, repeats: bool) -> None:
        self.directory = directory
        self.repeats = repeats
        self.run_id = (directory.id if directory is not None else "") or uuid4().hex
        self.open: BegunRound | None = None
        """The round that began and whose uploads are not counted yet; None if there is none."""
        self.withdrawn = frozenset[int]()
        """The units that have withdrawn, whose uploads the next checkpoint does not hold."""
        self._left_out = frozenset[int]()

    def begin(self, begun: BegunRound) -> None:
        """Write to disk which units' data the next training round will use.

        After an OSError, the server must not ask any client.
        """
        self.open = begun
        self._note(
            training=begun.training_round,
            units=begun.units,
            needed=begun.needed,
            uploads=begun.uploads,
        )
        if self.directory is not None:
            self.directory.accounted = False

    def begin_query(self, query: str, number: int) -> None:
        """Write to disk that the server is about to ask a query for the ``number``-th time."""
        self._note(**{QUERY: query, "number": number})

    def finish(self, uploads: int) -> None:
        """Write to disk the number of uploads from honest clients in the round's sum.

        Call this before the server uses the sum; after an OSError, the server must not use it.
        """
        if self.open is not None:
            self.open.uploads = uploads
            self._note(training=self.open.training_round, uploads=uploads)
            self.open = None  # the caller now counts the round's participations

    def save(
        self, server_round: int, values: Mapping[str, Any], groups: Mapping[str, Arrays]
    ) -> None:
        """Write a checkpoint of the state after a round.

        Keep the previous checkpoint, unless it may hold uploads of a unit that withdrew since.
        """
        if self.directory is None:
            return
        if not self.repeats and self.directory.metrics_path.exists():
            sync_to_disk(self.directory.metrics_path)
        folder = self._folder()
        file = folder / f"{server_round}.checkpoint"
        write_whole(file, serialised(values, groups), sync=not self.repeats)
        kept = _KEPT if self.withdrawn == self._left_out else 1
        for old in self._rounds()[:-kept]:
            (folder / f"{old}.checkpoint").unlink()
        self._left_out = self.withdrawn

    def newest(self) -> Stored | None:
        """Read the newest intact checkpoint; return None if there never was one."""
        damage: list[str] = []
        for number in reversed(self._rounds()):
            file = self._folder() / f"{number}.checkpoint"
            try:
                return deserialised(file.read_bytes())
            except Damaged as error:
                damage.append(f"{file}: {error}")
                log.warning("%s; the run continues from an earlier checkpoint", damage[-1])
        if damage:
            raise Damaged(f"no checkpoint is intact: begin a new run ({'; '.join(damage)})")
        return None

    def abandoned(self, *, after: int) -> list[BegunRound]:
        """Return the training rounds with numbers above ``after`` that the server began.

        A resumed run repeats these rounds, but their first attempts cost privacy as well. The list
        is empty if rounds repeat bit for bit, because a repeated round then counts once.
        """
        if self.repeats:
            return []
        file = self._folder() / BEGUN
        lines = whole_lines(file)
        if file.exists():  # drop a torn last line: no client was asked before it was whole
            write_whole(file, b"".join(line + b"\n" for line in lines))
        abandoned: dict[int, BegunRound] = {}
        for entry in map(json.loads, lines):
            training_round = entry.pop("training", None)
            if "units" in entry:
                abandoned[training_round] = BegunRound(training_round, **entry)
            elif "uploads" in entry:
                abandoned[training_round].uploads = entry["uploads"]
        return [begun for number, begun in sorted(abandoned.items()) if number > after]

    def times_asked(self, query: str) -> int:
        """Return how often the server asked a query; 0 if rounds repeat bit for bit (`repeats`)."""
        if self.repeats:
            return 0
        noted = map(json.loads, whole_lines(self._folder() / BEGUN))
        return max((e["number"] for e in noted if e.get(QUERY) == query), default=0)

    def _folder(self) -> Path:
        assert self.directory is not None
        folder = self.directory.path / FOLDER
        if not folder.exists():
            folder.mkdir(mode=0o700)
            sync_to_disk(self.directory.path)
        return folder

    def _rounds(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder().glob("[0-9]*.checkpoint"))

    def _note(self, **entries: Any) -> None:
        if self.directory is not None and not self.repeats:
            append_line(self._folder() / BEGUN, json.dumps(entries).encode())
