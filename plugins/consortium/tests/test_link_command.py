"""``flower-ext link`` as the silos and the coordinator of a study type it."""

import csv
import re

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app

A = "Name,Given,Born,stage\nMüller,Anna,1980-03-01,II\nO'Brien,Sean,1975-12-24,I\n"
B = "alter;nachname;vorname;geboren\n45;MÜLLER;anna;01.03.1980\n35;Smith;John;01.01.1990\n"
OF_A = "--by Name --by Given --by-date Born"
OF_B = "--by nachname --by vorname --by-date geboren --date-format %d.%m.%Y --encoding latin-1"


@pytest.fixture
def link(tmp_path, monkeypatch):
    """Return the command's function from its words to its output, in a folder with two silos."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(A, encoding="utf-8")
    (tmp_path / "b.csv").write_text(B, encoding="latin-1")

    def run(words, *, fails=False):
        done = CliRunner().invoke(app, ["link", *words.split()], env={"COLUMNS": "300"})
        assert (done.exit_code != 0) == fails, done.output
        return done.output

    run("key study.key")
    return run


def rows(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return [*csv.DictReader(stream)]


def test_buckets_give_a_person_the_same_number_in_both_silos(link, tmp_path):
    common = "--key study.key --buckets 1000000007 --people 3"
    output = link(f"users a.csv {OF_A} {common} -o la.csv")
    assert "Columns kept: stage" in output
    assert "3e-09 pairs of 3 people" in output
    link(f"users b.csv {OF_B} {common} -o lb.csv")
    a, b = rows(tmp_path / "la.csv"), rows(tmp_path / "lb.csv")
    assert a[0]["user"] == b[0]["user"] != b[1]["user"]
    assert [*a[0]] == ["user", "stage"]
    assert [*b[0]] == ["user", "alter"]
    for name in ("la.csv", "lb.csv"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_the_union_numbers_everybody_and_names_nobody(link, tmp_path):
    link(f"pseudonyms a.csv {OF_A} --key study.key -o a.txt")
    link(f"pseudonyms b.csv {OF_B} --key study.key -o b.txt")
    output = link("union a.txt b.txt -o numbers")
    assert "3 people" in output
    assert "set the number of users to 3" in output
    link(f"users a.csv {OF_A} --key study.key --numbers numbers/a.txt -o la.csv")
    link(f"users b.csv {OF_B} --key study.key --numbers numbers/b.txt -o lb.csv")
    a, b = rows(tmp_path / "la.csv"), rows(tmp_path / "lb.csv")
    assert a[0]["user"] == b[0]["user"]
    assert {row["user"] for row in a + b} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("key study.key", "does not exist yet"),
        (f"users a.csv {OF_A} --key study.key -o l.csv", "--buckets and --numbers"),
        ("users a.csv --key study.key --buckets 9 -o l.csv", "--by COLUMN"),
        ("users a.csv --by Surname --key study.key --buckets 9 -o l.csv", "no column 'Surname'"),
        ("users b.csv --by nachname --key study.key --buckets 9 -o l.csv", "encoding"),
        (
            "users b.csv --by-date geboren --encoding latin-1 --key study.key --buckets 9 -o l.csv",
            "2 rows: column 'geboren' has a value that is no date in the format iso. Mend",
        ),
        (f"users a.csv {OF_A} --key a.csv --buckets 9 -o l.csv", "chmod 600"),
        (f"users a.csv {OF_A} --key study.key --numbers a.csv -o l.csv", "link union"),
        ("union a.csv b.csv -o numbers", "link pseudonyms"),
        (f"users a.csv {OF_A} --key study.key --buckets 9 -o l/x/l.csv", "cannot be written"),
    ],
)
def test_a_mistake_writes_nothing_and_says_what_to_change(link, tmp_path, words, message):
    (tmp_path / "a.csv").chmod(0o644)
    output = link(words, fails=True)
    assert message in " ".join(output.replace("│", " ").split())
    for secret in ("Müller", "Anna", "Brien", "1980"):
        assert secret not in output
    assert not (tmp_path / "l.csv").exists()
    assert not [*tmp_path.glob(".*draft")]


def test_rows_that_cannot_be_linked_are_left_out_only_when_asked(link, tmp_path):
    (tmp_path / "a.csv").write_text(A + "Lee,Kim,,III\n", encoding="utf-8")
    common = f"users a.csv {OF_A} --key study.key --buckets 9 -o l.csv"
    assert "1 row: column 'Born'" in link(common, fails=True)
    assert "Left out: 1 row" in link(f"{common} --skip-unusable")
    assert len(rows(tmp_path / "l.csv")) == 2


def test_silos_with_other_numbers_of_buckets_print_other_fingerprints(link):
    prints = [
        re.search(r"Fingerprint (\S+):", link(f"users a.csv {OF_A} --key study.key {rest}"))[1]
        for rest in ("--buckets 9 -o l.csv", "--buckets 9 -o m.csv", "--buckets 99 -o n.csv")
    ]
    assert prints[0] == prints[1] != prints[2]


def test_silos_with_other_keys_or_columns_are_not_numbered_together(link):
    link(f"pseudonyms a.csv {OF_A} --key study.key -o a.txt")
    link("key other.key")
    link(f"pseudonyms b.csv {OF_B} --key other.key -o b.txt")
    assert "different keys" in link("union a.txt b.txt -o numbers", fails=True)


def test_a_person_whom_the_union_lacks_is_refused(link, tmp_path):
    link(f"pseudonyms a.csv {OF_A} --key study.key -o a.txt")
    link("union a.txt -o numbers")
    (tmp_path / "a.csv").write_text(A + "Lee,Kim,1990-01-01,III\n", encoding="utf-8")
    words = f"users a.csv {OF_A} --key study.key --numbers numbers/a.txt -o l.csv"
    assert "a person of the table has no number in this file" in " ".join(
        link(words, fails=True).replace("│", " ").split()
    )
