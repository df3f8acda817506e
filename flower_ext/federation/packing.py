"""Pack messages to several clients into one message to their node, and their replies into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

PACKED = "packed"
"""Last part of the type of a packed message, and name of the record that lists its contents."""

Record = ArrayRecord | ConfigRecord | MetricRecord


def packed(contents: Sequence[RecordDict], entries: Mapping[str, Any]) -> RecordDict:
    """Return several contents and their entries as one content; send a shared record once."""
    numbers: dict[int, int] = {}
    every: dict[str, Record] = {}
    names: list[str] = []
    for content in contents:
        for record in content.values():
            if id(record) not in numbers:
                numbers[id(record)] = len(numbers)
                every[str(numbers[id(record)])] = record
        names.append("\n".join(f"{numbers[id(record)]} {name}" for name, record in content.items()))
    every[PACKED] = ConfigRecord({**entries, "records": names})
    return RecordDict(every)


def unpacked(content: RecordDict) -> tuple[list[RecordDict], Mapping[str, Any]]:
    """Undo `packed`; contents with the same records become one object."""
    envelope: Mapping[str, Any] = content.config_records[PACKED]
    known: dict[str, RecordDict] = {}
    for names in envelope["records"]:
        if names not in known:
            pairs = (line.partition(" ") for line in names.splitlines())
            known[names] = RecordDict({name: content[number] for number, _, name in pairs})
    return [known[names] for names in envelope["records"]], envelope
