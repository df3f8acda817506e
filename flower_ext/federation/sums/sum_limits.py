"""Demands of a node's owner on masked sums, from the node config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flower_ext.errors import InvalidValue, tellable
from flower_ext.secure.aggregation import Identities, RoundContext


@dataclass(frozen=True, kw_only=True)
class SumLimits:
    """Limits of one node on masked sums.

    Parameters
    ----------
    identities : Identities or None
        With them, the node takes part in signed sums only; without, in unsigned ones only.
    least_members : int
        Least number of members whose vectors are in a sum.
    least_threshold_share : float
        Least share of a member's neighbours that must help to unmask it.
    """

    identities: Identities | None = None
    least_members: int = 0
    least_threshold_share: float = 0.0

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> SumLimits:
        """Read the limits of a node.

        Raises
        ------
        InvalidValue
            Only one of ``sum-identity-key`` and ``sum-members`` is set, or a file is unreadable.
        """
        key, members = (node_config.get(name) for name in ("sum-identity-key", "sum-members"))
        if (key is None) != (members is None):
            raise tellable(
                InvalidValue("node config: expected both sum-identity-key and sum-members, or none")
            )
        return cls(
            identities=None if key is None else Identities.read(str(key), str(members)),
            least_members=int(node_config.get("least-sum-members", 0)),
            least_threshold_share=float(node_config.get("least-sum-threshold-share", 0.0)),
        )

    def check(self, context: RoundContext) -> None:
        """Refuse a sum that shows the server more than the owner permits.

        Raises
        ------
        PermissionError
            Fewer members, or a smaller share of a member's neighbours, suffice to unmask.
        """
        if context.least_answers < self.least_members:
            raise PermissionError(
                f"the server may unmask a sum of {context.least_answers} members: the owner of "
                f"this node requires least-sum-members={self.least_members}"
            )
        if context.threshold < self.least_threshold_share * context.neighbours:
            raise PermissionError(
                f"{context.threshold} of {context.neighbours} neighbours may unmask this client: "
                "the owner of this node requires "
                f"least-sum-threshold-share={self.least_threshold_share:g}"
            )
