"""An accountant of this package for Flower's `PrivacyAccountant` protocol.

Use it in Flower's own strategies, and in others that use this protocol::

    config = PrivacyConfig(
        target_delta=1e-5,
        population_size=100,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
        max_epsilon=4.0,
    )
    accountant = PldAccountant(config, ledger=Ledger(Path("ledger.jsonl")))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(...), noise_multiplier=2.0, clipping_norm=1.0, num_sampled_clients=20,
        accountant=accountant,
    )

`flower_events` lists how the accountant treats each event. `docs/flower-privacy.md` describes each
of Flower's strategies, and the faults in them that no accountant can repair.
"""

from __future__ import annotations

import math
from collections import Counter

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent, SamplingMethod

from flower_ext.checks import require_not_negative, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.federation.flower_events import (
    check_count,
    event_of,
    read_state,
    relation_of,
    release_of,
    write_state,
)
from flower_ext.privacy import (
    AdversaryView,
    Guarantee,
    Ledger,
    PrivacyUnit,
    Release,
    privacy_loss_of,
)

_LEAST_DELTA = 1e-300

_ASSUMPTIONS = (
    "the server adds the noise, follows the protocol and keeps uploads to itself",
    "the number of clients that a round asks is public; a client's answer, or its absence, depends "
    "on no other client's data",
    "one client's part in a release is at most one clipping norm over a public constant: updates "
    "are clipped and finite, all arrays have a dimension (Flower clips no others), all weights are "
    "equal, and every client that is asked answers",
    "the noise of Flower's strategies counts as real Gaussian numbers: it is drawn in floating "
    "point, on no grid, by NumPy's global generator, which is not cryptographic",
)
_SECRET = (
    "the caller says that cohorts are drawn as the configuration says, by a generator that nobody "
    "can predict, and that nobody learns who was drawn (secret_sampling=True)"
)
_EMPTY_TOO = "empty cohorts are released and composed like any other"
_NOT_COVERED = (
    "metrics of training and evaluation, and numbers of examples, which Flower averages un-noised",
    "whether and when each client answered",
)


