"""Linked tables: a silo's table with a user's number in place of each identifier."""

from __future__ import annotations

import codecs
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from flower_ext.data.linkage import Pseudonyms
from flower_ext.data.record_files import RecordFile
from flower_ext.errors import InvalidValue

USER = "user"
"""Name of the column with a person's number."""


@dataclass(frozen=True, kw_only=True)
class LinkedTable:
    """A table that `write_linked` has written.

    ``columns`` are the columns kept, and ``texts`` the numbers of values, in some of these columns,
    that are neither empty nor numbers.
    """

    num_rows: int
    num_people: int
    columns: Sequence[str]
    texts: Mapping[str, int]


def write_linked(
    stream: IO[bytes],
    source: RecordFile,
    pseudonyms: Pseudonyms,
    rows: Iterable[tuple[Sequence[Any], bytes]],
    number: Callable[[bytes], int],
) -> LinkedTable:
    """Write a table as CSV in UTF-8, with a user's number in place of the identifier's columns.

    Parameters
    ----------
    stream : IO[bytes]
        The open file to write.
    source : RecordFile
        The silo's table.
    pseudonyms : Pseudonyms
        Names the identifier's columns.
    rows : Iterable
        Rows of ``source``, each with the person's pseudonym, as `Pseudonyms.of_rows` yields them.
    number : Callable[[bytes], int]
        Returns a person's number, given the pseudonym.

    Raises
    ------
    InvalidValue
        The table lacks a column of the identifier, or has a column `USER` already.
    """
    names = source.column_names()
    if USER in names:
        raise InvalidValue(
            f"{source.path}: the table has a column {USER!r} already; rename that column"
        )
    identifier = set(source.positions([part.column for part in pseudonyms.fields]))
    kept = [position for position in range(len(names)) if position not in identifier]
    people: set[bytes] = set()
    texts: Counter[int] = Counter()
    num_rows = 0
    writer = csv.writer(codecs.getwriter("utf-8")(stream))
    writer.writerow([USER, *(names[position] for position in kept)])
    for row, pseudonym in rows:
        people.add(pseudonym)
        writer.writerow([number(pseudonym), *(row[position] for position in kept)])
        texts.update(position for position in kept if _is_text(row[position]))
        num_rows += 1
    return LinkedTable(
        num_rows=num_rows,
        num_people=len(people),
        columns=[names[position] for position in kept],
        texts={names[position]: count for position, count in texts.items()},
    )


def _is_text(value: object) -> bool:
    """Return True for a value that is neither empty nor a number."""
    text = "" if value is None else str(value).strip()
    try:
        return bool(text) and math.isnan(float(text) * 0)
    except ValueError:
        return True
