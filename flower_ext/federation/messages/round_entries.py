"""The entries of a round, which the server sends to clients together with the model.

They are in the record `records.ROUND` of a message. In a message to a ClientApp of another project,
they are among the settings for this package's mods (see `for_mods`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from flwr.app import ConfigRecord

from flower_ext.checks import Checked, Count, CountOrZero, Flag, Rule
from flower_ext.errors import InvalidValue
from flower_ext.federation.messages.protection import (
    KIND,
    Unprotected,
    entries_of,
    fields_of,
    from_entries,
    to_entries,
    values_of,
)
from flower_ext.privacy.mechanisms.protections import ProtectedByServer, Protection

SEEDED = "seeded-noise"
_NAME = Rule("a string", lambda value: type(value) is str)
_USERS = Rule(
    "integers, the users' numbers",
    lambda users: isinstance(users, list | tuple) and all(type(user) is int for user in users),
)


@dataclass(frozen=True, kw_only=True)
class RoundEntries(Checked):
    """Entries of a round, among them the entries of its protection.

    An entry has the name of its field, with hyphens. A message leaves out entries that have their
    default.

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
        entries = {**entries_of(self), **to_entries(self.protection)}
        if KIND in entries:
            # If the server adds the noise, the client need not know how it is drawn.
            by_client = not isinstance(self.protection, ProtectedByServer)
            entries[SEEDED] = self.seeded_noise and by_client
        else:
            entries.pop(SEEDED, None)
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
        of_round = fields_of(cls).keys() - {KIND}
        asked = {name: value for name, value in record.items() if name not in of_round}
        try:
            if (KIND in record) != (SEEDED in record):
                raise InvalidValue(
                    f"{SEEDED}={record.get(SEEDED)!r} with {KIND}={record.get(KIND)!r}: expected "
                    "both entries or neither"
                )
            return cls(**{**values_of(cls, record), KIND: from_entries(asked)})
        except InvalidValue as error:
            raise InvalidValue(f"in the server's message: {error}") from None
