"""Grids of test cases: ``make test`` runs some of them, ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], daily: Callable[[Any], bool]) -> list[Any]:
    """Mark all cases but the ``daily`` ones as ``full``.

    Daily cases differ from each other in kind; the others repeat a kind with other values.

    Parameters
    ----------
    cases : Iterable
        Cases as for `pytest.mark.parametrize`.
    daily : Callable[[Any], bool]
        Returns True for a daily case; its argument is the case, or the id of a `pytest.param`.
    """
    marked = []
    for case in cases:
        named = hasattr(case, "marks")
        if daily(case.id if named else case):
            marked.append(case)
            continue
        values = case.values if named else case if isinstance(case, tuple) else (case,)
        name = case.id if named else None
        marked.append(pytest.param(*values, id=name, marks=pytest.mark.full))
    return marked
