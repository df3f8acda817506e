"""Run any method of this package as a Flower strategy.

A `FederatedStrategy` has a method, a plan, a sum and a run. The server's rounds are in
`server.round` and `server.query_round`, and are the same for every method.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.method import Method
from flower_ext.federation.server.connection import connect
from flower_ext.federation.server.query_round import QueryRound, ReportedScores, evaluation
from flower_ext.federation.server.round import TrainingRound
from flower_ext.federation.server.run import Run, StrategyOptions
from flower_ext.federation.server.run_guarantees import guarantees_of, summary_of
from flower_ext.federation.server.run_loop import RunLoop
from flower_ext.federation.server.spending import Spending
from flower_ext.federation.server.stragglers import Stragglers
from flower_ext.federation.sums.masked import MaskedSum
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.federation.sums.summation import Summation
from flower_ext.privacy import Budget, Guarantee, Ledger, PrivacyPlan
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.runs import RunWriter

log = getLogger("flwr")


@final
class FederatedStrategy(Strategy):
    """Run a method under a plan.

    Parameters
    ----------
    method : Method
        What clients train, and the server's step: a method of `flower_ext.algorithms` or your own.
    plan : PrivacyPlan
        Sampling, clipping, noise and accounting of the run.
    sum : Callable[[RoundMechanism], Summation], optional
        Returns the object that adds up the contributions of a round, as `weighted_sum` does. By
        default the server adds up uploads; they are masked if the plan's ``noise_placement`` is a
        `SecureSum`.
    directory : RunWriter, optional
        Run directory for metrics and checkpoints. If it was resumed, ``start`` continues from its
        last checkpoint.
    ledger : Ledger, optional
        Durable record of every release of a `ReleasePlan`. The run stops when the ledger's budget
        is spent.
    budget : Budget, optional
        The run stops before a round that would bring its provable ε above this budget, under any
        plan. With ``Budget(ledger=...)``, all runs on the same population share the budget. Their
        account then also lists each run with a `NonPrivatePlan`, as one that no ε covers.
    seed : int, optional
        Determines initial personal parts, batches, stragglers and cohorts. Without a seed, personal
        parts and batches are those of seed 0, and the operating system's generator draws stragglers
        and cohorts. Under a `ReleasePlan` with secure noise, cohorts are never drawn from the seed,
        because the plan's ε assumes that cohorts are secret.
    seeded_noise : bool
        If True, ``seed`` determines the noise, as the guarantee then states. For simulation only.
    evaluate_every : int
        Number of rounds between evaluations on all clients; the last round is always evaluated.
        With 0, the server never asks a client to evaluate. If the plan has `SecureScores`, the
        server sees noised means, which ε counts. Otherwise no guarantee covers the reported scores.
    training_loss : bool
        If True, each client also reports the training loss of the model that it uses. Its
        variance over clients measures fairness. No guarantee covers these losses.
    diagnostics : bool
        If True, clients report the norm of their update before clipping, without noise. No
        guarantee covers these norms.
    stragglers : Stragglers, optional
        Simulates clients that complete only some of their local epochs.
    timeout : float
        Seconds to wait for nodes to connect, and for replies.
    disclosures : Sequence[str]
        One line for each thing outside the run that reveals something about the clients' data. The
        guarantees list them as not covered.
    frozen : str
        Fingerprint of the parts that no client trains (`Task.fingerprint`). Every node takes these
        parts from its own copy of the base model. Before the first round, the server refuses a node
        with a different copy.
    state_key_file : Path, optional
        File of 32 random bytes, readable by its owner alone, with which the run directory's secret
        noise is encrypted (see `CorrelatedNoise`).

    Raises
    ------
    InvalidValue
        An option is out of range, or method, plan and sum do not fit together.
    """

    def __init__(
        self,
        method: Method,
        plan: PrivacyPlan,
        *,
        sum: Callable[[RoundMechanism], Summation] | None = None,
        directory: RunWriter | None = None,
        ledger: Ledger | None = None,
        budget: Budget | None = None,
        seed: int | None = None,
        seeded_noise: bool = False,
        evaluate_every: int = 1,
        training_loss: bool = False,
        diagnostics: bool = False,
        stragglers: Stragglers | None = None,
        timeout: float = 600.0,
        disclosures: Sequence[str] = (),
        frozen: str = "",
        state_key_file: Path | None = None,
    ) -> None:
        options = StrategyOptions(
            seed=seed,
            seeded_noise=seeded_noise,
            evaluate_every=evaluate_every,
            training_loss=training_loss,
            diagnostics=diagnostics,
            stragglers=stragglers,
            timeout=timeout,
            frozen=frozen,
            state_key_file=state_key_file,
        )
        summation = _summation_for(method, plan, sum)
        summation.check(method.traits, diagnostics=diagnostics)
        if stragglers is not None:
            is_private = summation.mechanism.delta is not None
            stragglers.check(method.training.values(), protects=is_private)
        self.method = method
        self.run = Run(
            method=method,
            plan=plan,
            summation=summation,
            population=method.population(plan, summation),
            spending=Spending(ledger=ledger, budget=budget, disclosures=tuple(disclosures)),
            options=options,
            directory=directory,
        )
        self.run.mechanism.check_training(summary_of(self.run))
        evaluation(self.run, 0)  # refuses scores that do not fit the plan
        self.newest_round: TrainingRound | None = None
        """The newest training round; None before the first, and if the newest could not begin."""
        self._evaluation: ReportedScores | QueryRound | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, record the privacy cost on disk, and return the messages to the cohort.

        Raises
        ------
        BudgetExhausted
            This round would exceed the budget; nothing was sent.
        """
        run = self.run
        connect(run, grid, arrays)
        config = run.method.configure(config, run.model, run.method_state, run.plan)
        self.newest_round, begun = None, TrainingRound(run, server_round)
        messages = begun.ask(_numbered(config, server_round))
        self.newest_round = begun
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies as they arrive, refuse malformed ones, and take the server's step."""
        if self.newest_round is None:
            raise InvalidValue("aggregate_train: expected configure_train first, in every round")
        model = self.newest_round.close(replies)
        metrics = records.metrics_record(self.run.progress.row)
        return None if model is None else records.to_record(model), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client for scores, in rounds that evaluate and in the last round."""
        run, every = self.run, self.run.options.evaluate_every
        self._evaluation = None
        if every == 0 or (server_round % every and server_round != run.last_round):
            return []
        if not run.clients.roster.nodes:  # an evaluation before any training
            connect(run, grid, arrays)
        self._evaluation = evaluation(run, server_round)
        return self._evaluation.ask(run.evaluated(arrays), _numbered(config, server_round))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return mean, worst tenth, spread and Jain's index of each score over clients.

        All clients have the same weight. If the plan adds noise to the sums of scores, return only
        the means, each with its standard error due to noise.
        """
        if self._evaluation is None:  # no client was asked, but Flower's own loop calls this method
            return None
        scores = dict(self._evaluation.close(replies))
        return records.metrics_record(scores) if scores else None

    def summary(self) -> None:
        """Log the method, its plan and its sums."""
        run = self.run
        name = run.method.name
        if run.mechanism.delta is None:  # without noise, DPDitto is Ditto
            name = vars(type(run.method)).get("plain_name", name)
        log.info("%s · %s", name, run.plan.describe())
        if description := run.summation.describe():
            log.info("%s", description)
        if advice := run.method.server.advice(run.method.mean_noise(run.mechanism)):
            log.warning("%s", advice)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        *,
        player: Strategy | None = None,
    ) -> Result:
        """Run up to round ``num_rounds``, or until the budget is exhausted (see ``stopped``).

        A resumed run continues from its newest checkpoint, and only takes names, shapes and types
        from ``initial_arrays``. Without a checkpoint, the run begins with ``initial_arrays``.

        Parameters
        ----------
        initial_arrays : ArrayRecord
            The whole initial model; personal parts are dropped from it.
        num_rounds : int
            Number of the last round, counted from the beginning of the run.
        timeout : float
            Seconds to wait for the replies of a round.
        train_config, evaluate_config : ConfigRecord, optional
            Settings that the server sends to the clients.
        evaluate_fn : Callable, optional
            Evaluates the shared part of the model on the server after each round; in a new run,
            also before the first round, with the number 0.
        should_stop : Callable, optional
            Called after each round with its number and the results so far; True ends the run there.
        player : Strategy, optional
            A strategy that wraps this one, and whose Flower methods play the rounds.

        Raises
        ------
        FederationNotReady
            A node is missing, or no client ever sent a usable reply.
        InvalidValue
            A name in ``personal`` is misspelt, so that its part would be shared; or the initial
            model, or a model after the server's step, is not finite.
        """
        player = player or self
        player.summary()
        loop = RunLoop(
            run=self.run,
            player=player,
            grid=grid,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config or ConfigRecord(),
            evaluate_config=evaluate_config or ConfigRecord(),
            evaluate_fn=evaluate_fn,
            should_stop=should_stop,
        )
        return loop.start(initial_arrays)

    def record_in(self, directory: RunWriter, *, limit: Budget | None = None) -> None:
        """Set the directory to which a run writes its files and its ledger.

        Call this method before the run begins. ``limit`` is the budget of the new ledger. A plan
        that makes no releases has no ledger: ``limit`` then becomes the budget of the run, unless
        the run has one already.
        """
        self.run = self.run.recorded_in(directory, limit=limit)

    def guarantees(self) -> list[Guarantee]:
        """Return the published and the provable guarantees of all rounds so far.

        The provable guarantees use the participations of this run. These depend on nobody's data.
        """
        return guarantees_of(self.run)

    @property
    def participations(self) -> Participations:
        """Counts of the releases so far to which each unit contributed."""
        return self.run.participations

    @property
    def stopped(self) -> str | None:
        """The reason why a budget ended the run; None if no budget did."""
        return self.run.stopped

    @property
    def refusals(self) -> list[str]:
        """Reasons of the first 100 replies that the server refused."""
        return self.run.clients.refusals

    @property
    def answers(self) -> Mapping[str, Mapping[str, float]]:
        """Newest answers to the plan's queries, by the queries' names."""
        return self.run.answers


