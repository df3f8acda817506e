"""The entries of a round, which the server sends to clients together with the model.

They are in the record `records.ROUND` of a message. In a message to a ClientApp of another project,
they are among the settings for this package's mods (see `for_mods`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any

from flwr.app import ConfigRecord

from flower_ext.checks import Checked, Count, CountOrZero, Flag, Rule
from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    ObjectivePerturbation,
    OutputPerturbation,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
    Unprotected,
)

KIND, SEEDED = "protection", "seeded-noise"
_KINDS: Mapping[str, type[Protection]] = {
    kind.__name__: kind
    for kind in (
        ClipAndNoise,
        OutputPerturbation,
        ClipSteps,
        ObjectivePerturbation,
        ProtectedByTraining,
        ProtectedByServer,
        Unprotected,
    )
}
"""The kinds of protection that a message may ask for."""
_NAME = Rule("a string", lambda value: type(value) is str)
_USERS = Rule(
    "integers, the users' numbers",
    lambda users: isinstance(users, list | tuple) and all(type(user) is int for user in users),
)


@dataclass(frozen=True, kw_only=True)
class RoundEntries(Checked):
    """Entries of a round, among them the entries of its protection.

    An entry has the name of its field, with hyphens. A message leaves out entries that have their
    default. It names the class of the protection, which checks the entries of its own fields.

    Parameters
    ----------
    number : int
        Number of the training round. An evaluation has the number of the last one.
    seed : int
        Seed of the run; 0 if the run has none.
    run : str
        Name of the run, under which clients keep memory; empty if the server sends none.
    diagnostics, report_size, training_loss : bool
        True if a client reports, without noise, the norm of its update, its number of training
        examples, or the loss on its training examples.
    remembered : int, optional
        The last round whose reply from this client the server used; 0 if there is none. Only
        clients that may have to forget get this entry.
    query : int, optional
        Number of this answer to the query in the message.
    withdrawn : Sequence[int]
        Users whose records a silo leaves out.
    protection : Protection
        The mechanism that a client applies to its upload.
    seeded_noise : bool
        True if the client draws its noise from the run's seed.

    Raises
    ------
    InvalidValue
        A value is of another type or out of range.
    """

    number: Count
    seed: CountOrZero
    run: Annotated[str, _NAME] = ""
    diagnostics: Flag = False
    report_size: Flag = False
    training_loss: Flag = False
    remembered: CountOrZero | None = None
    query: Count | None = None
    withdrawn: Annotated[Sequence[int], _USERS] = ()
    protection: Protection = field(default=Unprotected())
    seeded_noise: Flag = False

    def to_record(self) -> ConfigRecord:
        """Return the entries as the record of a message.

        Raise a TypeError for a protection that no entries can describe, because clients would apply
        a different protection, or none.
        """
        kind, entries = type(self.protection), _entries_of(self)
        if kind not in _KINDS.values():
            raise TypeError(
                f"{kind.__name__}: no message can ask for this protection; add it to _KINDS in "
                f"{__name__}"
            )
        if kind is Unprotected:
            entries.pop(SEEDED, None)
        else:
            entries |= {KIND: kind.__name__, **_entries_of(self.protection)}
            # If the server adds the noise, the client need not know how it is drawn.
            entries[SEEDED] = self.seeded_noise and kind is not ProtectedByServer
        return ConfigRecord(entries)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RoundEntries:
        """Read the entries of a message, as `to_record` wrote them.

        Raises
        ------
        InvalidValue
            An entry is missing, malformed or unknown. The protection lacks an entry, or has an
            entry of another protection.
        """
        name = str(record.get(KIND, Unprotected.__name__))
        try:
            if (KIND in record) != (SEEDED in record):
                raise InvalidValue(
                    f"{SEEDED}={record.get(SEEDED)!r} with {KIND}={record.get(KIND)!r}: expected "
                    "both entries or neither"
                )
            if name not in _KINDS:
                raise InvalidValue(f"{KIND}={name!r}: expected one of {sorted(_KINDS)}")
            kind = _KINDS[name]
            if unknown := set(record) - {*_fields_of(cls), *_fields_of(kind)}:
                raise InvalidValue(
                    f"{sorted(unknown)} with {KIND}={name!r}: expected only entries of a round and "
                    "of this protection"
                )
            protection = kind(**_values_of(kind, record))
            return cls(**{**_values_of(cls, record), KIND: protection})
        except InvalidValue as error:
            raise InvalidValue(f"in the server's message: {error}") from None


def _fields_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass by the names of their entries."""
    return {part.name.replace("_", "-"): part for part in fields(kind)}


def _values_of(kind: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name.

    A field without entry keeps its default. A field without entry and without default is None.
    """
    return {
        part.name: record.get(name)
        for name, part in _fields_of(kind).items()
        if name in record or part.default is MISSING
    }


def _entries_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dataclass's fields, without fields that have their default."""
    return {
        name: entry
        for name, part in _fields_of(value).items()
        if (entry := getattr(value, part.name)) != part.default
    }
