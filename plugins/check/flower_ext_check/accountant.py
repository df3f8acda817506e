"""An accountant of this package for Flower's own privacy strategies.

Use it wherever Flower's `PrivacyAccountant` protocol is used::

    accountant = PldAccountant(config, ledger=Ledger(Path("ledger.jsonl")))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(...), noise_multiplier=2.0, clipping_norm=1.0, num_sampled_clients=20,
        accountant=accountant,
    )

`docs/flower-privacy.md` describes each of these strategies, and the faults in them that no
accountant can repair.
"""

import math
from collections import Counter
from typing import Any

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent, SamplingMethod

from flower_ext.checks import require_at_least_one, require_not_negative, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Guarantee,
    Ledger,
    NeighboringRelation,
    PrivacyUnit,
    Release,
    privacy_loss_of,
)
from flower_ext.privacy.account_entries import RESERVE

_LEAST_DELTA = 1e-300

_ASSUMPTIONS = (
    "the server adds the noise, follows the protocol and keeps uploads to itself",
    "the number of clients that a round asks is public; a client's answer, or its absence, depends "
    "on no other client's data",
    "one client's part in a release is at most one clipping norm divided by a public constant: "
    "updates are clipped and finite, all arrays have a dimension (Flower clips no others), all "
    "weights are equal, and every client that is asked answers",
    "the noise of Flower's strategies counts as real Gaussian numbers: it is drawn in floating "
    "point, on no grid, by NumPy's global generator, which is not cryptographic",
)
_NOT_COVERED = (
    "metrics of training and evaluation, and numbers of examples, which Flower averages un-noised",
    "whether and when each client answered",
)


