"""Errors of contradicting settings, in the words of the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flower_ext.errors import InvalidValue
from flower_ext.runs.settings import Settings, UnfitSetting


@contextmanager
def naming_settings(settings: Settings) -> Iterator[None]:
    """Replace an error about a field by an error about the setting of the same name."""
    try:
        yield
    except InvalidValue as error:
        field, separator, rest = str(error).partition("=")
        if not separator or not hasattr(settings, field):
            raise
        raise UnfitSetting(f"run-config {field.replace('_', '-')}={rest}") from error


def with_method(settings: Settings) -> str:
    """Name the method in a message, if the app has several."""
    method = getattr(settings, "method", None)
    return "" if method is None else f" with method={method!r}"
