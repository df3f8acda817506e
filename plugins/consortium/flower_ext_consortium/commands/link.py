"""``flower-ext link``: give people the same number in every silo; see `linkage`."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from flower_ext.cli.screen import Command, console, say, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.files import whole_file
from flower_ext_consortium.linkage import (
    IdentifierField,
    Pseudonyms,
    bucket,
    expected_shared_pairs,
    number_union,
    read_link_key,
    read_numbers,
    read_people,
    shared_counts,
    write_key,
    write_linked,
    write_people,
)
from flower_ext_consortium.record_files import RecordFile

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Table = Annotated[Path, typer.Argument(help="CSV or Parquet file of this silo.")]
KeyFile = Annotated[Path, typer.Option("--key", help="Key of `link key`; equal in every silo.")]
By = Annotated[
    list[str] | None,
    typer.Option("--by", metavar="COLUMN", help="Column of the identifier; may be repeated."),
]
ByDate = Annotated[
    list[str] | None,
    typer.Option("--by-date", metavar="COLUMN", help="Column with a date; may be repeated."),
]
DateFormat = Annotated[
    str, typer.Option(help="Form of the dates, such as %d.%m.%Y; iso is 2001-12-31.")
]
Encoding = Annotated[str, typer.Option(help="Encoding of a CSV file.")]
SkipUnusable = Annotated[
    bool, typer.Option("--skip-unusable", help="Leave out rows whose identifier cannot be used.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write.")]


@app.callback()
def link() -> None:
    """Give people the same number in every silo, without revealing who they are.

    Example: flower-ext link users patients.csv --by name --by-date born --key study.key --buckets
    100000 -o linked.csv
    """


@app.command(cls=Command)
def key(path: Annotated[Path, typer.Argument(help="File to create.")]) -> None:
    """Make the secret key that all silos share. No server may have it."""
    write_key(path)
    say(
        f"{path} holds a new key. Bring it to every silo over a channel that you trust, and to no "
        "server: with the key, anybody can test whether a person is among the pseudonyms."
    )


@app.command(cls=Command)
def pseudonyms(
    table: Table,
    key: KeyFile,
    output: Output,
    by: By = None,
    by_date: ByDate = None,
    date_format: DateFormat = "iso",
    encoding: Encoding = "utf-8",
    skip_unusable: SkipUnusable = False,
) -> None:
    """Write this silo's pseudonyms, for the coordinator who numbers them (`link union`)."""
    source = RecordFile(path=table, encoding=encoding)
    form = _pseudonyms(key, by, by_date, date_format)
    unusable: Counter[str] = Counter()
    people = dict.fromkeys(person for _, person in _watched(form.of_rows(source, unusable)))
    _refuse(table, unusable, skip_unusable)
    write_people(output, form.fingerprint, people)
    say(f"{output}: {len(people):,} people, fingerprint {form.fingerprint}")


@app.command(cls=Command)
def union(
    files: Annotated[list[Path], typer.Argument(help="Files of `link pseudonyms`, one a silo.")],
    output_folder: Annotated[Path, typer.Option("--output-folder", "-o", help="Folder to fill.")],
) -> None:
    """Give numbers to the people of all silos; write one file of numbers for each silo."""
    if len({path.name for path in files}) < len(files):
        raise InvalidValue("files: expected files of different names, one for each silo")
    contents = [read_people(path) for path in files]
    fingerprint = contents[0][0]
    if any(other != fingerprint for other, _ in contents):
        raise InvalidValue(
            "files: their fingerprints differ, so the silos used different keys, or columns of "
            "different kinds or order; repeat `link pseudonyms` with equal keys and columns"
        )
    silos = [people for _, people in contents]
    numbered = number_union(silos)
    total = len(set().union(*silos))
    output_folder.mkdir(parents=True, exist_ok=True)
    for path, numbers in zip(files, numbered, strict=True):
        write_people(output_folder / path.name, f"{fingerprint} {total}", numbers)
    people_by_silos = shared_counts(silos)
    seen = titled_table(f"{total:,} people, as the coordinator sees them", ("silos", "people"))
    for owners, count in people_by_silos.items():
        seen.add_row(" + ".join(files[silo].stem for silo in owners), f"{count:,}")
    console.print(seen)
    if len(silos) > 1 and max(map(len, people_by_silos)) == 1:
        say(
            "No person is in two silos. If that surprises you, check that all silos named the same "
            "columns in the same order."
        )
    say(f"Give each silo its file in {output_folder}, and set the number of users to {total}.")


