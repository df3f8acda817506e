"""Linked tables: a user's number in place of the identifier."""

import csv
import io
from collections import Counter

import pytest

from flower_ext.errors import InvalidValue
from flower_ext_consortium.linkage import IdentifierField, Pseudonyms, write_linked
from flower_ext_consortium.record_files import RecordFile

PEOPLE = Pseudonyms(bytes(32), (IdentifierField(column="name"),))


def linked(path, text):
    """Write the linked form of a table; return its rows and the report on it."""
    path.write_text(text, encoding="utf-8")
    stream, source, numbers = io.BytesIO(), RecordFile(path=path, encoding="utf-8"), {}
    rows = PEOPLE.of_rows(source, Counter())
    report = write_linked(
        stream, source, PEOPLE, rows, lambda p: numbers.setdefault(p, len(numbers))
    )
    return [*csv.reader(io.StringIO(stream.getvalue().decode()))], report


def test_the_identifier_goes_and_a_person_has_one_number_in_all_rows(tmp_path):
    table = "age,name,stage\n5,Ada,II\n,Bea,3\n7,ada,I\n"
    rows, report = linked(tmp_path / "a.csv", table)
    assert rows == [
        ["user", "age", "stage"],
        ["0", "5", "II"],
        ["1", "", "3"],
        ["0", "7", "I"],
    ]
    assert (report.num_rows, report.num_people, report.columns) == (3, 2, ["age", "stage"])


@pytest.mark.parametrize(
    ("values", "texts"),
    [(["1", "2.5", ""], {}), (["1", "2,5", "x"], {"age": 2}), (["nan", "inf", "1e3"], {"age": 2})],
)
def test_values_that_are_not_empty_and_not_numbers_are_counted(tmp_path, values, texts):
    lines = [f'Ada,"{value}"' for value in values]
    _, report = linked(tmp_path / "a.csv", "\n".join(["name,age", *lines, ""]))
    assert report.texts == texts


def test_a_table_with_a_column_of_the_numbers_name_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="a column 'user' already"):
        linked(tmp_path / "a.csv", "name,user\nAda,5\n")
