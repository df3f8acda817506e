"""Pages of the documentation, and the fenced blocks in them.

HTML comments, which no reader sees, steer what is run:

``<!-- setup`` … ``-->``
    Python that runs in its place, as what a reader has already: data, a model, a shorter run.
``<!-- setup: PAGE#SECTION -->``
    The Python of that section, for pages that tell the reader to begin with it.
``<!-- check`` … ``-->``
    Python that runs in its place and asserts what the page says.
``<!-- not run: REASON -->``
    The next block is not run.

``<!-- full -->`` anywhere in a page moves it to ``make test-all``. A block ``output`` holds what
the page's blocks have printed since the last one.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_COMMENT = re.compile(r"<!--\s*(setup:|setup|check|not run:|full)(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment with Python in it.

    ``kind`` is the language of the fence, ``setup`` or ``check``; ``line`` that of its first line
    of code; ``section`` the anchor of the heading above it; ``skipped`` the reason in a comment
    right before it.
    """

    page: Path
    kind: str
    line: int
    code: str
    section: str = ""
    skipped: str = ""

    @property
    def name(self) -> str:
        """Page and line, as editors take it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All pages that people read: README, CONTRIBUTING, those of site, apps and plug-ins."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    others = [*ROOT.glob("apps/*/README.md"), *ROOT.glob("plugins/*/README.md")]
    return [*top, *sorted(DOCS.rglob("*.md")), *sorted(others)]


@cache  # parsing takes longer than most tests of a page
def blocks(page: Path) -> list[Block]:
    """All blocks of ``page`` in their order."""
    page_blocks: list[Block] = []
    reason = section = ""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            section = anchor(following.content)
        if token.map is None:
            continue
        line = token.map[0] + 2
        if token.type == "html_block":
            for kind, text in _COMMENT.findall(token.content):
                if kind == "not run:":
                    reason = text.strip()
                elif kind == "setup:":
                    page_blocks += _of_section(page, text.strip())
                elif kind != "full":
                    page_blocks.append(Block(page, kind, line, text.strip("\n") + "\n", section))
        elif token.type in ("fence", "code_block"):
            kind = token.info.split()[0] if token.info.strip() else ""
            page_blocks.append(Block(page, kind, line, token.content, section, reason))
            reason = ""
    return page_blocks


def _of_section(page: Path, target: str) -> list[Block]:
    """Return the Python blocks of another page's section, as a setup."""
    path, _, section = target.partition("#")
    other = (page.parent / path).resolve()
    section_blocks = [b for b in blocks(other) if b.kind == "python" and b.section == section]
    assert section_blocks, f"{page}: no Python below {target}"
    return [replace(block, kind="setup") for block in section_blocks]


def anchor(heading: str) -> str:
    """Return what a heading is linked by, as MkDocs makes it."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def is_full(page: Path) -> bool:
    """Return True if the page is too slow for ``make test``."""
    return "<!-- full -->" in page.read_text(encoding="utf-8")


def commands(block: Block) -> list[str]:
    """Commands of a block, continued lines joined and comments dropped."""
    text = re.sub(r"\\\n\s*", " ", block.code)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


def links(page: Path) -> list[tuple[str, str]]:
    """Targets of relative links in ``page``: path and anchor, "" where there is none."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    own_links = (t for t in targets if not re.match(r"[a-z]+:", t))
    return [(path, anchor) for path, _, anchor in (t.partition("#") for t in own_links)]
