"""Entries of training messages for this package's mods, which run before a foreign ClientApp."""

from typing import Any

from flwr.app import ConfigRecord, Message

from flower_ext.federation.messages import records

FOR_MODS = "flower-ext/"
"""Prefix of settings for this package's mods, which read them and take them out of the message."""
PARTITION_QUESTION = "identity"
"""Entry of a training message without a model, which asks a mod for the node's partition."""
REHEARSAL = "rehearsal"
"""Entry of a training message before the first round: the server will drop the update."""


def entries_for_mods(message: Message) -> dict[str, Any]:
    """Return a message's entries for this package's mods, which run before a foreign ClientApp."""
    config = message.content.get(records.CONFIG)
    settings = config if isinstance(config, ConfigRecord) else {}
    return {
        name.removeprefix(FOR_MODS): value
        for name, value in settings.items()
        if name.startswith(FOR_MODS)
    }


def asks_identity(message: Message) -> bool:
    """Return True if a plain training message only asks a mod for its node's partition."""
    return PARTITION_QUESTION in entries_for_mods(message)


def is_rehearsal(message: Message) -> bool:
    """Return True if the server only wants to know whether a ClientApp can train."""
    return REHEARSAL in entries_for_mods(message)
