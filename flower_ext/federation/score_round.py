"""An evaluation: scores that clients report, or a query round that sums them under noise."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ConfigRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Requests
from flower_ext.federation.query_round import QueryRound, evaluation_content
from flower_ext.federation.replies import read_scores
from flower_ext.federation.run import Run


class ReportedScores:
    """An evaluation in which each client reports its scores, without noise.

    Parameters
    ----------
    run : Run
    server_round : int
    """

    def __init__(self, run: Run, server_round: int) -> None:
        self._run, self._server_round = run, server_round
        self.requests: Requests | None = None
        """The messages to all clients; None before `ask`."""

    def ask(self, model: records.Arrays, config: ConfigRecord) -> Iterable[Message]:
        """Return a message for every client."""
        content = evaluation_content(self._run, model, config)
        everyone = dict.fromkeys(self._run.clients.nodes, content)
        self.requests = self._run.clients.request("evaluate", everyone, self._server_round)
        return self.requests.messages

    def close(self, replies: Iterable[Message]) -> dict[str, float]:
        """Return mean, worst tenth, spread and Jain's index over clients, which all count alike."""
        run = self._run
        assert self.requests is not None
        replied = self.requests.accepted(replies, read_scores)
        scores = {p: scores for p, scores in replied if scores.get("num-examples") != 0}
        if not scores:
            return {}
        run.client_metrics = scores
        return run.progress.scores(scores.values())


def evaluation(run: Run, server_round: int) -> ReportedScores | QueryRound:
    """Return the evaluation after a round, of the kind that the plan asks for.

    Raises
    ------
    InvalidValue
        The run asks for losses on training records beside a noised sum.
    """
    query = next((each for each in run.queries if each.schedule == "in evaluations"), None)
    if query is None:
        return ReportedScores(run, server_round)
    if run.training_loss:
        raise InvalidValue(
            f"training_loss=True with {type(query).__name__} in the plan: expected False; name "
            "'training_loss' with its bounds in SecureScores"
        )
    return QueryRound(run, server_round, query)
