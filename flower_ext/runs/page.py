"""Pages: Markdown with tables and figures, and a self-contained HTML file with the same content.

In HTML, the text under a heading of the fourth level is folded, consecutive figures form a grid,
and wide tables scroll inside the page. The page is dark or light, as the reader's system is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_ext.files import write_whole
from flower_ext.privacy import epsilon_text

if TYPE_CHECKING:
    from jinja2 import Environment


class Markup(str):
    """Text that already is Markdown; tables and templates do not escape it."""


def write_page(folder: Path, name: str, **values: Any) -> Path:
    """Write a page from the template ``name`` as Markdown and HTML; return the path of the HTML.

    ``values`` are the values that the template uses; one of them is ``title``.
    """
    text = to_markdown(name, **values)
    write_whole(folder / f"{name}.md", text.encode(), sync=False)
    path = folder / f"{name}.html"
    page = to_html(text, title=str(values["title"]), folder=folder)
    write_whole(path, page.encode(), sync=False)
    return path


def to_markdown(name: str, package: str = "flower_ext.runs", **values: Any) -> str:
    """Return the Markdown of a template of ``package``, filled in with ``values``."""
    text = _templates(package).get_template(f"{name}.md.jinja").render(values)
    # Omitted parts of a template leave empty lines.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _templates(package: str = "flower_ext.runs") -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
    )
    templates.globals["table"] = table
    templates.filters |= {
        "as_is": Markup,
        "epsilon": epsilon_text,
        "fixed": lambda value, digits: f"{value:.{digits}f}",
        "digits": lambda value, digits: f"{value:.{digits}g}",
    }
    return templates


def to_html(text: str, *, title: str, folder: Path) -> str:
    """Convert a Markdown report to one HTML page with inline SVG figures; raw HTML is escaped."""
    from markdown_it import MarkdownIt  # imports 60 modules, which clients do not need

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="table"><table>').replace(
        "</table>", "</table></div>"
    )
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

    # Put the figures inside the page, so that the page is a single file.
    figure = r'<p><img src="(?P<source>figures/[\w-]+\.svg)" alt="(?P<title>[^"]*)"[^>]*></p>'
    consecutive = re.sub(r"\?P<\w+>", "?:", figure)
    body = re.sub(f"(?:{consecutive}\n*)+", r'<div class="figures">\n\g<0></div>\n', body)
    body = re.sub(figure, inline, body)
    page = _templates().get_template("page.html.jinja")
    return page.render(title=Markup(escape(title)), body=Markup(body)) + "\n"


def escaped(text: str) -> str:
    """Return text as Markdown that shows it literally: no link, image, emphasis or markup."""
    return re.sub(r"([\\`*\[\]<&])", r"\\\1", text)


def table(header: Sequence[object], rows: Iterable[Sequence[Any]]) -> Markup:
    """Return a Markdown table, which shows all cells literally, except cells of type `Markup`."""

    def cell(value: object) -> str:
        text = value if isinstance(value, Markup) else escaped(str(value))
        return " ".join(text.replace("|", "\\|").splitlines())

    lines = [header, ["---"] * len(header), *rows]
    return Markup("\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines))
