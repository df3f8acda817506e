"""Result tables: pages agree with the rows in ``benchmarks/results``, and rows with their runs."""

import sys

import pytest

from benchmarks.report.__main__ import main
from benchmarks.report.pages import pages, table_names, with_tables
from benchmarks.report.rows import (
    COLUMNS,
    collect,
    column_values,
    copy_files,
    curve,
    gains,
    read_rows,
    select_rows,
    store_rows,
)
from benchmarks.report.tables import TABLES
from benchmarks.report.tables.cells import count_gains
from flower_ext.runs import RunWriter
from tests.support.pages import ROOT

PAPERS = {
    "DP²-FedSAM": ("Table II", "Table III", *(f"Figure {n}" for n in (1, 4, 5, 6, 7))),
    "DP-Ditto": tuple(f"Figure {n}" for n in range(2, 8)),
    "Uldp-FL": tuple(f"Figure {n}" for n in (2, 4, 5, 6, 7, 8, 10, 11, 12, 13)),
    "Upcycled-FL": (
        *(f"Table {n}" for n in range(1, 6)),
        *(f"Figure {n}" for n in range(2, 10)),
    ),
}
"""Tables and figures of the four papers that show data."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_has_the_tables_that_its_rows_make(page):
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m benchmarks report"


def test_every_table_is_on_one_page_at_most():
    shown = [name for page in pages() for name in table_names(page.read_text(encoding="utf-8"))]
    assert len(shown) == len(set(shown)) > 0
    assert set(shown) <= set(TABLES)


def test_a_changed_row_changes_its_page(tmp_path, monkeypatch):
    page = next(page for page in pages() if table_names(page.read_text(encoding="utf-8")))
    text = page.read_text(encoding="utf-8")
    name = table_names(text)[0]
    monkeypatch.setitem(TABLES, name, lambda: "| another |")
    assert with_tables(text) != text


def test_every_table_and_figure_of_the_papers_has_one_row():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for paper, places in PAPERS.items():
        section = text.partition(f"## {paper}\n")[2].partition("\n## ")[0]
        rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
        assert rows[2:] == list(places), paper


def a_run(path, seed, loss, status="completed"):
    """Write a run directory of the app ``uldp-fl`` with two rounds."""
    config = dict.fromkeys(COLUMNS["uldp-fl"].settings, "x") | {"seed": seed, "rounds": 2}
    run = RunWriter.create(path, config)
    run.log(1, seconds=2.0, loss_pooled=1.0)
    run.log(2, seconds=3.0, loss_pooled=loss)
    run.finish(status)
    run.close()


def test_completed_runs_become_rows_beside_those_of_other_machines(tmp_path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    a_run(runs / "figure-6/a-1", 1, 0.5)
    a_run(runs / "figure-6/a-2", 2, 0.25, status="failed")
    a_run(runs / "search/figure-6/a-1001", 1001, 0.75)
    (path,) = collect("uldp-fl", runs, results)
    assert path.name == "uldp-fl-figure-6.csv"
    (row,) = read_rows("uldp-fl-figure-6", folder=results)
    assert (row["run"], row["loss_pooled"], row["seconds"]) == ("a-1", "0.5", "5")
    assert (row["accuracy_pooled"], curve(row, "loss_pooled")) == ("", {1: 1.0, 2: 0.5})

    a_run(tmp_path / "elsewhere/figure-6/a-2", 2, 0.125)
    collect("uldp-fl", tmp_path / "elsewhere", results)
    rows = read_rows("uldp-fl-figure-6", folder=results)
    assert column_values(rows, "loss_pooled") == [0.5, 0.125]
    assert select_rows(rows, seed=2, method="x") == rows[1:]


def test_stored_rows_are_published_only_when_their_file_is_copied(tmp_path):
    output, results = tmp_path / "output", tmp_path / "results"
    output.mkdir()
    store_rows("sharing", ("seed", "accuracy"), [(1, "0.5")], folder=output)
    assert read_rows("sharing", folder=results) == []
    assert copy_files([output / "sharing.csv"], results) == [results / "sharing.csv"]
    assert read_rows("sharing", folder=results) == [{"seed": "1", "accuracy": "0.5"}]


@pytest.mark.parametrize("name", ["missing.csv", "page.md"])
def test_the_command_stores_nothing_but_csv_files(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text("text", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report", "--store", str(tmp_path / name)])
    with pytest.raises(SystemExit):
        main()
    assert "expected a CSV file" in capsys.readouterr().err


def test_gains_are_by_seed():
    ours = [{"seed": "2", "a": "5"}, {"seed": "1", "a": "3"}, {"seed": "3", "a": "0"}]
    others = [{"seed": "1", "a": "1"}, {"seed": "2", "a": "2"}]
    assert gains(ours, others, "a") == [3.0, 2.0]


def test_gains_beyond_two_standard_errors_are_sure():
    pairs = [[1.0, 1.2], [0.0, 3.0], [-1.0, -1.2], [1e-17, 1e-17]]
    assert count_gains(pairs, digits=2) == (2, 1, 1)
    assert count_gains([[0.004, 0.004]], digits=2) == (0, 0, 0)
