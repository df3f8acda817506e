"""Common user numbers for people with records in several silos, without revealing the people.

User-level privacy across silos needs one number per person, equal in every silo. Silos that share a
secret key turn an identifier, such as names and a date of birth, into a *pseudonym*: HMAC-SHA-256
of the normalised identifier, shortened to 128 bits. Numbers come from pseudonyms in one of two
ways:

* **Buckets** need no message: a number is the pseudonym modulo the number of buckets. Two people in
  one bucket count as one user, so one bound protects the two together.
* A **numbered union** needs a coordinator, who holds no key. Silos send it their pseudonyms, and it
  numbers the union of them in random order. Sorted order would reveal absent people: two
  consecutive numbers would show that the union has no pseudonym between two known ones. A silo with
  the key could then compute a person's pseudonym, find it in such a gap, and learn that the person
  is in no silo.

A person whose identifier is spelled in j ways has j numbers. This person has the guarantee
of a group of j users, with a larger ε.

``flower-ext link`` writes three kinds of files:

* A file of pseudonyms has a first line with the fingerprint of the key and the columns
  (`Pseudonyms.fingerprint`), and a line for each person: the pseudonym as a hexadecimal number.
* A file of numbers has the person's number, too.
* A linked table is a silo's table with a user's number in place of each identifier.
"""

import codecs
import csv
import hmac
import math
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.errors import InvalidValue
from flower_ext.files import read_key, write_whole
from flower_ext_consortium.record_files import RecordFile

KEY_BYTES, PSEUDONYM_BYTES = 32, 16
_MAGIC = "flower-ext pseudonyms"
USER = "user"
"""Name of the column with a person's number."""
_DECIMALS = re.compile(r"\s*[+-]?\d+[.,]\d*\s*")
"""A number with decimals, such as the 4711.0 that some programs write for the number 4711."""


class UnusableValue(InvalidValue):
    """A value in a column of the identifier is empty, or of the wrong kind.

    The message names the column, but not the value.
    """


@dataclass(frozen=True, kw_only=True)
class IdentifierField:
    """A column of the identifier.

    Parameters
    ----------
    column : str
        Name of the column in this silo's file. Silos may use different names.
    kind : {"text", "date"}
        Texts are compared without case, spaces and punctuation. Dates are compared as days, without
        the time of day.
    date_format : str
        Format of dates as in `datetime.strptime`; "iso" stands for most forms of ISO 8601.
    """

    column: str
    kind: Literal["text", "date"] = "text"
    date_format: str = "iso"

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, ("text", "date"))
        if self.date_format != "iso" and not _tells_all_days_apart(self.date_format):
            raise InvalidValue(
                f"date_format={self.date_format!r}: expected iso, or a format with day, month, "
                "year and century, such as %d.%m.%Y; a year of two digits lacks the century"
            )

    def normalised(self, value: object) -> str:
        """Return a value in the form in which silos compare it, or raise `UnusableValue`."""
        text = "" if value is None else str(value)
        if self.kind == "date":
            if (day := _iso_date(text, self.date_format)) is None:
                raise UnusableValue(
                    f"column {self.column!r} has a value that is no date in the format "
                    f"{self.date_format}"
                )
            return day
        if _DECIMALS.fullmatch(text):
            raise UnusableValue(
                f"column {self.column!r} has a number with decimals: store whole numbers or text"
            )
        if not (folded := _folded(text)):
            raise UnusableValue(f"column {self.column!r} has no letter or digit")
        return folded


def _tells_all_days_apart(form: str) -> bool:
    """Return True if a format has day, month and full year: ``%y`` would read 1931 as 2031."""
    day = date(1931, 12, 30)
    return _iso_date(day.strftime(form), form) == day.isoformat()