class PldAccountant:
    """An accountant for Flower's strategies: exact Gaussian composition, without amplification.

    Flower's strategies ask a fixed number of clients, so a new client can only take the place of
    another. The neighbouring relation of every ε is therefore replace-special (see
    `NeighboringRelation`), whatever ``config`` claims.

    Parameters
    ----------
    config : PrivacyConfig
        Its ``max_epsilon`` is the budget: Flower calls `would_exceed` before clients train.
    ledger : Ledger, optional
        Records every release before it leaves the strategy. Releases that the ledger already holds
        count, too, so a run that is started again continues from what it has spent.

    Raises
    ------
    InvalidValue
        The configuration asks for amplification; or the ledger has its own budget, or holds
        releases of a different configuration.
    """

    def __init__(self, config: PrivacyConfig, *, ledger: Ledger | None = None) -> None:
        if config.sampling_method is not SamplingMethod.NO_AMPLIFICATION:
            raise InvalidValue(
                f"sampling_method={config.sampling_method.value!r}: expected 'no-amplification', "
                "because Flower's strategies draw nodes by Python's predictable random. Other "
                "sampling methods lower ε only if nobody can know a cohort; for that, use a "
                "ReleasePlan of this package in place of Flower's strategies"
            )
        if ledger is not None and ledger.budget is not None:
            raise InvalidValue(
                "ledger.budget: expected None; set the budget as PrivacyConfig.max_epsilon, which "
                "Flower checks before clients train"
            )
        self._config, self._ledger = config, ledger
        self._releases: Counter[Release] = Counter()
        for entry in [] if ledger is None else Ledger.read(ledger.path):
            if entry["kind"] == RESERVE:
                self._releases[self._checked(Release.from_dict(entry["release"]))] += 1

    @property
    def config(self) -> PrivacyConfig:
        """The configuration of this accountant."""
        return self._config

    @property
    def num_releases(self) -> int:
        """The number of releases so far, including earlier ones in the ledger."""
        return self._releases.total()

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Charge ``count`` equal releases, and write them to the ledger if there is one.

        Raises
        ------
        InvalidValue
            The event's population size is not the configuration's, or ``count`` is not an integer
            above 0.
        OSError
            The ledger cannot be written. The caller must release nothing.
        """
        release = self._release_of(event, count)
        for _ in range(count):
            if self._ledger is not None:
                with self._ledger.reserve(
                    release, server_round=self._ledger.releases + 1
                ) as reservation:
                    reservation.note(cohort=event.sample_size)
            self._releases[release] += 1

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on ε of all releases at ``delta``."""
        return privacy_loss_of(self._releases, delta=delta).epsilon

    def get_delta(self, epsilon: float) -> float:
        """Return an upper bound on δ of all releases at ``epsilon``.

        The bound is at least 1e-300, or 0 if there are no releases.
        """
        require_not_negative("epsilon", epsilon)
        if not self._releases:
            return 0.0
        if self.get_epsilon(_LEAST_DELTA) <= epsilon:
            return _LEAST_DELTA
        low, high = math.log(_LEAST_DELTA), 0.0  # at δ = 1 everything is private
        while high - low > 1e-6:
            middle = (low + high) / 2
            if math.exp(middle) < 1 and self.get_epsilon(math.exp(middle)) <= epsilon:
                high = middle
            else:
                low = middle
        return math.exp(high)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return ε of all releases at ``delta``, by default the configuration's δ."""
        target = self._config.target_delta if delta is None else delta
        loss = privacy_loss_of(self._releases, delta=target)
        return PrivacySpent(loss.epsilon, target, self.num_releases, loss.accountant)

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Return True if ``count`` more releases would exceed ``max_epsilon``.

        Raises
        ------
        InvalidValue
            Neither the call nor the configuration has a budget; or `compose` would refuse the
            event or the count.
        """
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise InvalidValue(
                "max_epsilon=None: expected a budget, in this call or in "
                "PrivacyConfig(max_epsilon=...)"
            )
        require_positive("max_epsilon", limit)
        after = self._releases + Counter({self._release_of(event, count): count})
        return privacy_loss_of(after, delta=self._config.target_delta).epsilon > limit

    def guarantee(self) -> Guarantee:
        """Return the guarantee after the releases so far, with all its assumptions."""
        spent = self.get_privacy_spent()
        return Guarantee(
            unit=PrivacyUnit.CLIENT,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            view=AdversaryView.RELEASED_MODELS,
            epsilon=spent.epsilon,
            delta=spent.delta,
            basis="provable",
            accountant=spent.accounting_method,
            source=f"{self.num_releases} Gaussian releases reported by the strategy",
            assumptions=_ASSUMPTIONS,
            not_covered=_NOT_COVERED,
            units=self._config.population_size,
        )

    def state_dict(self) -> dict[str, object]:
        """Return all releases, ready for JSON."""
        counts = self._releases.items()
        return {"releases": [{"release": r.to_dict(), "count": count} for r, count in counts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned. With a ledger, keep the ledger's releases.

        The releases in a ledger are newer than those in the state.

        Raises
        ------
        InvalidValue
            The state belongs to a different configuration, or cannot be read.
        LedgerCorrupt
            The ledger holds fewer releases than the state.
        """
        releases: Counter[Release] = Counter()
        try:
            for entry in state["releases"]:
                require_at_least_one("count", entry["count"])
                releases[self._checked(Release.from_dict(entry["release"]))] += entry["count"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue(
                f"state of the accountant: {error}; expected what state_dict of an accountant with "
                "the same PrivacyConfig returned"
            ) from error
        if self._ledger is None:
            self._releases = releases
        else:
            self._ledger.check_holds(releases.total())

    def _release_of(self, event: GaussianPrivacyEvent, count: int) -> Release:
        require_at_least_one("count", count)
        if event.population_size != self._config.population_size:
            raise InvalidValue(
                f"population_size={event.population_size} of the event: expected "
                f"{self._config.population_size}, as in the configuration"
            )
        return self._release(event.noise_multiplier)

    def _release(self, noise_multiplier: float) -> Release:
        return Release(
            sampling=FullParticipation(self._config.population_size),
            noise_multiplier=noise_multiplier,
            relation=NeighboringRelation.REPLACE_SPECIAL,
        )

    def _checked(self, release: Release) -> Release:
        """Return a stored release; refuse a release of a different configuration."""
        if release != self._release(release.noise_multiplier):
            raise InvalidValue(
                f"the ledger or the state holds a release ({release.to_dict()!r}) of another "
                "configuration: give each run its own ledger and state"
            )
        return release
