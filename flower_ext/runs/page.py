"""Pages: Markdown with tables and figures, and the same as one self-contained HTML file.

In HTML, a part under a heading of the fourth level is folded, consecutive figures form a grid, and
wide tables scroll inside the page. On a narrow screen, each row of a table with many columns is a
list of names and values instead. The page follows the reader's dark or light system setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import count
from pathlib import Path

from flower_ext.runs.files import write_whole

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd; --code: #f4f4f4;
  --note: #fdf3ec; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --page: #16181c; --line: #3a3f47;
  --code: #24282f; --note: #33261c; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
p, ul, blockquote { max-width: 46rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.92em; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
.figures { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; background: #fff; border-radius: 4px; }
svg { display: block; width: 100%; height: auto; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; font-weight: 600; }
blockquote { margin: 1rem 0; padding: 0.1rem 1rem; border-left: 4px solid #D55E00;
  background: var(--note); }
code { background: var(--code); padding: 0.1em 0.3em; }
@media (max-width: 48rem) {
  table { overflow-wrap: anywhere; }
  table.many, .many tbody, .many tr { display: block; }
  .many thead { display: none; }
  .many tr { padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
  .many td { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 0.7rem;
    padding: 0.1rem 0; border: 0; }
  .many td::before { content: attr(data-column); opacity: 0.75; }
}
"""

_FEW = 3
"""Largest number of columns that fit on the screen of a phone."""


class Markup(str):
    """Text that already is Markdown; `table` does not escape it."""


def write_page(folder: Path, name: str, text: str, *, title: str) -> Path:
    """Write a report as Markdown and as HTML; return the path of the HTML."""
    write_whole(folder / f"{name}.md", (text + "\n").encode(), sync=False)
    path = folder / f"{name}.html"
    write_whole(path, to_html(text, title=title, folder=folder).encode(), sync=False)
    return path


def to_html(text: str, *, title: str, folder: Path) -> str:
    """Convert a Markdown report to one HTML page with inline SVG figures; raw HTML is escaped."""
    from markdown_it import MarkdownIt  # imports 60 modules, which clients do not need

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r"<table>.*?</table>", _narrowing, body, flags=re.DOTALL)
    body = body.replace("<th>", '<th scope="col">')
    body = re.sub(
        r"<h4>(.*?)</h4>\n(.*?)(?=<h[1-4]>|\Z)",
        r"<details><summary>\1</summary>\n\2</details>\n",
        body,
        flags=re.DOTALL,
    )

    def inline(match: re.Match[str]) -> str:
        svg = (folder / match["source"]).read_text(encoding="utf-8")
        drawing = svg[svg.index("<svg") + len("<svg") :]
        return f'<figure><svg role="img" aria-label="{match["title"]}"{drawing}</figure>'

    one = r'<p><img src="(?P<source>figures/[\w-]+\.svg)" alt="(?P<title>[^"]*)"[^>]*></p>'
    body = re.sub(one, inline, re.sub(f"(?:{_unnamed(one)}\n*)+", _grid, body))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


def _unnamed(pattern: str) -> str:
    return re.sub(r"\?P<\w+>", "?:", pattern)


def _narrowing(match: re.Match[str]) -> str:
    """Return a table that scrolls; if it has many columns, each cell names its own."""
    table = match[0]
    columns = [re.sub(r"<[^>]*>", "", name) for name in re.findall(r"<th>(.*?)</th>", table)]
    if len(columns) > _FEW:
        cells = count()

        def named(_: re.Match[str]) -> str:
            # The text between tags is escaped already, but for the quotes of attributes.
            column = columns[next(cells) % len(columns)].replace('"', "&quot;")
            return f'<td data-column="{column}">'

        table = re.sub("<td>", named, table.replace("<table>", '<table class="many">'))
    return f'<div class="table">{table}</div>'


def _grid(match: re.Match[str]) -> str:
    return f'<div class="figures">\n{match[0]}</div>\n'


def escaped(text: str) -> str:
    """Return text as Markdown that shows it literally: no link, image, emphasis or markup."""
    return re.sub(r"([\\`*\[\]<&])", r"\\\1", text)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all cells but `Markup` are shown literally."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    text = value if isinstance(value, Markup) else escaped(str(value))
    return " ".join(text.replace("|", "\\|").splitlines())
