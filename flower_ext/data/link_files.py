"""Files that ``flower-ext link`` writes.

* A file of pseudonyms has a first line with the fingerprint of the key and the columns
  (`Pseudonyms.fingerprint`), and a line for each person: the pseudonym as a hexadecimal number.
* A file of numbers has the person's number, too.
* A linked table is a silo's table with a user's number in place of each identifier.
"""

from __future__ import annotations

import codecs
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flower_ext.data.linkage import Pseudonyms
from flower_ext.data.record_files import RecordFile
from flower_ext.errors import InvalidValue
from flower_ext.files import write_whole

_MAGIC = "flower-ext pseudonyms"
USER = "user"
"""Name of the column with a person's number."""


def write_people(path: Path, header: str, people: Mapping[bytes, int | None]) -> None:
    """Write people's pseudonyms and, unless it is None, the number of each.

    The ``header`` begins with the fingerprint. Lines are sorted, so their order reveals nothing.
    """
    lines = [f"{person.hex()} {'' if n is None else n}".rstrip() for person, n in people.items()]
    write_whole(path, "\n".join([f"{_MAGIC} {header}", *sorted(lines)]).encode() + b"\n")


def read_people(path: Path) -> tuple[str, dict[bytes, int | None]]:
    """Return the fingerprint in a file of `write_people`, and the people with their numbers."""
    try:
        header, *lines = path.read_text(encoding="ascii").splitlines()
        if header.startswith(_MAGIC):
            people = {
                bytes.fromhex(person): int(number) if number else None
                for person, _, number in (line.partition(" ") for line in lines)
            }
            return header.removeprefix(_MAGIC).split()[0], people
    except (OSError, ValueError):
        pass
    raise InvalidValue(f"{path}: expected a file of `flower-ext link pseudonyms` or `link union`")


def read_numbers(path: Path, pseudonyms: Pseudonyms) -> Callable[[bytes], int]:
    """Return a function that looks up a pseudonym's number in a file of numbers.

    It refuses a person who is not in the file, as `read_numbers` refuses the file of another key.
    """
    fingerprint, numbers = read_people(path)
    if fingerprint != pseudonyms.fingerprint:
        raise InvalidValue(
            f"numbers={path}: this file was made with a different key, or with other kinds of "
            "columns; give the key and columns that you gave to `link pseudonyms`"
        )

    def number_of(pseudonym: bytes) -> int:
        if (number := numbers.get(pseudonym)) is None:
            raise InvalidValue(
                f"numbers={path}: a person of the table has no number in this file; repeat "
                "`link pseudonyms` with this table, and `link union`"
            )
        return number

    return number_of


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

    ``rows`` are rows of the silo's table ``source``, each with the person's pseudonym, as
    `Pseudonyms.of_rows` yields them. ``number`` returns the number of a person's pseudonym.

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
