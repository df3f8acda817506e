"""The guard's loop: pull a message, run the app, bound its answer, write the ledger, reply.

A reply is prepared in full, noise included, and stored in a file before it is charged to the
ledger. Each reply has a number, and the ledger counts a number once. A guard that was killed and
starts again finds the file. It charges the reply, unless the ledger has the charge already, and
sends the same bytes. So no message has two replies with different noise, and a charged reply is
lost only if the SuperNode no longer waits for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict

from flower_ext.federation.messages.records import to_record
from flower_ext.files import write_whole
from flower_ext.privacy import (
    AdversaryView,
    BudgetExhausted,
    Guarantee,
    PrivacyUnit,
    SecureNoise,
)
from flower_ext.privacy.account_entries import CHARGE
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.shared_ledger import Charge, charge, check_affordable, entries_of
from flower_ext_guard.app_process import answer_of
from flower_ext_guard.flower_runtime import (
    Disconnected,
    Runtime,
    RuntimeRequest,
    context_bytes,
    joined,
    only_arrays,
    parts_of,
    read_answer,
    refusal,
    reply_bytes,
)
from flower_ext_guard.policy import CONTRIBUTION, UPDATE, GuardPolicy, MessagePolicy, Refused
from flower_ext_guard.release import released, requested_arrays

METRICS = "metrics"
"""Name of the MetricRecord of constants, as Flower's own strategies and examples name it."""
_SPENT = "the privacy budget of this site is spent"
_PAUSE = 0.2


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A reply that is ready to leave, with everything that is needed to charge and send it.

    ``charge`` is None if the reply uses no data. The guarantees in the charge depend on ``sites``,
    the number of sites whose noise is in each sum (`GuardPolicy.noised_by`). ``refusal`` is sent
    instead of ``message`` if the budget can no longer pay the charge.
    """

    token: str
    charge: dict[str, Any] | None
    sites: int
    refusal: bytes
    message: bytes
    context: bytes

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        head = {"token": self.token, "charge": self.charge, "sites": self.sites}
        return joined(json.dumps(head).encode(), self.refusal, self.message, self.context)

    @classmethod
    def from_bytes(cls, content: bytes) -> Pending:
        """Read a reply from the content of its file, which `to_bytes` made."""
        head, refusal, message, context = parts_of(content)
        return cls(**json.loads(head), refusal=refusal, message=message, context=context)


class Guard:
    """A guard of one SuperNode.

    ``tell`` gets one line about each message. The line depends on no data.
    """

    def __init__(
        self, policy: GuardPolicy, runtime: Runtime, *, tell: Callable[[str], None] = print
    ) -> None:
        self.policy, self.runtime, self.tell = policy, runtime, tell
        self._pending = policy.path.with_suffix(".pending")
        self._log = policy.path.with_suffix(".app.log")

    def serve(self) -> NoReturn:
        """Answer messages until the process ends."""
        while True:
            try:
                if not self.serve_one():
                    time.sleep(_PAUSE)
            except Disconnected as error:
                self.tell(f"the SuperNode does not answer: {type(error).__name__}; trying again")
                time.sleep(5 * _PAUSE)

    def serve_one(self) -> bool:
        """Answer one message; return False if there is none."""
        self._deliver()
        if not (token := self.runtime.acquire()):
            return False
        task = self.runtime.task(token)
        with task.kept_alive():
            started = time.monotonic()
            try:
                request = task.pull()
            except Exception as error:  # the server's bytes, from which any error may come
                self.tell(f"a message is not readable: {type(error).__name__}")
                return True
            write_whole(self._pending, self._reply_to(request, token, started).to_bytes())
            self._deliver()
        return True

    def _reply_to(self, request: RuntimeRequest, token: str, started: float) -> Pending:
        """Run the app if the policy permits it, and return the reply."""
        app_run, sites = _AppRun(request, self.policy, self._log), 0
        body: RecordDict | Error
        try:
            self.policy.check_app(hashlib.sha256(request.fab.content).hexdigest())
            rule = self.policy.of(request.message.metadata.message_type)
            if not request.message.has_content():
                raise Refused("this site answers only messages with content")
            sites = self.policy.noised_by(rule)
            body, charge_due = self._content(request, rule, app_run)
            line = rule.release
        except Refused as error:
            body, charge_due, line = refusal(error), None, f"refused, {error}"
        if app_run.has_run and self.policy.reply_after is not None:
            # A message of a sum may be refused after the app has run, so refusals wait as well.
            time.sleep(max(0.0, started + self.policy.reply_after - time.monotonic()))
        message = reply_bytes(request, body)
        self.tell(f"run {request.run.run_id}: {line}")
        return Pending(
            token=token,
            charge=None if charge_due is None else charge_due.to_dict(),
            sites=sites,
            refusal=reply_bytes(request, refusal(_SPENT)),
            message=message,
            context=context_bytes(request.context, app_run.state),
        )

    def _content(
        self, request: RuntimeRequest, rule: MessagePolicy, app_run: _AppRun
    ) -> tuple[RecordDict, Charge | None]:
        """Return the reply's content and its charge; the charge is None if no data were used."""
        content, charge_due = RecordDict(), None
        if rule.release == CONTRIBUTION:
            # Its imports take seconds, and most guards need none of them.
            from flower_ext_guard.sum_member import answer_in_sum, asks_for_contribution

            if asks_for_contribution(request.message):
                charge_due = self._affordable_charge(request, rule)
            content = answer_in_sum(request, self.policy, rule, app_run.answer)
        elif rule.release == UPDATE:
            name, record = only_arrays(request.message.content) or ("", None)
            arrays = requested_arrays(record, rule)
            charge_due = self._affordable_charge(request, rule)
            leaving = released(arrays, app_run.answer(request.message), rule, SecureNoise())
            content = RecordDict({name: to_record(leaving)})
        if rule.constants:
            content[METRICS] = MetricRecord(dict(rule.constants))
        return content, charge_due

    def _affordable_charge(self, request: RuntimeRequest, rule: MessagePolicy) -> Charge:
        """Return the charge of the next reply; refuse the message if the budget is too small.

        The charge has a number that no earlier reply has. If the operator changes the noise
        in the policy, later replies count as replies of another run. Call the function before the
        app runs: the time of a later refusal would show how long the app ran.
        """
        spend = rule.spend(self.policy.noised_by(rule))
        node = request.context.node_id
        run = f"{request.run.run_id}-node-{node}-{rule.release}-{spend.noise_multiplier:.6g}"
        number = 1 + sum(
            entry["kind"] == CHARGE and entry["run"] == run
            for entry in entries_of(self.policy.ledger)
        )
        loss = privacy_loss_of({spend: number}, delta=self.policy.budget.delta)
        charge_due = Charge(
            run=run,
            method="flower-ext guard",
            training=number,
            repeatable=True,  # a pending reply is sent again, never noised again
            unit=PrivacyUnit.CLIENT,
            population=spend.sampling.population,
            relation=spend.relation,
            epsilon=loss.epsilon,
            delta=loss.delta,
            release=spend,
        )
        try:
            check_affordable(self.policy.ledger, charge_due, self.policy.budget)
        except BudgetExhausted as error:
            self.tell(str(error))
            raise Refused(_SPENT) from None
        return charge_due

    def _deliver(self) -> None:
        """Charge and send the reply that is ready; drop it if the SuperNode no longer waits."""
        if not self._pending.exists():
            return
        pending = Pending.from_bytes(self._pending.read_bytes())
        task = self.runtime.task(pending.token)
        if task.is_alive():
            message = pending.message
            if pending.charge is not None:
                try:
                    charge_due = Charge.from_dict(pending.charge)
                    charge_due = replace(charge_due, claims=_claims(charge_due, pending.sites))
                    charge(self.policy.ledger, charge_due, self.policy.budget)
                except BudgetExhausted as error:  # another node of the site was charged meanwhile
                    self.tell(str(error))
                    message = pending.refusal
            task.push(message, pending.context)
        else:
            self.tell("a reply was ready, but the SuperNode no longer waits for it")
        self._pending.unlink()


