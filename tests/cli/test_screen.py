"""Tables on the screen and in files: no text is cut off."""

import subprocess
import sys

import pytest
from rich.console import Console

from flower_ext.cli.screen import Page, titled_table
from flower_ext.runs.page import table

COLUMNS = ("basis", "relation", "accountant")
ROW = ("provable", "add-or-remove-one", "exact Gaussian composition")


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("kind", ["page", "table"])
def test_a_narrow_screen_cuts_off_no_letter_of_a_table(width, kind):
    shown = Page(table(COLUMNS, [ROW]))
    if kind == "table":
        shown = titled_table("", COLUMNS)
        shown.add_row(*ROW)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown)
    text = capture.get()
    assert "…" not in text
    for line in text.splitlines():
        assert len(line) <= width
    for letters in (COLUMNS, ROW):
        for cell in letters:
            for letter in set(cell) - {" "}:
                expected = sum(other.count(letter) for other in (*COLUMNS, *ROW))
                assert text.count(letter) == expected


@pytest.mark.parametrize(("columns", "expected"), [(None, 120), ("60", 60)])
def test_output_to_a_pipe_is_wide_unless_the_user_sets_columns(columns, expected, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    code = "from flower_ext.cli.screen import console; print(console.width)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == expected
