"""What a client keeps between rounds: personal head, personal model, control variate.

Kept in Flower's ``context.state``: for the length of a run in simulation, for the life of the
process on a SuperNode. Nothing here is ever put into a reply.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Context
from torch import Tensor

from flower_ext.federation.records import to_params, to_record
from flower_ext.training import Params


class ClientMemory:
    """One client's memory of one method."""

    def __init__(self, context: Context, method: str) -> None:
        self._state = context.state
        self._key = f"flower_ext.{method}"

    def load(self) -> Params | None:
        """What was stored last, or None in the client's first round."""
        if self._key not in self._state.array_records:
            return None
        return to_params(self._state.array_records[self._key])

    def store(self, params: Mapping[str, Tensor]) -> None:
        """Replace what is kept."""
        self._state[self._key] = to_record(params)
