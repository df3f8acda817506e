"""A durable account of releases: append-only, fsynced, hash-chained.

`Ledger.reserve` writes the spend to disk *before* the release happens, and a reserved spend stays
spent whatever follows. After a crash at any byte the ledger may count a release that did not
happen; it never misses one that did.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_ext.checks import is_number, require_delta
from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.privacy.accounting.accountant import Accountant, privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.loss import PrivacyLoss
from flower_ext.privacy.guarantee import epsilon_text

GENESIS = "0" * 64
"""Hash that the first line names as its predecessor's."""
_OWN_NAMES = {"seq", "kind", "round", "identity", "release", "reason", "prev", "hash"}


class BudgetExhausted(FlowerExtError, RuntimeError):
    """The next release would exceed the budget; nothing was written and nothing may be released."""


class LedgerCorrupt(FlowerExtError, RuntimeError):
    """A line was changed, removed from the middle, or reordered.

    Whole lines removed from the end leave no trace in the file, so keep the last hash elsewhere.
    """


class LedgerLocked(FlowerExtError, RuntimeError):
    """Another run is writing to this ledger."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Spend at most ``epsilon`` at ``delta``.

    Parameters
    ----------
    epsilon, delta : float
    ledger : Path, optional
        Account that all runs on one population share. The budget then holds for all of them
        together (see `privacy.shared_ledger`).
    """

    epsilon: float
    delta: float
    ledger: Path | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.epsilon) and self.epsilon > 0):
            raise InvalidValue(f"epsilon={self.epsilon!r}: expected a number > 0")
        require_delta(self.delta)


