"""A site's policy: a TOML file in which the site's operator says what may leave the site."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flower_ext.checks import (
    is_number,
    require_at_least_one,
    require_count,
    require_one_of,
    require_positive,
    require_scale,
)
from flower_ext.errors import InvalidValue
from flower_ext.files import from_table, read_toml
from flower_ext.privacy import Budget, FullParticipation, NeighboringRelation, Release
from flower_ext.secure.aggregation.identities import Identities

UPDATE, CONTRIBUTION = "clipped-noised-update", "secure-sum-contribution"
CONSTANTS = "constants"
TRAIN = "train"
"""Type of the messages that ask for training; only these may ask for a contribution to a sum."""
ANY = "any"
NAMESPACES, NOT_ISOLATED = "namespaces", "none"


class Refused(Exception):
    """A refusal whose text may reach the server, because it depends on no data of the site."""


@dataclass(frozen=True, kw_only=True)
class MessagePolicy:
    """Rules for the replies to one type of message."""

    release: str
    """Content of the reply. "clipped-noised-update": an update that the guard bounds and noises.
    "secure-sum-contribution": an update that the guard bounds, noises and also masks, so that only
    a sum over sites becomes known. "constants": only the ``constants``; no app runs."""
    clipping_norm: float = 0.0
    """Largest L2 norm of the update, over all its arrays together. For a contribution to a sum,
    leave it out, because the server chooses this norm."""
    noise_multiplier: float = 0.0
    """Standard deviation of the guard's noise, divided by the clipping norm. For a contribution, it
    is the smallest multiplier that the server may ask for."""
    arrays: str | list[str] = "all"
    """Arrays of the request that the app may update: "all", or names. The guard sends all other
    arrays, and those that are not floating-point, as it received them."""
    constants: Mapping[str, int | float] = field(default_factory=dict)
    """Public numbers for the reply's only MetricRecord. The app's own metrics never leave."""

    def __post_init__(self) -> None:
        require_one_of("release", self.release, [UPDATE, CONTRIBUTION, CONSTANTS])
        for name, value in self.constants.items():
            if not (is_number(value) and math.isfinite(value)):
                raise InvalidValue(f"constants.{name}={value!r}: expected a finite number")
        if self.release == UPDATE:
            require_scale("clipping-norm", self.clipping_norm)
            require_scale("noise-multiplier", self.noise_multiplier)
            if self.arrays != "all" and not isinstance(self.arrays, list):
                raise InvalidValue(f'arrays={self.arrays!r}: expected "all" or a list of names')
        elif self.release == CONTRIBUTION:
            require_scale("noise-multiplier", self.noise_multiplier)
            if self.clipping_norm or self.constants or self.arrays != "all":
                raise InvalidValue(
                    f'release="{CONTRIBUTION}": remove clipping-norm, constants and arrays; the '
                    "server sets the clipping norm, and only the contribution leaves"
                )
        elif self.clipping_norm or self.noise_multiplier or self.arrays != "all":
            raise InvalidValue(
                f'release="{CONSTANTS}": remove clipping-norm, noise-multiplier and arrays; the '
                "reply holds no arrays"
            )

    def covers(self, name: str) -> bool:
        """Return True if the app may update this array."""
        return self.arrays == "all" or name in self.arrays

    def spend(self, sites: int = 0) -> Release:
        """Return the `Release` that stands for one reply in accounting; the unit is the whole site.

        ``sites`` is the number of sites whose noise is in each sum, from `GuardPolicy.noised_by`.
        """
        return Release(
            sampling=FullParticipation(1),
            noise_multiplier=self.noise_multiplier * math.sqrt(sites or 1),
            relation=NeighboringRelation.REPLACE_ONE,
        )


@dataclass(frozen=True, kw_only=True)
class SumPolicy:
    """The secure sums, with signed keys, in which a site takes part."""

    identity_key: str
    """File of this site's Ed25519 key, as ``ssh-keygen -t ed25519`` writes it."""
    members: str
    """File of the public keys of all sites."""
    colluders: int
    """Number of other sites that may collude with the server."""
    honest_answers: int
    """Least number of sites that do not collude, this site included, in every sum that becomes
    known. A guarantee for the sums counts the noise of all these sites, so each of them must demand
    at least the noise of this policy."""

    def __post_init__(self) -> None:
        require_count("colluders", self.colluders)
        require_at_least_one("honest-answers", self.honest_answers)
        Identities.read(self.identity_key, self.members)

    @property
    def node_config(self) -> dict[str, str | int]:
        """The policy as settings of a node config; see `federation.sums.masked`."""
        return {
            "sum-identity-key": self.identity_key,
            "sum-members": self.members,
            "sum-colluders": self.colluders,
            "least-honest-answers": self.honest_answers,
        }


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """Everything that a site permits. The guard refuses everything else."""

    apps: str | list[str]
    """Either "any", or the SHA-256 of each permitted app's FAB, as ``sha256sum`` prints it."""
    ledger: Path
    """The site's privacy account, which the guard charges before a reply that uses data leaves."""
    budget: Budget
    """The most that all replies of the site may spend together."""
    messages: Mapping[str, MessagePolicy]
    """Permitted types of messages, such as "train"."""
    sum: SumPolicy | None = None
    """The secure sums in which the site takes part; needed for a "secure-sum-contribution"."""
    timeout: float
    """Seconds after which the guard ends an app."""
    reply_after: float | None = None
    """Seconds from a message's arrival to its reply, always the same and above ``timeout``. Without
    this setting, the time of the reply shows how long the app ran."""
    answer_limit: int = 1 << 30
    """Largest number of bytes of an app's answer."""
    scratch_limit: int = 1 << 30
    """Largest number of bytes of all files that the app writes, with isolation "namespaces"."""
    isolation: str | list[str] = NAMESPACES
    """Isolation of the app's process: "namespaces" or "none". A list is the beginning of a command,
    such as the command that starts a container; the guard adds the app's command to it."""
    readable: list[str] = field(default_factory=list)
    """Files and folders with data that the app may read. Python's folders need not be listed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the app."""
    path: Path
    """The policy's file. The guard derives the names of its other files from this name."""

    def __post_init__(self) -> None:
        require_positive("timeout", self.timeout)
        if self.reply_after is not None and not self.reply_after > self.timeout:
            raise InvalidValue(
                f"reply-after={self.reply_after!r}: expected more than timeout={self.timeout:g}, "
                "because the guard adds noise after the app has ended"
            )
        require_at_least_one("answer-limit", self.answer_limit)
        require_at_least_one("scratch-limit", self.scratch_limit)
        if self.apps != ANY and not (isinstance(self.apps, list) and all(map(_is_hash, self.apps))):
            raise InvalidValue(f'apps={self.apps!r}: expected "{ANY}" or a list of SHA-256 hashes')
        if isinstance(self.isolation, str):
            require_one_of("isolation", self.isolation, [NAMESPACES, NOT_ISOLATED])
        if not self.messages:
            raise InvalidValue("messages={}: expected at least one, such as [messages.train]")
        for name, rule in self.messages.items():
            if rule.release == CONTRIBUTION and (name != TRAIN or self.sum is None):
                raise InvalidValue(
                    f'[messages.{name}] has release="{CONTRIBUTION}": expected this release only '
                    f"in [messages.{TRAIN}], and only if the policy has a section [sum]"
                )

    def check_app(self, digest: str) -> None:
        """Refuse an app that the policy does not list; the text names its SHA-256."""
        if self.apps != ANY and digest not in self.apps:
            raise Refused(
                f"this site does not permit the app {digest}: ask its operator"
                " to add this SHA-256 to apps in the policy"
            )

    def of(self, message_type: str) -> MessagePolicy:
        """Return the rules for the replies to messages of a type; refuse unlisted types."""
        if message_type not in self.messages:
            raise Refused(f"this site does not answer messages of the type {message_type!r}")
        return self.messages[message_type]

    def noised_by(self, rule: MessagePolicy) -> int:
        """Return how many sites, at least, noise each sum under ``rule``; 0 without such sums."""
        if rule.release != CONTRIBUTION:
            return 0
        assert self.sum is not None
        return self.sum.honest_answers


def read_policy(path: Path) -> GuardPolicy:
    """Read a policy from a TOML file, whose names have hyphens in place of underscores.

    An error names the file, the field and the values allowed.
    """
    values, path = read_toml(path), path.absolute()
    try:
        budget = from_table(Budget, values.pop("budget", {}), "[budget]")
        require_positive("epsilon", budget.epsilon)
        if budget.ledger is not None:
            raise InvalidValue("[budget] sets 'ledger': set it at the top of the policy instead")
        messages = {
            name: from_table(MessagePolicy, table, f"[messages.{name}]")
            for name, table in values.pop("messages", {}).items()
        }
        if (table := values.pop("sum", None)) is not None:
            values["sum"] = from_table(SumPolicy, table, "[sum]")
        ledger = path.parent / str(values.pop("ledger", "ledger.jsonl"))
        parts = {"budget": budget, "messages": messages, "ledger": ledger, "path": path}
        return from_table(GuardPolicy, {**values, **parts}, "the policy")
    except InvalidValue as error:
        raise InvalidValue(f"{path}: {error}") from None


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text) is not None
