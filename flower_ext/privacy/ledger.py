"""A durable account of releases: append-only, fsynced, hash-chained.

`Ledger.reserve` writes the spend to disk *before* the release happens, and a reserved spend stays
spent, whatever follows. After a crash at any byte, the ledger may count a release that did not
happen. It never misses a release that did happen.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_ext.checks import AboveZero, Checked, FractionBelowOne, require_delta
from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.files import InUse, sync_to_disk
from flower_ext.privacy.account_entries import COMMIT, DISCARD, REPEAT, RESERVE
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.guarantee import epsilon_text

GENESIS = "0" * 64
"""Field ``prev`` of the first line; in every other line, the hash of the line before it."""


class BudgetExhausted(FlowerExtError, RuntimeError):
    """The next release would exceed the budget; nothing was written and nothing may be released."""


class LedgerCorrupt(FlowerExtError, RuntimeError):
    """A line was changed, removed from the middle, or reordered.

    Whole lines removed from the end leave no trace in the file, so keep the last hash elsewhere.
    """


@dataclass(frozen=True, kw_only=True)
class Budget(Checked):
    """Spend at most ``epsilon`` at ``delta``.

    Parameters
    ----------
    epsilon, delta : float
        δ may be 0 for plans that guarantee a pure ε. Such a guarantee also holds at every larger δ.
    ledger : Path, optional
        Account that all runs on one population share. The budget then holds for all of them
        together (see `privacy.shared_ledger`).
    """

    epsilon: AboveZero
    delta: FractionBelowOne
    ledger: Path | None = None


class LedgerFile:
    """A file of JSON lines, locked until `close` so that no other process can write to it.

    ``entries`` are the contents of all lines. If another process holds the lock and ``wait`` is
    False, the error is `InUse`. If the hash chain is broken, the error is `LedgerCorrupt`.
    """

    def __init__(self, path: Path, *, wait: bool) -> None:
        self.path = Path(path)
        self._is_closed = self._has_failed = False
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Read only under the lock: another process might be in the middle of a line.
            self.entries, whole = _parse(self.path)
            if os.fstat(self._file).st_size > whole:
                # An incomplete last line was not durable, so its release never began.
                os.ftruncate(self._file, whole)
                os.fsync(self._file)
            sync_to_disk(self.path.parent)  # makes the name of a new file durable
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise InUse(
                    f"{self.path} is in use by another run; give each run its own directory"
                ) from None
            raise

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a line, and wait for the disk; after an `OSError`, nothing may be released."""
        self._check_usable()
        # Each line holds the hash of the line before, so no earlier line can change unnoticed.
        previous = self.entries[-1]["hash"] if self.entries else GENESIS
        entry = {**values, "seq": len(self.entries), "kind": kind, "prev": previous}
        entry["hash"] = _digest(entry)
        line = (json.dumps(entry, sort_keys=True) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            self._has_failed = True
            raise OSError(
                error.errno,
                f"{error.strerror or error}: the ledger cannot be written, so the run releases "
                "nothing more; free space or restore access, then resume the run",
                str(self.path),
            ) from error
        self.entries.append(entry)

    def close(self) -> None:
        """Release the lock; afterwards nothing can be written."""
        if self._is_closed:
            self._check_usable()
        self._is_closed = True
        os.close(self._file)

    def _check_usable(self) -> None:
        if self._is_closed or self._has_failed:
            reason = "was closed" if self._is_closed else "could not be written"
            raise RuntimeError(f"{self.path} {reason}; open it again")


class Reservation:
    """A reserved release. When its ``with`` block ends, the ledger writes its outcome and notes."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self.discarded: str | None = None

    def note(self, **notes: Any) -> None:
        """Add notes on the release, such as the number of replies."""
        self.notes.update(notes)

    def discard(self, reason: str) -> None:
        """Record that nothing was released. The spend stays, because clients may have uploaded."""
        self.discarded = reason


class Ledger(LedgerFile):
    """The releases of one run.

    Parameters
    ----------
    path : Path
        Created if it does not exist; otherwise verified and continued.
    budget : Budget, optional
        `reserve` refuses a release that would exceed it.

    Raises
    ------
    InUse, LedgerCorrupt
        As `LedgerFile`.
    """

    def __init__(self, path: Path, *, budget: Budget | None = None) -> None:
        if budget is not None and budget.ledger is not None:
            raise InvalidValue(
                f"budget.ledger={str(budget.ledger)!r}: expected None, because a Ledger counts one "
                "run; to count several runs together, pass this Budget to the strategy instead"
            )
        if budget is not None:
            require_delta(budget.delta)  # Gaussian noise has no finite ε at δ = 0
        super().__init__(path, wait=False)
        self.budget = budget
        earlier = [
            (entry["round"], entry.get("identity"), Release.from_dict(entry["release"]))
            for entry in self.entries
            if entry["kind"] == RESERVE
        ]
        self._reserved = [release for *_, release in earlier]
        self._repeatable = {one for one in earlier if one[1] is not None}

    @contextmanager
    def reserve(
        self, release: Release, *, server_round: int, identity: int | None = None
    ) -> Iterator[Reservation]:
        """Write a spend durably, then run the ``with`` block, which makes the release.

        Parameters
        ----------
        release : Release
        server_round : int
        identity : int, optional
            A number for a release with seeded noise, which a resumed run may repeat bit for bit.
            Two releases may have the same number only if all their bits are equal. Each release
            that the file held when the ledger was opened may be repeated once: the ledger does not
            count the repetition, because it reveals nothing new. Under secure noise, pass None,
            because every release is then new.

        Raises
        ------
        BudgetExhausted
            The release would exceed the budget; nothing was written.
        RuntimeError
            The ledger is closed or could not be written; nothing may be released.
        """
        self._check_usable()
        entry = {"round": server_round, **({} if identity is None else {"identity": identity})}
        if (again := (server_round, identity, release)) in self._repeatable:
            self.append(REPEAT, entry)
            self._repeatable.remove(again)
        else:
            # Refuse before writing: a written line counts as spent, even if nothing was released.
            if self.budget is not None:
                delta = self.budget.delta
                epsilon = privacy_loss_of([*self._reserved, release], delta=delta).epsilon
                if epsilon > self.budget.epsilon:
                    raise BudgetExhausted(
                        f"round {server_round} would bring the spend to ε = "
                        f"{epsilon_text(epsilon)} at δ = {delta:.3g}, above the budget of "
                        f"{self.budget.epsilon:g}; "
                        f"{self.releases} releases are on the ledger; end the run, or raise the "
                        "budget"
                    )
            self.append(RESERVE, {**entry, "release": release.to_dict()})
            self._reserved.append(release)
        reservation = Reservation()
        try:
            yield reservation
        except BaseException as error:
            reservation.discard(f"{type(error).__name__}: {error}")
            raise
        finally:
            closed = {"round": server_round, "notes": reservation.notes}
            if reservation.discarded is None:
                self.append(COMMIT, closed)
            else:
                self.append(DISCARD, {**closed, "reason": reservation.discarded})

    @property
    def releases(self) -> int:
        """Number of releases that were reserved."""
        return len(self._reserved)

    def check_holds(self, releases: int) -> None:
        """Raise `LedgerCorrupt` if the ledger lacks some of the ``releases`` that the run made."""
        if self.releases < releases:
            raise LedgerCorrupt(
                f"{self.path} holds {self.releases} releases of a run that made {releases}: some "
                "lines and the spend in them are missing; restore the file from a copy, or begin a "
                "new run"
            )

    def spent(self, delta: float) -> PrivacyLoss:
        """Return (ε, δ) of all releases reserved so far."""
        return privacy_loss_of(self._reserved, delta=delta)

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Return a ledger's verified entries, without a lock; ignore an incomplete last line.

        If the hash chain is broken, `LedgerCorrupt` names the file and the line.
        """
        return _parse(Path(path))[0]


def _digest(entry: dict[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the verified entries of all whole lines, and their size in bytes."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    previous = GENESIS
    for number, line in enumerate(content[:whole].splitlines()):
        try:
            entry = json.loads(line)
            is_sound = (entry["hash"], entry["prev"], entry["seq"]) == (
                _digest(entry),
                previous,
                number,
            )
        except (ValueError, KeyError, TypeError):
            is_sound = False
        if not is_sound:
            raise LedgerCorrupt(
                f"{path}: line {number + 1} was changed, or a line before it was removed; "
                "restore the file from a copy, or begin a new run"
            )
        entries.append(entry)
        previous = entry["hash"]
    return entries, whole