class Reservation:
    """A reserved release; its notes are written when it closes."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self.discarded: str | None = None

    def note(self, **facts: Any) -> None:
        """Keep facts with the release, such as the number of replies.

        Raises
        ------
        ValueError
            A fact has a name that the ledger itself uses.
        """
        if taken := _OWN_NAMES & set(facts):
            raise InvalidValue(
                f"facts named {sorted(taken)}: the ledger itself uses these names; choose others"
            )
        self.notes.update(facts)

    def discard(self, reason: str) -> None:
        """Record that nothing was released. The spend stays, because clients may have uploaded."""
        self.discarded = reason


class Ledger:
    """The releases of one run, one JSON object per line.

    Parameters
    ----------
    path : Path
        Created if it does not exist; otherwise verified and continued.
    budget : Budget, optional
        `reserve` refuses a release that would exceed it.
    accountant : {"pld", "rdp"}

    Raises
    ------
    LedgerLocked
        Another process has the ledger open.
    LedgerCorrupt
        The hash chain is broken; the message names the file and the line.
    """

    def __init__(
        self, path: Path, *, budget: Budget | None = None, accountant: Accountant = "pld"
    ) -> None:
        if budget is not None and budget.ledger is not None:
            raise InvalidValue(
                f"budget.ledger={str(budget.ledger)!r}: expected None, as this is the account of "
                "one run; for an account of several runs give the strategy Budget(ledger=...)"
            )
        self.path = Path(path)
        self.budget = budget
        self.accountant: Accountant = accountant
        self._unusable: str | None = None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._lock()
            entries = self._recover()
        except BaseException:
            os.close(self._file)
            raise
        self._next = len(entries)
        self._last_hash = entries[-1]["hash"] if entries else GENESIS
        earlier = [
            (entry["round"], entry.get("identity"), Release.from_dict(entry["release"]))
            for entry in entries
            if entry["kind"] == "reserve"
        ]
        self._reserved = [release for *_, release in earlier]
        self._repeatable = {one for one in earlier if one[1] is not None}
        sync_directory(self.path.parent)

    @contextmanager
    def reserve(
        self, release: Release, *, round: int, identity: int | None = None
    ) -> Iterator[Reservation]:
        """Write a spend durably, then let the body of the ``with`` block release.

        Parameters
        ----------
        release : Release
        round : int
        identity : int, optional
            Identifies everything that determines the release, where a repetition would be the same
            bit for bit. The first repetition after this ledger was reopened reveals nothing new; it
            is noted without being counted. None under secure noise, which makes every release new.

        Raises
        ------
        BudgetExhausted
            The release would exceed the budget; nothing was written.
        RuntimeError
            The ledger is closed or could not be written; nothing may be released.
        """
        self._check_usable()
        entry = {"round": round, **({} if identity is None else {"identity": identity})}
        if (again := (round, identity, release)) in self._repeatable:
            self._append("repeat", entry)
            self._repeatable.remove(again)
        else:
            self._check_budget(release, round)
            self._append("reserve", {**entry, "release": release.to_dict()})
            self._reserved.append(release)
        reservation = Reservation()
        try:
            yield reservation
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._append("discard", {"round": round, "reason": reason, **reservation.notes})
            raise
        if reservation.discarded is not None:
            reason = reservation.discarded
            self._append("discard", {"round": round, "reason": reason, **reservation.notes})
        else:
            self._append("commit", {"round": round, **reservation.notes})

    @property
    def releases(self) -> int:
        """Number of releases that were reserved."""
        return len(self._reserved)

    def check_holds(self, releases: int) -> None:
        """Refuse a ledger that lacks some of the releases that the run made.

        Raises
        ------
        LedgerCorrupt
            The message says how many are missing.
        """
        if self.releases < releases:
            raise LedgerCorrupt(
                f"{self.path} holds {self.releases} releases of a run that made {releases}: some "
                "lines and the spend in them are missing; restore the file from a copy, or begin a "
                "new run"
            )

    def spent(self, delta: float) -> PrivacyLoss:
        """Return (ε, δ) of everything reserved so far."""
        return privacy_loss_of(self._reserved, delta=delta, accountant=self.accountant)

    def close(self) -> None:
        """Release the lock; afterwards nothing can be reserved."""
        if self._unusable == "was closed":
            self._check_usable()
        self._unusable = "was closed"
        os.close(self._file)

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(f"{self.path} {self._unusable}; open it again")

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Return a ledger's verified entries without locking it; a torn last line is left out.

        Raises
        ------
        LedgerCorrupt
            The hash chain is broken; the message names the file and the line.
        """
        return parse_chain(Path(path).read_bytes(), path)[0]

    def _check_budget(self, release: Release, round: int) -> None:
        if self.budget is None:
            return
        after = [*self._reserved, release]
        delta = self.budget.delta
        epsilon = privacy_loss_of(after, delta=delta, accountant=self.accountant).epsilon
        if epsilon > self.budget.epsilon:
            raise BudgetExhausted(
                f"round {round} would bring the spend to ε = {epsilon_text(epsilon)} at δ = "
                f"{delta:.3g}, above the budget of {self.budget.epsilon:g}; "
                f"{self.releases} releases are on the ledger"
            )

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        entry, line = chained(self._next, kind, facts, self._last_hash)
        self._check_usable()
        try:
            write_durably(self._file, line)
        except OSError as error:
            self._unusable = "could not be written"
            raise OSError(
                error.errno,
                f"{error.strerror or error}: the ledger cannot be written, so the run releases "
                "nothing more; free space or restore access, then resume the run",
                str(self.path),
            ) from error
        self._next += 1
        self._last_hash = entry["hash"]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerLocked(
                f"{self.path} is in use by another run; give each run its own directory"
            ) from None

    def _recover(self) -> list[dict[str, Any]]:
        """Return verified entries. A torn last line was not durable, so its release never began."""
        entries, whole = parse_chain(self.path.read_bytes(), self.path)
        if os.fstat(self._file).st_size > whole:
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        return entries


def chained(
    number: int, kind: str, facts: dict[str, Any], previous: str
) -> tuple[dict[str, Any], bytes]:
    """Return a new entry that follows the entry with hash ``previous``, and its line of JSON."""
    entry = {"seq": number, "kind": kind, **facts, "prev": previous}
    entry["hash"] = _digest(entry)
    return entry, (json.dumps(entry, sort_keys=True) + "\n").encode()


def _digest(entry: dict[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_chain(content: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the entries of all whole lines of a ledger at ``path``, and their size in bytes.

    Raises
    ------
    LedgerCorrupt
        The hash chain is broken; the message names the file and the line.
    """
    whole = content.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    previous = GENESIS
    for number, line in enumerate(content[:whole].splitlines()):
        try:
            entry = json.loads(line)
            sound = (
                entry["hash"] == _digest(entry)
                and entry["prev"] == previous
                and entry["seq"] == number
            )
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise LedgerCorrupt(
                f"{path}: line {number + 1} was changed, or a line before it was removed; "
                "restore the file from a copy, or begin a new run"
            )
        entries.append(entry)
        previous = entry["hash"]
    return entries, whole


def write_durably(file: int, line: bytes) -> None:
    """Write a whole line and wait until it is on the disk."""
    while line:
        line = line[os.write(file, line) :]
    os.fsync(file)


def sync_directory(folder: Path) -> None:
    """Make the name of a new file in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
