"""Grids of which ``make test`` runs some cases, and ``make test-all`` all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], daily: Callable[[Any], bool]) -> list[Any]:
    """Mark as ``full`` the cases that are not ``daily``: those differ in kind, the others in value.

    Parameters
    ----------
    cases : Iterable
        As `pytest.mark.parametrize` takes them.
    daily : Callable[[Any], bool]
        Is given a case; of a `pytest.param` its id.
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
