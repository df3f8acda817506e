"""Files of ``flower-ext link``: the pseudonyms of a silo's people, and the numbers given to them.

The first line has the fingerprint of the key and the columns (`Pseudonyms.fingerprint`). Each
other line has one person: the pseudonym as a hexadecimal number and, in a file of numbers, the
person's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flower_ext.data.linkage import Pseudonyms
from flower_ext.errors import InvalidValue
from flower_ext.files import write_whole

_MAGIC = "flower-ext pseudonyms"


def write_pseudonyms(path: Path, fingerprint: str, people: Iterable[bytes]) -> None:
    """Write the pseudonyms of a silo's people. They are sorted, so their order reveals nothing."""
    _write(path, fingerprint, sorted(person.hex() for person in people))


def write_numbers(path: Path, fingerprint: str, total: int, numbers: Mapping[bytes, int]) -> None:
    """Write the numbers of a silo's people; ``total`` is the number of people in all silos."""
    lines = [f"{person.hex()} {number}" for person, number in numbers.items()]
    _write(path, f"{fingerprint} {total}", lines)


def _write(path: Path, header: str, lines: Iterable[str]) -> None:
    write_whole(path, "\n".join([f"{_MAGIC} {header}", *lines]).encode() + b"\n")


def read_pseudonyms(path: Path) -> tuple[str, set[bytes]]:
    """Return the fingerprint and the pseudonyms in a file of pseudonyms or of numbers.

    Raises
    ------
    InvalidValue
        The file is not such a file.
    """
    fingerprint, lines = _read(path)
    return fingerprint, {person for person, _ in lines}


def read_numbers(path: Path, pseudonyms: Pseudonyms) -> Callable[[bytes], int]:
    """Return a function that looks up a pseudonym's number in a file of numbers.

    The function raises `InvalidValue` for a person who is not in the file.

    Raises
    ------
    InvalidValue
        The file is not such a file, or was made with another key or other columns.
    """
    fingerprint, lines = _read(path)
    if fingerprint != pseudonyms.fingerprint:
        raise InvalidValue(
            f"numbers={path}: this file was made with a different key, or with other kinds of "
            "columns; give the key and columns that you gave to `link pseudonyms`"
        )
    numbers = {person: int(words[0]) for person, words in lines if words}

    def number(pseudonym: bytes) -> int:
        if pseudonym not in numbers:
            raise InvalidValue(
                f"numbers={path}: a person of the table has no number in this file; repeat "
                "`link pseudonyms` with this table, and `link union`"
            )
        return numbers[pseudonym]

    return number


def _read(path: Path) -> tuple[str, list[tuple[bytes, list[str]]]]:
    """Return the fingerprint in a file, and a pair for each person.

    The pair has the person's pseudonym and a list: the person's number as a text, or nothing in a
    file without numbers.
    """
    try:
        header, *lines = path.read_text(encoding="ascii").splitlines()
        if header.startswith(_MAGIC):
            people = [(bytes.fromhex(person), words) for person, *words in map(str.split, lines)]
            return header.removeprefix(_MAGIC).split()[0], people
    except (OSError, ValueError):
        pass
    raise InvalidValue(f"{path}: expected a file of `flower-ext link pseudonyms` or `link union`")
