"""Hide tracebacks in a run's log if the error's own message says what to change."""

from __future__ import annotations

import re
from importlib import import_module

from flower_ext.errors import InvalidValue

_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|\x1b")
_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("The above exception was", "During handling of the above exception")
_EXPLAINED = re.compile(r"flower_ext\.[\w.]+: |ModuleNotFoundError: .*pip install 'flower-ext")
"""Last line of an error of this package; the command prints that error's message at its end."""


def without_codes(line: str) -> str:
    """Return a line without codes that set colours or move the cursor."""
    return _CODES.sub("", line)


def _is_refusal(error: str) -> bool:
    """Return True if the last line of a traceback names an `InvalidValue` of this package."""
    module, _, name = error.partition(":")[0].rpartition(".")
    if not module.startswith("flower_ext."):
        return False
    kind = getattr(import_module(module), name, None)
    return isinstance(kind, type) and issubclass(kind, InvalidValue)


class Tracebacks:
    """A filter that takes the lines of a log and returns the lines to show.

    The filter holds a traceback back until the next line after it. It then returns the traceback
    whole, or drops it if the message of its last error explains what to change.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._error = ""
        self.refused = False
        """True if the last error of a traceback was a refused value."""

    def shown(self, line: str) -> list[str]:
        """Take a line; return the lines that can be shown now."""
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
        """Return the lines that the filter still holds at the end of the log."""
        held = [] if _EXPLAINED.match(self._error) else self._held
        self.refused = self.refused or _is_refusal(self._error)
        self._held, self._error = [], ""
        return held
