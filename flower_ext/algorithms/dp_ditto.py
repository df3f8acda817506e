"""Deprecated name of `flower_ext.algorithms.ditto`, kept for one release."""

import warnings

from flower_ext.algorithms.ditto.dp_ditto import (
    GLOBAL_WEIGHT,
    DPDitto,
    drawn,
    local_model,
    local_update,
    personal_model,
)

__all__ = ["GLOBAL_WEIGHT", "DPDitto", "drawn", "local_model", "local_update", "personal_model"]

warnings.warn(
    "flower_ext.algorithms.dp_ditto is flower_ext.algorithms.ditto now: import from there",
    DeprecationWarning,
    stacklevel=2,
)
