"""``flower-ext study``: its file, the tables that it links, and stages that failed."""

import json
import os

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.runs import RunDirectory
from flower_ext_consortium.linkage import write_key
from tests.support.apps import APPS

FILE = """
app = {app!r}

[settings]
delta = 1e-5
population-epsilon = 5
population-delta = 1e-5

[[link]]
table = "north.csv"
by = ["name"]
key = "study.key"
buckets = 10
output = "linked/0.csv"

[[stage]]
name = "first"
settings = {{ method = "statistics", statistics = "count" }}
"""


@pytest.fixture
def study(tmp_path):
    """Return a function that runs a study with changes to its file."""
    write_key(tmp_path / "study.key")
    (tmp_path / "north.csv").write_text("name,age\nAda,5\nBea,7\n")

    def run(*changes):
        text = FILE.format(app=str(APPS / "consortium"))
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "study.toml").write_text(text)
        words = ["study", str(tmp_path / "study.toml"), "--runs", str(tmp_path)]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
        return done.exit_code, " ".join(done.output.replace("│", " ").split())

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[settings]", "[options]"), "study.toml has 'options': expected app, link, "),
        (('name = "first"', ""), "[[stage]]: missing 1 required keyword-only argument: 'name'"),
        (
            ("buckets = 10", "bucket = 10"),
            "No such option '--bucket'. (Did you mean one of: '--buckets', '--key'?)",
        ),
        (("buckets = 10", 'buckets = "ten"'), "'--buckets': 'ten' is not a valid integer"),
        (('"north.csv"', '["north.csv", "south.csv"]'), "unexpected extra argument"),
        (("buckets = 10", "buckets = 0"), "'--buckets': 0 is not in the range x>=1"),
        (("buckets = 10", "buckets = [1, 2]"), "'--buckets': given twice"),
        (('output = "linked/0.csv"', ""), "expected table, key and output"),
        (("north.csv", "south.csv"), "cannot be read; No such file"),
        (("study.key", "other.key"), "`flower-ext link key` wrote"),
        (('"name"', '"surname"'), "no column 'surname'"),
        (("\ndelta = 1e-5", "\ndelta = 5"), "stage first: setting delta"),
        (("\ndelta = 1e-5", "\ndetla = 1"), "stage first: setting 'detla=1'"),
        (("population-epsilon = 5", ""), "has no population-epsilon"),
        (('"count" }', '"count" }\nuses = ["zero/a.toml"]'), "no earlier stage has written"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(study, tmp_path, change, message):
    status, output = study(change)
    assert status == 2, output
    assert message in output
    assert not (tmp_path / "study" / "first").exists()


def test_a_study_without_an_account_warns_before_its_first_stage(study):
    mistake = ("\ndelta = 1e-5", "\ndelta = 5")  # the stage never begins
    warning = "The stages share no account: each has an ε of its own"
    assert warning in study(mistake, ("population-epsilon = 5", "population-epsilon = 0"))[1]
    assert warning not in study(mistake)[1]


def test_a_linked_table_is_kept_until_its_source_changes(study, tmp_path):
    mistake = ("\ndelta = 1e-5", "\ndelta = 5")  # the stage never begins
    output, source = tmp_path / "linked" / "0.csv", tmp_path / "north.csv"
    assert "2 rows of 2 people" in study(mistake)[1]
    output.write_text("kept")
    now = source.stat().st_mtime
    os.utime(output, (now + 1000, now + 1000))
    study(mistake)
    assert output.read_text() == "kept"
    source.write_text("name,age\nAda,5\nBea,six\n")
    os.utime(source, (now + 2000, now + 2000))
    assert "1 of 2 values are not numbers" in study(mistake)[1]
    assert "six" in output.read_text()


def test_a_linked_table_is_made_anew_if_the_people_are_numbered_anew(study, tmp_path):
    mistake = ("\ndelta = 1e-5", "\ndelta = 5")  # the stage never begins
    output, numbers = tmp_path / "linked" / "0.csv", tmp_path / "numbers.csv"
    of_union = ("buckets = 10", 'numbers = "numbers.csv"')
    study(mistake)
    output.write_text("kept")
    now = output.stat().st_mtime
    os.utime(output, (now + 1000, now + 1000))
    numbers.write_text("")
    os.utime(numbers, (now + 2000, now + 2000))
    assert "kept" not in study(mistake, of_union)[1]


@pytest.mark.report
def test_a_stage_that_asked_nobody_may_begin_again_with_other_settings(
    forked_runs, study, tmp_path
):
    lines = """
        delta = 1e-5
        dataset = "files"
        data-folder = "linked"
        num-users = 10
        num-silos = 3
        colluding-share = 0"""
    before = ("\ndelta = 1e-5", lines)
    status, output = study(before)
    assert status == 1
    assert "stage first: the run was ended by the error above" in output
    failed = RunDirectory.open(tmp_path / "study" / "first").id
    assert study()[0] == 0
    directory = RunDirectory.open(tmp_path / "study" / "first")
    assert directory.status == "completed"
    assert RunDirectory.open(tmp_path / "study" / f"first-{failed[:8]}").id == failed
    metrics = directory.path / "metrics.jsonl"
    (row,) = map(json.loads, metrics.read_text().splitlines())
    metrics.write_text(json.dumps({**row, "discarded": 1}) + "\n")
    status, output = study()
    assert status == 1
    assert "stage first: every round was discarded, so the stage released nothing" in output