class PldAccountant:
    """An accountant for Flower's strategies, with the tightest bound that this package has.

    Parameters
    ----------
    config : PrivacyConfig
        Its ``max_epsilon`` is the budget: Flower calls `would_exceed` before clients train.
    ledger : Ledger, optional
        Records every release before it leaves the strategy. Earlier releases in it count, so a run
        that is started again continues from its earlier spend.
    secret_sampling : bool
        True if the caller guarantees that cohorts are drawn as ``config.sampling_method`` says,
        and that nobody learns who was drawn. Amplification by sampling depends on it. Flower's own
        strategies draw a fixed number of nodes by Python's global generator, so they must use
        ``no-amplification``.

    Raises
    ------
    InvalidValue
        The configuration asks for amplification without ``secret_sampling``, or the ledger has a
        budget of its own, or it holds releases of another kind.
    """

    def __init__(
        self,
        config: PrivacyConfig,
        *,
        ledger: Ledger | None = None,
        secret_sampling: bool = False,
    ) -> None:
        amplified = config.sampling_method is not SamplingMethod.NO_AMPLIFICATION
        if amplified and not secret_sampling:
            raise InvalidValue(
                f"sampling_method={config.sampling_method.value!r}: expected 'no-amplification'. "
                "Sampling protects a client only if cohorts are really drawn in this way and kept "
                "secret, which Flower's strategies do not do. If yours does, give "
                "secret_sampling=True"
            )
        if ledger is not None and ledger.budget is not None:
            raise InvalidValue(
                "ledger.budget: expected None; set the budget as PrivacyConfig.max_epsilon, which "
                "Flower checks before clients train"
            )
        self._config = config
        self._ledger = ledger
        self._events: list[tuple[GaussianPrivacyEvent, int]] = []
        if ledger is not None:
            self._events = [
                (event_of(Release.from_dict(entry["release"]), self._config), 1)
                for entry in Ledger.read(ledger.path)
                if entry["kind"] == "reserve"
            ]

    @property
    def config(self) -> PrivacyConfig:
        """The configuration of this accountant."""
        return self._config

    @property
    def num_releases(self) -> int:
        """The number of releases so far, including earlier ones in the ledger."""
        return sum(count for _, count in self._events)

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Charge ``count`` equal releases, and write them to the ledger if there is one.

        Raises
        ------
        InvalidValue
            The event is of another population, or ``count`` is not an integer above 0.
        OSError
            The ledger cannot be written. The caller must release nothing.
        """
        release = release_of(event, self._config)
        check_count(count)
        for _ in range(count if self._ledger is not None else 0):
            assert self._ledger is not None
            with self._ledger.reserve(release, round=self._ledger.releases + 1) as reservation:
                reservation.note(cohort=event.sample_size)
        self._events.append((event, count))

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on ε of all releases at ``delta``."""
        return privacy_loss_of(self._releases(), delta=delta).epsilon

    def get_delta(self, epsilon: float) -> float:
        """Return an upper bound on δ of all releases at ``epsilon``, at least 1e-300 if any."""
        require_not_negative("epsilon", epsilon)
        if not self._events:
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
        """Return the spend at ``delta``, by default the δ of the configuration."""
        target = self._config.target_delta if delta is None else delta
        loss = privacy_loss_of(self._releases(), delta=target)
        return PrivacySpent(
            epsilon=loss.epsilon,
            delta=target,
            num_releases=self.num_releases,
            accounting_method=loss.accountant,
        )

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Return True if ``count`` more releases would exceed a budget.

        Parameters
        ----------
        event : GaussianPrivacyEvent
        max_epsilon : float, optional
            The budget; by default that of the configuration.
        count : int

        Raises
        ------
        InvalidValue
            There is no budget, the event is of another population, or ``count`` is not an integer
            above 0.
        """
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise InvalidValue(
                "max_epsilon=None: expected a budget, here or in PrivacyConfig(max_epsilon=...)"
            )
        require_positive("max_epsilon", limit)
        check_count(count)
        after = self._releases() + Counter({release_of(event, self._config): count})
        return privacy_loss_of(after, delta=self._config.target_delta).epsilon > limit

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """Return the guarantee after the releases so far, with all its assumptions."""
        target = self._config.target_delta if delta is None else delta
        loss = privacy_loss_of(self._releases(), delta=target)
        method = self._config.sampling_method
        amplified = method is not SamplingMethod.NO_AMPLIFICATION
        assumptions = (
            *_ASSUMPTIONS,
            *((_SECRET,) if amplified else ()),
            *((_EMPTY_TOO,) if method is SamplingMethod.POISSON else ()),
        )
        return Guarantee(
            unit=PrivacyUnit.CLIENT,
            relation=relation_of(self._config),
            view=AdversaryView.RELEASED_MODELS,
            epsilon=loss.epsilon,
            delta=target,
            basis="provable",
            accountant=loss.accountant,
            source=f"{self.num_releases} Gaussian releases told by the strategy, {method.value}",
            assumptions=assumptions,
            not_covered=_NOT_COVERED,
            units=self._config.population_size,
        )

    def state_dict(self) -> dict[str, object]:
        """Return all releases and the configuration, ready for JSON."""
        return write_state(self._events, self._config)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore a state of `state_dict`, or of Flower's `RdpAccountant`.

        With a ledger, the accountant keeps the ledger's releases, because the ledger also has
        those after the state was saved.

        Raises
        ------
        InvalidValue
            The state is of another configuration or backend, or cannot be read.
        LedgerCorrupt
            The ledger holds fewer releases than the state.
        """
        events = read_state(state, self._config)
        if self._ledger is not None:
            self._ledger.check_holds(sum(count for _, count in events))
            return
        self._events = events

    def _releases(self) -> Counter[Release]:
        counts: Counter[Release] = Counter()
        for event, count in self._events:
            counts[release_of(event, self._config)] += count
        return counts