def _numbered(config: ConfigRecord, server_round: int) -> ConfigRecord:
    """Return a configuration with the number of the round, as Flower's strategies send it."""
    return ConfigRecord({**config, "server-round": server_round})


def _summation_for(
    method: Method, plan: PrivacyPlan, make: Callable[[RoundMechanism], Summation] | None
) -> Summation:
    """Return the sums of a run; refuse a method, a plan and sums that do not fit together."""
    method.check(plan)
    mechanism = method.mechanism(plan)
    needs_masks = mechanism.secure_sum is not None
    summation = (make or (MaskedSum if needs_masks else PlainSum))(mechanism)
    # The guarantees of a plan with a SecureSum describe masked sums.
    if summation.masks != needs_masks:
        raise InvalidValue(
            f"sum={type(summation).__name__} with {type(plan).__name__}: expected a sum "
            "with masks=True, such as MaskedSum, if, and only if, the plan's noise_placement is a "
            "SecureSum(…); leave out sum=, or change noise_placement"
        )
    if method.needs_metrics and not mechanism.tells_sizes:
        raise InvalidValue(
            f"plan={type(plan).__name__}: expected a plan with tells_sizes=True, because the "
            f"server of {method.name} needs metrics of each client (needs_metrics=True)"
        )
    return summation
