"""Tables of records: forms that hospitals export, and errors that show no value."""

import pytest

from flower_ext.errors import InvalidValue
from flower_ext_consortium.record_files import RecordFile

ROWS = [["Zoë", "1", "a,b"], ["Ann", "2", ""]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_read_in_every_common_form(tmp_path, encoding, delimiter, end):
    path = tmp_path / "people.csv"
    lines = [["name", "count", "note"], *([f'"{value}"' for value in row] for row in ROWS)]
    text = end.join([*(delimiter.join(line) for line in lines), "", ""])
    path.write_bytes(text.encode(encoding))
    table = RecordFile(path=path, encoding=encoding if encoding == "latin-1" else "utf-8")
    assert table.column_names() == ["name", "count", "note"]
    assert [*table.rows()] == ROWS
    assert table.positions(["note", "name"]) == [2, 0]


def test_a_parquet_file_has_the_same_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "people.parquet"
    parquet.write_table(arrow.table({"name": ["Zoë", "Ann"], "count": [1, None]}), path)
    table = RecordFile(path=path)
    assert table.positions(["count"]) == [1]
    assert [*table.rows()] == [("Zoë", 1), ("Ann", None)]


def test_a_parquet_file_with_two_equal_names_is_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "people.parquet"
    table = arrow.table([arrow.array([1]), arrow.array([2])], names=["age", "age"])
    parquet.write_table(table, path)
    with pytest.raises(InvalidValue, match="expected column names, all different"):
        RecordFile(path=path).positions(["age"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "first line of column names"),
        (b"secret,secret\n1,2\n", "first line of column names"),
        (b"name,age\nsecret,1,2\n", "row 2 has 3 fields"),
        (b"name,age\nsecret\n", "row 2 has 1 fields"),
        (b"name,age\nsecr\xe9t,1\n", "encoding"),
        (b'name,age\n"secret,1\n', "CSV"),
    ],
)
def test_a_broken_file_is_refused_and_its_content_not_shown(tmp_path, content, message):
    path = tmp_path / "people.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message) as refused:
        [*RecordFile(path=path).rows()]
    assert "secr" not in str(refused.value)


def test_a_file_of_utf_8_is_not_read_by_another_encoding(tmp_path):
    path = tmp_path / "people.csv"
    path.write_bytes("name\nZoë\n".encode())
    with pytest.raises(InvalidValue, match="is UTF-8, not latin-1"):
        [*RecordFile(path=path, encoding="latin-1").rows()]
    path.write_bytes(b"name\nZoe\n")  # equal in both
    assert [*RecordFile(path=path, encoding="latin-1").rows()] == [["Zoe"]]


def test_a_file_declared_as_latin_1_keeps_letters_outside_latin_1(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("name\nŠimek Müller\n".encode("cp1252"))
    assert [*RecordFile(path=path, encoding="latin-1").rows()] == [["Šimek Müller"]]


def test_a_missing_column_is_named_but_not_the_others(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("Secret,1980-03-01\n")  # no line of names: the first line is a person
    with pytest.raises(InvalidValue, match="'born'") as refused:
        RecordFile(path=path).positions(["born"])
    assert "Secret" not in str(refused.value)


def test_a_missing_file_and_an_unknown_encoding_are_named(tmp_path):
    with pytest.raises(InvalidValue, match=r"none\.csv"):
        RecordFile(path=tmp_path / "none.csv").column_names()
    (tmp_path / "one.csv").write_text("a\n1\n")
    with pytest.raises(InvalidValue, match="klingon"):
        RecordFile(path=tmp_path / "one.csv", encoding="klingon").column_names()
    (tmp_path / "one.parquet").write_text("a\n1\n")
    with pytest.raises(InvalidValue, match="Parquet"):
        RecordFile(path=tmp_path / "one.parquet").column_names()
