"""Runs of ULDP-AVG with private weighting in this process."""

from dataclasses import replace

from flower_ext.federation.messages import records
from flower_ext.federation.sums import weighted_silo
from tests.support.private_silos import SMALL, vault


def kept(grid, number=0):
    """Return the state that a silo has stored."""
    return weighted_silo.stored_silo(vault(grid, number))


HIDDEN = replace(SMALL, draw_choices=5)

HEADS = {"weights": 12, "sum": 20}
"""Bytes of a message before its first field of bytes."""


def arrays(messages, record, name):
    """Return the named arrays of messages, without their heads, by message."""
    named_arrays = []
    for message in messages:
        sent = message.content.array_records.get(record)
        if sent is not None and name in sent:
            named_arrays.append(
                (message, records.to_arrays(sent)[name].tobytes()[HEADS.get(name, 0) :])
            )
    return named_arrays
