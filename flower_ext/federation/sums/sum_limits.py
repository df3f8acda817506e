"""Demands of a node's owner on masked sums, from the node config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flower_ext.errors import InvalidValue, tellable
from flower_ext.privacy.mechanisms.secure_sum import SumParameters
from flower_ext.secure.aggregation import Identities, RoundContext


@dataclass(frozen=True, kw_only=True)
class SumLimits:
    """Limits of one node on masked sums.

    Parameters
    ----------
    identities : Identities or None
        The node's signing key and the members' public keys. With them, the node takes part in
        signed sums only; without them, in unsigned sums only.
    least_members : int
        Least number of members whose vectors are in a sum.
    least_threshold_share : float
        Least share of a member's neighbours that must help to unmask it.
    colluders : int
        Number of other members that may collude with the server.
    least_honest : int
        Least number of vectors from members that do not collude, this one included, in every sum
        that may become known (`SumParameters.honest_answers`).
    """

    identities: Identities | None = None
    least_members: int = 0
    least_threshold_share: float = 0.0
    colluders: int = 0
    least_honest: int = 0

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
            colluders=int(node_config.get("sum-colluders", 0)),
            least_honest=int(node_config.get("least-honest-answers", 0)),
        )

    def check(self, context: RoundContext) -> None:
        """Refuse a sum that shows the server more than the owner permits.

        Raises
        ------
        PermissionError
            Fewer members than the owner permits, or a smaller share of a member's neighbours,
            suffice to unmask; or a sum of fewer honest members may become known.
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
        if self.least_honest > (honest := _honest_answers(context, self.colluders)):
            raise PermissionError(
                f"a sum of {honest} honest members may become known: the owner of this node "
                f"requires least-honest-answers={self.least_honest} with "
                f"sum-colluders={self.colluders}"
            )


def _honest_answers(context: RoundContext, colluders: int) -> int:
    """Return the least number of honest members in a sum; 0 if colluders can unmask a member."""
    if 2 * context.threshold <= context.neighbours + colluders:
        return 0
    return SumParameters(
        members=context.members,
        neighbors=context.neighbours,
        threshold=context.threshold,
        least_answers=context.least_answers,
        colluders=colluders,
        signed=context.signed,
    ).honest_answers
