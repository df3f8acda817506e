"""Pages of the documentation, and the tables of results in them."""

import re
from pathlib import Path

from benchmarks.report.tables import TABLES

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that have tables of results."""
    return [
        path for path in sorted(DOCS.rglob("*.md")) if table_names(path.read_text(encoding="utf-8"))
    ]


def table_names(text: str) -> list[str]:
    """Return the names of the tables in a page's text."""
    return [name for _, name, _ in BLOCK.findall(text)]


def with_tables(text: str) -> str:
    """Return a page's text with all its tables made anew.

    Raises
    ------
    KeyError
        The page names a table that `TABLES` lacks.
    """

    def rewritten(block: re.Match[str]) -> str:
        before, name, end = block.groups()
        return f"{before}\n{TABLES[name]()}\n\n{end}"

    return BLOCK.sub(rewritten, text)
