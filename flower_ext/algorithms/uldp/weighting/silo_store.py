"""Storage of a silo of private weighting between messages, each of which may reach a new process.

The silo's state is in the client's vault, with the protocol's name and the run's settings. Every
step starts from the stored state, and stores its outcome before anything leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flower_ext.federation import ClientVault
from flower_ext.secure.weighting.party_settings import PartySettings

SettingsT = TypeVar("SettingsT", bound=PartySettings)


@dataclass(frozen=True, kw_only=True)
class StoredSilo:
    """A silo as its vault holds it."""

    protocol: str
    settings: Mapping[str, Any]
    state: bytes

    @classmethod
    def read(cls, stored: bytes) -> StoredSilo:
        """Undo `to_bytes`."""
        values = json.loads(stored)
        return cls(
            protocol=values["protocol"],
            settings=values["settings"],
            state=values["state"].encode(),
        )

    def to_bytes(self) -> bytes:
        """Return JSON."""
        values = {
            "protocol": self.protocol,
            "settings": self.settings,
            "state": self.state.decode(),
        }
        return json.dumps(values).encode()


class VaultWriter:
    """Stores a silo in the vault of the message that is being answered, whenever it changes."""

    def __init__(self, protocol: str, settings: PartySettings, vault: ClientVault) -> None:
        self._protocol, self._settings = protocol, settings_to_values(settings)
        self.vault = vault

    def __call__(self, state: bytes) -> None:
        """Store a silo's state."""
        silo = StoredSilo(protocol=self._protocol, settings=self._settings, state=state)
        self.vault.store(silo.to_bytes())


def settings_to_values(settings: PartySettings) -> dict[str, Any]:
    """Return the settings of a run as plain values, without those that are None."""
    fields = {name: value for name, value in asdict(settings).items() if value is not None}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in fields.items()}


def settings_from_values(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Undo `settings_to_values`.

    Raises
    ------
    ValueError
        As ``kind``.
    """
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**fields)
