"""``flower-ext guard``: run apps for a SuperNode, and limit what their replies reveal."""

import time
from bisect import bisect_right
from pathlib import Path
from typing import Annotated

import typer

from flower_ext.cli.processes import signals_as_interrupts
from flower_ext.cli.screen import say
from flower_ext.errors import InvalidValue
from flower_ext.files import lock
from flower_ext.privacy import AdversaryView, Release, privacy_loss_of
from flower_ext.privacy.guarantee import epsilon_text
from flower_ext_guard.app_process import check_hidden, check_isolation
from flower_ext_guard.flower_runtime import Disconnected, Runtime
from flower_ext_guard.policy import CONSTANTS, NOT_ISOLATED, GuardPolicy, read_policy
from flower_ext_guard.service import Guard

_MOST_REPLIES = 1_000_000


def guard(
    policy_file: Annotated[
        Path, typer.Argument(metavar="POLICY", help="TOML file that says what may leave.")
    ],
    superexec_auth_secret_file: Annotated[
        Path, typer.Option(help="The secret that the SuperNode was started with.")
    ],
    runtime_api_address: Annotated[
        str, typer.Option(help="host:port of the SuperNode's Runtime API.")
    ] = "127.0.0.1:9094",
    root_certificates: Annotated[
        Path | None,
        typer.Option(help="Certificates that verify the Runtime API; by default no encryption."),
    ] = None,
) -> None:
    """Run apps for a SuperNode in place of Flower's own processes, until you stop the guard.

    Example: flower-ext guard guard.toml --superexec-auth-secret-file superexec.secret
    """
    policy = read_policy(policy_file)
    check_isolation(policy)
    check_hidden(policy, "secret", superexec_auth_secret_file)
    runtime = Runtime(
        runtime_api_address,
        root_certificates=root_certificates,
        secret=superexec_auth_secret_file.read_bytes(),
    )
    policy.ledger.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with signals_as_interrupts(), lock(policy.path.with_suffix(".lock")):
        _check_secret_protects(runtime)
        for line in (*costs(policy), *uncovered(policy, superexec_auth_secret_file)):
            say(line)
        say(f"guarding {runtime_api_address} by {policy_file}")
        Guard(policy, runtime, tell=say).serve()


def costs(policy: GuardPolicy) -> list[str]:
    """Return a line on a reply's cost for each type that spends ε; refuse one above the budget."""
    lines, budget = [], policy.budget
    for name, rule in policy.messages.items():
        if rule.release == CONSTANTS:
            continue
        spend = rule.spend(policy.noised_by(rule))

        def epsilon(replies: int, spend: Release = spend) -> float:
            return privacy_loss_of({spend: replies}, delta=budget.delta).epsilon

        if epsilon(1) > budget.epsilon:
            raise InvalidValue(
                f"[messages.{name}]: one reply costs ε = {epsilon_text(epsilon(1))}, more than the "
                f"budget's epsilon={budget.epsilon:g}; write a larger noise-multiplier or budget"
            )
        paid = bisect_right(range(1, _MOST_REPLIES), budget.epsilon, key=epsilon)
        view = AdversaryView.SUM_ONLY if policy.noised_by(rule) else AdversaryView.EACH_UPLOAD
        lines.append(
            f"{name}: one reply costs ε = {epsilon_text(epsilon(1))} at δ = {budget.delta:g} for "
            f"this site (unit client, {spend.relation.value}), against an adversary who sees "
            f"{view.sees} (provable; exact Gaussian composition). The budget of "
            f"{budget.epsilon:g} pays for {paid:,} replies, if the ledger is empty"
        )
    return lines


def uncovered(policy: GuardPolicy, secret: Path) -> list[str]:
    """Return a line for each leak that the policy, or the secret file's permissions, leave open."""
    lines = []
    if secret.stat().st_mode & 0o077:
        lines.append(f"not covered: other users of this machine may read {secret} (chmod 600)")
    if policy.reply_after is None:
        lines.append("not covered: the time of each reply, because reply-after is not set")
    if policy.isolation == NOT_ISOLATED:
        lines.append(
            "not covered: apps may use the network, and the files that this process may use, "
            'because isolation = "none"'
        )
    return lines


def _check_secret_protects(runtime: Runtime) -> None:
    """Refuse a SuperNode that gives messages to every process, even to one without its secret."""
    while True:
        try:
            is_open = runtime.is_open()
            break
        except Disconnected:
            say("waiting for the SuperNode")
            time.sleep(1.0)
    if is_open:
        raise InvalidValue(
            "the SuperNode hands messages to every process: start it with --isolation process and "
            "--superexec-auth-secret-file, so that only the guard gets them"
        )
