"""What a client keeps between rounds: personal head, personal model, control variate.

Kept in Flower's ``context.state``: for the length of a run in simulation, for the life of the
process on a SuperNode. Nothing here is ever put into a reply.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord, Context
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
        kept = self._state.get(self._key)
        return to_params(kept) if isinstance(kept, ArrayRecord) else None

    def store(self, params: Mapping[str, Tensor]) -> None:
        """Replace what is kept."""
        own = {name: value.clone() for name, value in params.items()}  # not a row of a batch
        self._state[self._key] = to_record(own)
