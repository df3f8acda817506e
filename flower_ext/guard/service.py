"""The guard's loop: pull a message, run the app, bound its answer, write the ledger, reply.

A reply is prepared in full, noise included, and stored in a file before it is charged to the
ledger. The charge has the reply's own number, so that a repetition counts once. A guard that was
killed and starts again finds the file: it charges the reply, unless that was done, and sends the
same bytes. So no message has two replies with different noise, and a charged reply is lost only if
the SuperNode no longer waits for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flower_ext.federation.arrays import to_record
from flower_ext.files import write_whole
from flower_ext.guard.app_process import answer_of
from flower_ext.guard.flower_runtime import (
    Disconnected,
    Request,
    Runtime,
    context_bytes,
    joined,
    only_arrays,
    parts_of,
    read_answer,
    refusal_bytes,
    reply_bytes,
)
from flower_ext.guard.policy import CONSTANTS, GuardPolicy, MessagePolicy, Refused
from flower_ext.guard.release import released, requested_arrays
from flower_ext.privacy import (
    AdversaryView,
    BudgetExhausted,
    Guarantee,
    NoiseSource,
    PrivacyUnit,
    SecureNoise,
)
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.shared_ledger import Charge, charge, check_affordable, entries_of
from flower_ext.privacy.study_composition import CHARGE

METRICS = "metrics"
"""Name of the MetricRecord of constants, as Flower's own strategies and examples name it."""
_SPENT = "the privacy budget of this site is spent"
_PAUSE = 0.2


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A reply that is ready to leave, with all that sending it takes."""

    token: str
    charge: dict[str, Any] | None
    refusal: bytes
    message: bytes
    context: bytes

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        head = json.dumps({"token": self.token, "charge": self.charge}).encode()
        return joined(head, self.refusal, self.message, self.context)

    @classmethod
    def from_bytes(cls, content: bytes) -> Pending:
        """Undo `to_bytes`."""
        head, refusal, message, context = parts_of(content)
        return cls(**json.loads(head), refusal=refusal, message=message, context=context)


class Guard:
    """A guard of one SuperNode.

    Parameters
    ----------
    policy : GuardPolicy
    runtime : Runtime
    noise : NoiseSource
    tell : Callable[[str], None]
        Gets one line about each message. The line depends on no data.
    """

    def __init__(
        self,
        policy: GuardPolicy,
        runtime: Runtime,
        *,
        noise: NoiseSource | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.policy, self.runtime, self.tell = policy, runtime, tell
        self.noise = SecureNoise() if noise is None else noise
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

    def _reply_to(self, request: Request, token: str, started: float) -> Pending:
        """Run the app if the policy permits it, and return the reply."""
        state, new = None, None
        try:
            self.policy.check_app(hashlib.sha256(request.fab).hexdigest())
            rule = self.policy.of(request.message.metadata.message_type)
            if not request.message.has_content():
                raise Refused("this site answers only messages with content")
            if rule.release == CONSTANTS:
                content = RecordDict()
            else:
                name, record = only_arrays(request.message.content) or ("", None)
                arrays = requested_arrays(record, rule)
                new = self._charge(request, rule)
                self._check_budget(new)
                answer, state = self._answer(request)
                leaving = released(arrays, answer, rule, self.noise)
                content = RecordDict({name: to_record(leaving)})
            if rule.constants:
                content[METRICS] = MetricRecord(dict(rule.constants))
            if self.policy.reply_after is not None:
                time.sleep(max(0.0, started + self.policy.reply_after - time.monotonic()))
            message = reply_bytes(request, content)
            self.tell(f"run {request.run_id}: {rule.release}")
        except Refused as error:
            message, new = refusal_bytes(request, f"flower-ext guard: {error}"), None
            self.tell(f"run {request.run_id}: refused, {error}")
        return Pending(
            token=token,
            charge=None if new is None else new.to_dict(),
            refusal=refusal_bytes(request, f"flower-ext guard: {_SPENT}"),
            message=message,
            context=context_bytes(request.context, state),
        )

    def _answer(self, request: Request) -> tuple[ArrayRecord | None, RecordDict | None]:
        """Return the arrays of an app's answer and its memory; None for what is not usable."""
        with _new_private_file(self._log) as log:
            answer = answer_of(request.to_bytes(), self.policy, log)
        if answer is None:
            return None, None
        try:
            content, state = read_answer(answer)
        except Exception:  # a hostile app's bytes, from which any error may come
            return None, None
        arrays = only_arrays(content)
        return None if arrays is None else arrays[1], state

    def _charge(self, request: Request, rule: MessagePolicy) -> Charge:
        """Return the charge of the next reply, under a number that no earlier reply has."""
        run = f"{request.run_id}-node-{request.context.node_id}"
        number = 1 + sum(
            entry["kind"] == CHARGE and entry["run"] == run
            for entry in entries_of(self.policy.ledger)
        )
        loss = privacy_loss_of({rule.spend: number}, delta=self.policy.budget.delta)
        return Charge(
            run=run,
            method="flower-ext guard",
            training=number,
            repeatable=True,  # a pending reply is sent again, never noised again
            unit=PrivacyUnit.CLIENT,
            relation=rule.spend.relation,
            epsilon=loss.epsilon,
            delta=loss.delta,
            release=rule.spend,
        )

    def _check_budget(self, new: Charge) -> None:
        """Refuse a reply that the ledger cannot pay for, before the app runs.

        The time of a later refusal would tell how long the app ran.
        """
        try:
            check_affordable(self.policy.ledger, new, self.policy.budget)
        except BudgetExhausted as error:
            self.tell(str(error))
            raise Refused(_SPENT) from None

    def _deliver(self) -> None:
        """Charge and send the reply that is ready, if there is one and the SuperNode waits."""
        if not self._pending.exists():
            return
        pending = Pending.from_bytes(self._pending.read_bytes())
        task = self.runtime.task(pending.token)
        if task.is_alive():
            message = pending.message
            if pending.charge is not None:
                try:
                    new = _with_claim(Charge.from_dict(pending.charge))
                    charge(self.policy.ledger, new, self.policy.budget)
                except BudgetExhausted as error:  # another node of the site was faster
                    self.tell(str(error))
                    message = pending.refusal
            task.push(message, pending.context)
        else:
            self.tell("a reply was ready, but the SuperNode no longer waits for it")
        self._pending.unlink()


def _with_claim(new: Charge) -> Charge:
    """Return a charge with the guarantee of all replies of its run, against who sees each one."""
    assert new.release is not None
    claim = Guarantee(
        unit=new.unit,
        relation=new.relation,
        view=AdversaryView.EACH_UPLOAD,
        epsilon=new.epsilon,
        delta=new.delta,
        basis="provable",
        accountant="exact Gaussian composition",
        source="the guard bounds and noises each reply",
        releases=((new.release, new.training),),
    )
    return replace(new, claims=[claim])


def _new_private_file(path: Path) -> IO[bytes]:
    """Open an empty file that only the site's user may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.fdopen(os.open(path, flags, 0o600), "wb")