@lru_cache(maxsize=2**16)
def _folded(text: str) -> str:
    """Return the letters, digits and accents of a text, in lower case."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    folded = unicodedata.normalize("NFKC", folded)  # folding may split off an accent
    return "".join(sign for sign in folded if unicodedata.category(sign)[0] in "LMN")


@lru_cache(maxsize=2**16)
def _iso_date(text: str, form: str) -> str | None:
    """Return a date as YYYY-MM-DD; None if the text is not a date of this format."""
    try:
        if form == "iso":
            return datetime.fromisoformat(text.strip()).date().isoformat()
        return datetime.strptime(text.strip(), form).date().isoformat()
    except ValueError:
        return None


@dataclass(frozen=True)
class Pseudonyms:
    """The way in which the silos of one study make pseudonyms.

    Parameters
    ----------
    key : bytes
        32 secret bytes that all silos share and no server sees (`read_link_key`).
    fields : sequence of IdentifierField
        Columns of the identifier, in the same order in every silo.
    """

    key: bytes = field(repr=False)
    fields: Sequence[IdentifierField]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise InvalidValue(f"key: expected {KEY_BYTES} bytes, as `write_key` makes them")
        if not self.fields:
            raise InvalidValue("fields: expected at least one column of the identifier")

    def of(self, values: Sequence[object]) -> bytes:
        """Return the pseudonym of a person; ``values`` are the person's values of `fields`."""
        message = b"pseudonym"  # never the message of a fingerprint, which the same key makes
        for part, value in zip(self.fields, values, strict=True):
            normalised = part.normalised(value).encode()
            # Lengths keep ("ab", "c") and ("a", "bc") apart.
            message += len(normalised).to_bytes(4, "big") + normalised
        return hmac.digest(self.key, message, "sha256")[:PSEUDONYM_BYTES]

    def of_rows(
        self, table: RecordFile, unusable: Counter[str]
    ) -> Iterator[tuple[Sequence[Any], bytes]]:
        """Yield each usable row with its pseudonym, and count all other rows in ``unusable``.

        The keys of ``unusable`` are the texts of the `UnusableValue` errors, which say why a row
        has no pseudonym.
        """
        positions = table.positions([part.column for part in self.fields])
        for row in table.rows():
            try:
                yield row, self.of([row[position] for position in positions])
            except UnusableValue as reason:
                unusable[str(reason)] += 1

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits, equal in silos with the same key and fields of equal kinds."""
        kinds = ",".join(part.kind for part in self.fields)
        # 32 bits suffice against mistakes. Without the key, they say nothing about pseudonyms.
        return hmac.digest(self.key, f"fingerprint {kinds}".encode(), "sha256")[:4].hex()


def write_key(path: Path) -> None:
    """Write a new secret key to a file that only its owner can read; refuse an existing file."""
    if path.exists():
        raise InvalidValue(f"{path}: expected a file that does not exist yet")
    write_whole(path, secrets.token_hex(KEY_BYTES).encode() + b"\n")


def read_link_key(path: Path) -> bytes:
    """Return the secret key in a file; refuse a file that other users of this machine can read."""
    return read_key(path, "key", "a file that `flower-ext link key` wrote", is_text=True)


def bucket(pseudonym: bytes, num_buckets: int) -> int:
    """Return the bucket of a pseudonym, a number below ``num_buckets``."""
    # The shares of two buckets differ by at most 2^-128, so people spread evenly.
    return int.from_bytes(pseudonym, "big") % num_buckets


def expected_shared_pairs(num_people: int, num_buckets: int) -> float:
    """Return how many pairs of N people share one of B buckets on average: N (N − 1) / (2 B)."""
    require_at_least_one("num_buckets", num_buckets)
    return num_people * (num_people - 1) / (2 * num_buckets)


def number_union(silos: Sequence[Collection[bytes]]) -> list[dict[bytes, int]]:
    """Give each pseudonym a number; return the numbers of each silo's pseudonyms as a mapping.

    The numbers are 0 … N − 1, where N counts the different pseudonyms in all silos. They are in a
    secret random order, so a silo learns only N from its numbers.
    """
    union = sorted(set().union(*silos))
    secrets.SystemRandom().shuffle(union)  # a seeded order could be repeated, and so undone
    numbers = {pseudonym: number for number, pseudonym in enumerate(union)}
    return [{pseudonym: numbers[pseudonym] for pseudonym in silo} for silo in silos]


def shared_counts(silos: Sequence[Collection[bytes]]) -> dict[tuple[int, ...], int]:
    """Return how many people are in exactly these silos, for each set of silos.

    The key ``(0, 2)``, for example, counts the people who are in silos 0 and 2 and in no other. The
    coordinator learns these numbers.
    """
    homes: dict[bytes, tuple[int, ...]] = {}
    for silo, pseudonyms in enumerate(silos):
        for pseudonym in set(pseudonyms):
            homes[pseudonym] = (*homes.get(pseudonym, ()), silo)
    return dict(sorted(Counter(homes.values()).items(), key=lambda item: (len(item[0]), item[0])))


def write_people(path: Path, header: str, people: Mapping[bytes, int | None]) -> None:
    """Write a line for each person: the pseudonym and, unless it is None, the number.

    The ``header`` begins with the fingerprint. Lines are sorted, so their order reveals nothing.
    """
    lines = [f"{person.hex()} {'' if n is None else n}".rstrip() for person, n in people.items()]
    write_whole(path, "\n".join([f"{_MAGIC} {header}", *sorted(lines)]).encode() + b"\n")


def read_people(path: Path) -> tuple[str, dict[bytes, int | None]]:
    """Return the fingerprint and the people, with their numbers, from `write_people`'s file."""
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

    The returned function refuses a person who is not in the file. `read_numbers` itself refuses a
    file that was made with a different key or for other kinds of columns.
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

    ``columns`` names the columns that were kept. ``texts`` counts the values in a column that are
    neither empty nor numbers; it lacks columns without such values.
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
        return bool(text) and math.isnan(float(text) * 0)  # "inf" and "nan" are words, too
    except ValueError:
        return True
