"""Pseudonyms and numbers: who becomes one user, what a silo learns, and what errors show."""

import random
from collections import Counter
from datetime import date

import pytest
from scipy.stats import spearmanr

from flower_ext.errors import InvalidValue
from flower_ext_consortium.linkage import (
    IdentifierField,
    Pseudonyms,
    UnusableValue,
    bucket,
    expected_shared_pairs,
    number_union,
    read_link_key,
    shared_counts,
    write_key,
)
from flower_ext_consortium.record_files import RecordFile

KEY = bytes(range(32))
NAME, GIVEN = IdentifierField(column="name"), IdentifierField(column="given")
BORN = IdentifierField(column="born", kind="date")
FORM = Pseudonyms(KEY, (NAME, GIVEN, BORN))


@pytest.mark.parametrize(
    "spelling",
    [
        ("MÜLLER", "anna", "1980-03-01"),
        ("Mu\u0308ller", " An-na ", "1980-03-01"),  # the accent as a sign of its own
        ("Ｍüller", "Anna", "19800301"),
        ("Müller.", "ANNA", "1980-03-01 00:00:00"),
    ],
)
def test_other_spellings_of_the_same_letters_are_one_person(spelling):
    assert FORM.of(spelling) == FORM.of(("Müller", "Anna", "1980-03-01"))


@pytest.mark.parametrize(
    "other",
    [
        ("Muller", "Anna", "1980-03-01"),
        ("MüllerA", "nna", "1980-03-01"),  # the same letters over other fields
        ("Müller", "Anna", "1980-01-03"),
    ],
)
def test_another_identifier_is_another_person(other):
    assert FORM.of(other) != FORM.of(("Müller", "Anna", "1980-03-01"))


def test_eszett_and_ss_give_one_pseudonym():
    assert FORM.of(("Straße", "A", "1980-03-01")) == FORM.of(("STRASSE", "a", "1980-03-01"))


def test_dates_of_another_form_agree_with_iso_dates():
    german = IdentifierField(column="geboren", kind="date", date_format="%d.%m.%Y")
    other = Pseudonyms(KEY, (NAME, GIVEN, german))
    assert other.of(("a", "b", "24.12.1975")) == FORM.of(("a", "b", "1975-12-24"))
    assert other.fingerprint == FORM.fingerprint


def test_another_key_makes_other_pseudonyms_and_another_fingerprint():
    other = Pseudonyms(bytes(32), FORM.fields)
    assert other.of(("a", "b", "1975-12-24")) != FORM.of(("a", "b", "1975-12-24"))
    assert other.fingerprint != FORM.fingerprint
    assert Pseudonyms(KEY, (BORN, NAME, GIVEN)).fingerprint != FORM.fingerprint


@pytest.mark.parametrize(
    ("values", "column"),
    [
        (("", "Secret", "1980-03-01"), "name"),
        ((None, "Secret", "1980-03-01"), "name"),
        (("Secret", "-- ", "1980-03-01"), "given"),
        (("Secret", "4711.0", "1980-03-01"), "given"),
        (("Secret", "4711,5", "1980-03-01"), "given"),
        (("Secret", "Secret", "1980-13-01"), "born"),
        (("Secret", "Secret", "Secret"), "born"),
    ],
)
def test_an_unusable_value_is_refused_by_its_column_and_never_shown(values, column):
    with pytest.raises(UnusableValue, match=repr(column)) as refused:
        FORM.of(values)
    for value in values:
        assert not value or value not in str(refused.value)


def test_rows_that_cannot_be_linked_are_counted_by_column(tmp_path):
    table = tmp_path / "people.csv"
    table.write_text("born,name,given\n1980-03-01,A,B\n,A,B\n,A,C\n1980-03-01,,B\n")
    unusable = Counter()
    rows = [*FORM.of_rows(RecordFile(path=table), unusable)]
    assert [row for row, _ in rows] == [["1980-03-01", "A", "B"]]
    assert sorted(unusable.values()) == [1, 2]


def test_a_key_file_is_secret_and_never_replaced(tmp_path):
    path = tmp_path / "study.key"
    write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_link_key(path)) == 32
    with pytest.raises(InvalidValue, match="does not exist yet"):
        write_key(path)
    path.chmod(0o640)
    with pytest.raises(InvalidValue, match="chmod 600"):
        read_link_key(path)


@pytest.mark.parametrize("content", ["", "00", "no key", "00" * 31])
def test_a_file_that_holds_no_key_is_refused(tmp_path, content):
    path = tmp_path / "study.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(InvalidValue, match="key"):
        Pseudonyms(read_link_key(path), (NAME,))


def test_the_expected_number_of_shared_pairs_is_that_of_a_simulation():
    people, buckets = 20_000, 100_000
    counts = Counter(bucket(FORM.of((f"n{i}", "g", "1980-03-01")), buckets) for i in range(people))
    pairs = sum(count * (count - 1) / 2 for count in counts.values())
    expected = expected_shared_pairs(people, buckets)
    assert abs(pairs - expected) < 5 * expected**0.5  # nearly a Poisson variable


def test_numbers_are_common_unique_and_below_the_size_of_the_union():
    people = [bytes([i]) * 16 for i in range(60)]
    silos = [people[:30], people[20:50], people[45:]]
    numbered = number_union(silos)
    merged = {}
    for silo, numbers in zip(silos, numbered, strict=True):
        assert set(numbers) == set(silo)
        for pseudonym, number in numbers.items():
            assert merged.setdefault(pseudonym, number) == number
    assert sorted(merged.values()) == list(range(60))


def test_the_order_of_numbers_says_nothing_of_pseudonyms_in_other_silos():
    """With sorted numbers, a silo with the key would see who lies between two of its people."""
    people = [random.Random(i).randbytes(16) for i in range(1000)]
    (numbers,) = number_union([people])
    rank = [numbers[pseudonym] for pseudonym in sorted(people)]
    assert abs(spearmanr(rank, range(1000)).statistic) < 5.0 / 1000**0.5


def test_the_coordinator_sees_the_sizes_of_subsets():
    silos = [[b"a", b"b", b"c"], [b"b", b"c", b"d"], [b"c"]]
    assert shared_counts(silos) == {(0,): 1, (1,): 1, (0, 1): 1, (0, 1, 2): 1}


@pytest.mark.parametrize(
    "form", ["mm/dd/yyyy", "%d.%m.%y", "%m/%Y", "%d.%m.", "%D", "%d.%m.%Y %"], ids=str
)
def test_a_form_of_dates_that_mixes_up_two_days_is_refused(form):
    """By two digits of a year, 1931 is read as 2031, and would differ from a silo's 1931."""
    with pytest.raises(InvalidValue, match="century, such as %d"):
        IdentifierField(column="born", kind="date", date_format=form)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%Y%m%d", "%d %b %Y", "%j/%Y", "%Y-%m-%d %H:%M"])
def test_a_form_of_dates_that_tells_all_days_apart_is_accepted(form):
    field = IdentifierField(column="born", kind="date", date_format=form)
    assert field.normalised(date(1931, 12, 30).strftime(form)) == "1931-12-30"
