"""A run's log without the tracebacks of errors that say in a sentence what to change."""

from __future__ import annotations

import re

_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|\x1b")
_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("The above exception was", "During handling of the above exception")
_EXPLAINED = re.compile(r"flower_ext\.[\w.]+: |ModuleNotFoundError: .*pip install 'flower-ext")
"""An error of this package, whose text the command prints at its end."""


def without_codes(line: str) -> str:
    """Return a line without the codes that colour it or move a cursor."""
    return _CODES.sub("", line)


class Tracebacks:
    """Takes a log's lines, and gives back those to show.

    A traceback is held back until the log goes on after it. It is then given back whole, or left
    out where its last error is explained.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._error = ""

    def shown(self, line: str) -> list[str]:
        """Take a line; return those that can be shown now."""
        plain = without_codes(line)
        if not self._held:
            if plain != _BEGIN:
                return [line]
        elif not self._error:
            if plain and not plain.startswith((" ", _BEGIN)):
                self._error = plain
        elif plain.startswith((_BEGIN, *_CHAINED)):
            self._error = ""
        elif plain:
            return [*self.rest(), *self.shown(line)]
        self._held.append(line)
        return []

    def rest(self) -> list[str]:
        """Return the lines that are still held back, at the end of the log."""
        held = [] if _EXPLAINED.match(self._error) else self._held
        self._held, self._error = [], ""
        return held
