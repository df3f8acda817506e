"""The proof that a commit changes words only finds every change of code."""

import pytest

from tests.support.same_code import compare

BEFORE = '''
"""What a module is."""

import warnings

SCALE = 2.0
"""How large."""


def scaled(value: float, *, unit: str = "metres") -> str:
    """What a value is."""
    if value < 0:
        raise ValueError(f"value={value!r}: below {SCALE:g}, told 'no'")  # a comment
    warnings.warn("old words", stacklevel=2)
    return f"{value * SCALE:.2f} of {unit}"
'''


def test_new_words_in_docstrings_comments_and_messages_are_the_same_code():
    after = (
        BEFORE.replace("What a", "Describe a")
        .replace("How large", "The scale")
        .replace("  # a comment", "")
        .replace("below {SCALE:g}, told 'no'", "expected at least {SCALE:g}")
        .replace('f"value={value!r}: ', 'f"value={value!r}: "\n            f"')
        .replace("old words", "new words")
    )
    assert compare(BEFORE, after) == (True, [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value < 0", "value <= 0"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("value * SCALE:", "value / SCALE:"),
        (":.2f", ":.3f"),
        ("{value!r}", "{value}"),
        ("below {SCALE:g}", "below 2"),
        ("ValueError", "TypeError"),
        ("stacklevel=2", "stacklevel=3"),
        ("unit: str", "units: str"),
        ("    warnings.warn", "    # warnings.warn"),
    ],
)
def test_a_change_of_code_is_found(old, new):
    assert BEFORE.count(old) == 1
    assert not compare(BEFORE, BEFORE.replace(old, new))[0]


@pytest.mark.parametrize("revisions", [(BEFORE, None), (None, BEFORE)])
def test_a_file_that_one_revision_lacks_is_a_change_of_code(revisions):
    assert not compare(*revisions)[0]


def test_a_changed_name_is_listed_for_a_reader():
    after = BEFORE.replace('"metres"', '"feet"').replace("told 'no'", "refused")
    assert compare(BEFORE, after) == (True, ["- 'metres'", "+ 'feet'"])