class _AppRun:
    """A run of a request's app, once the guard calls `answer`.

    ``state`` is the memory that the app left; None if the app left none that the guard can read.
    """

    def __init__(self, request: RuntimeRequest, policy: GuardPolicy, log: Path) -> None:
        self._request, self._policy, self._log = request, policy, log
        self.state: RecordDict | None = None
        self.has_run = False

    def answer(self, message: Message) -> ArrayRecord | None:
        """Run the app on ``message``, and return the only ArrayRecord of its answer.

        Return None if the app fails, or does not answer with exactly one ArrayRecord.
        """
        self.has_run = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # a log that only the site's user may read
        with os.fdopen(os.open(self._log, flags, 0o600), "wb") as log:
            request = replace(self._request, message=message)
            answer = answer_of(request.to_bytes(), self._policy, log)
        if answer is None:
            return None
        try:
            content, self.state = read_answer(answer)
        except Exception:  # a hostile app's bytes, from which any error may come
            return None
        arrays = only_arrays(content)
        return None if arrays is None else arrays[1]


def _claims(latest: Charge, sites: int) -> list[Guarantee]:
    """Return a run's guarantees after its latest charge ``latest``, one for each adversary view."""
    assert latest.release is not None
    share = latest.release.noise_multiplier / math.sqrt(sites or 1)
    alone = replace(latest.release, noise_multiplier=share)
    loss = privacy_loss_of({alone: latest.training}, delta=latest.delta)
    claim = Guarantee(
        unit=latest.unit,
        relation=latest.relation,
        view=AdversaryView.EACH_UPLOAD,
        epsilon=loss.epsilon,
        delta=loss.delta,
        basis="provable",
        accountant="exact Gaussian composition",
        source="the guard bounds and noises each reply",
        releases=((alone, latest.training),),
    )
    if not sites:
        return [claim]
    in_sums = replace(
        claim,
        view=AdversaryView.SUM_ONLY,
        epsilon=latest.epsilon,
        source="the guard bounds, noises and masks each reply",
        assumptions=(
            f"at least {sites} sites of every sum that becomes known, this one included, add the "
            "noise that this policy demands, and collude with nobody",
        ),
        releases=((latest.release, latest.training),),
    )
    return [claim, in_sums]