@app.command(cls=Command)
def users(
    table: Table,
    key: KeyFile,
    output: Output,
    buckets: Annotated[
        int | None, typer.Option(min=1, help="Number of buckets; equal in every silo.")
    ] = None,
    numbers: Annotated[
        Path | None,
        typer.Option(
            help="File that `link union` wrote for this silo; takes the place of --buckets."
        ),
    ] = None,
    people: Annotated[
        int | None, typer.Option(min=1, help="People in all silos together; for buckets.")
    ] = None,
    by: By = None,
    by_date: ByDate = None,
    date_format: DateFormat = "iso",
    encoding: Encoding = "utf-8",
    skip_unusable: SkipUnusable = False,
) -> None:
    """Replace identifiers by user numbers: hash buckets, or the numbers that `link union` gave."""
    pseudonyms = _pseudonyms(key, by, by_date, date_format)
    if numbers is not None and buckets is None:
        number_of = read_numbers(numbers, pseudonyms)
    elif buckets is not None and numbers is None:
        number_of = partial(bucket, num_buckets=buckets)
    else:
        raise InvalidValue("buckets: expected exactly one of --buckets and --numbers")
    source = RecordFile(path=table, encoding=encoding)
    unusable: Counter[str] = Counter()
    with whole_file(output) as stream:
        rows = _watched(pseudonyms.of_rows(source, unusable))
        linked = write_linked(stream, source, pseudonyms, rows, number_of)
        _refuse(table, unusable, skip_unusable)
    say(f"{output}: {linked.num_rows:,} rows of {linked.num_people:,} people")
    say(f"Columns kept: {', '.join(linked.columns)}")
    for column, count in linked.texts.items():
        say(
            f"Column {column!r}: {count:,} of {linked.num_rows:,} values are not numbers (they "
            "may be words, or decimals with a comma); apps that expect numbers take them as missing"
        )
    common = pseudonyms.fingerprint if buckets is None else f"{pseudonyms.fingerprint}-{buckets}"
    say(f"Fingerprint {common}: if a silo prints another fingerprint, its numbers do not match.")
    if buckets is not None:
        everyone = people or linked.num_people
        of_whom = "all silos" if people else "this file alone; set --people to count all silos"
        say(
            f"{expected_shared_pairs(everyone, buckets):.3g} pairs of {everyone:,} people are "
            f"expected to share a bucket ({of_whom}). The two people of such a pair count as one "
            "user, so one bound protects the two together."
        )


def _pseudonyms(
    key: Path, by: list[str] | None, by_date: list[str] | None, date_format: str
) -> Pseudonyms:
    """Return the key and the identifier's columns: first those of text, then those of dates."""
    texts = [IdentifierField(column=column) for column in by or []]
    dates = [
        IdentifierField(column=column, kind="date", date_format=date_format)
        for column in by_date or []
    ]
    if not texts + dates:
        raise InvalidValue(
            "by: expected --by COLUMN or --by-date COLUMN; repeat the option for each column of "
            "the identifier"
        )
    return Pseudonyms(read_link_key(key), (*texts, *dates))


def _watched(rows: Iterator[T]) -> Iterator[T]:
    """Yield rows, and show how many have been read."""
    with console.status("") as status:
        for number, row in enumerate(rows, 1):
            if number % 100_000 == 0:
                status.update(f"{number:,} rows")
            yield row


def _refuse(path: Path, unusable: Counter[str], skip_unusable: bool) -> None:
    """Refuse a file with rows that cannot be linked; with ``skip_unusable``, only count them."""
    reasons = "; ".join(
        f"{count:,} row{'s' if count > 1 else ''}: {reason}" for reason, count in unusable.items()
    )
    if unusable and not skip_unusable:
        raise InvalidValue(
            f"{path}: {reasons}. Mend these rows, set --date-format, or leave the rows out with "
            "--skip-unusable"
        )
    if unusable:
        say(f"Left out: {reasons}")
