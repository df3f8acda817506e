"""``flower-ext withdraw``: withdraw a person or a client from a study, with a signed statement."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_ext.cli.screen import console, say, titled_table
from flower_ext.errors import InvalidValue
from flower_ext.files import write_whole
from flower_ext.privacy import PrivacyUnit, withdrawal
from flower_ext_consortium import withdrawal_statement


def withdraw(
    ledger: Annotated[
        Path | None, typer.Option(help="Account of the study: the setting budget-ledger.")
    ] = None,
    user: Annotated[
        list[int] | None,
        typer.Option(help="Number of the user; repeatable, for a person with several numbers."),
    ] = None,
    client: Annotated[int | None, typer.Option(help="Partition of the client.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the signed statement.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="File of the signing key; by default beside the account, made if new."),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Statement to verify; give --public-key as well.")
    ] = None,
    public_key: Annotated[str, typer.Option(help="The study's public key.")] = "",
) -> None:
    """Withdraw a person or client from a study; state what the study's models reveal of that party.

    No later round of any run of the study uses data of the person. Models stay as they are. A
    signed statement says with which ε each model is indistinguishable from one without the person.

    Example: flower-ext withdraw --user 17 --ledger study.jsonl -o statement.json
    """
    if verify is not None:
        content = _read_statement(verify)
        withdrawal_statement.verify(content, public_key)
        _show(content)
        console.print("The signature holds.")
        return
    if ledger is None or bool(user) == (client is not None):
        raise InvalidValue("withdraw: expected --ledger, and either --user or --client")
    if user:  # a list, so true for user 0 as well
        unit, numbers = PrivacyUnit.USER, user
    else:
        assert client is not None  # checked above
        unit, numbers = PrivacyUnit.CLIENT, [client]
    # A wrong key must fail before the account records the withdrawal.
    signing = withdrawal_statement.signing_key(key or ledger.with_name(ledger.name + ".key"))
    withdrawal.withdraw(ledger, unit, numbers)
    statement = withdrawal_statement.statement(ledger, unit, numbers)
    content = withdrawal_statement.signed(statement, signing)
    names = "-".join(map(str, content["numbers"]))
    path = output or ledger.with_name(f"withdrawn-{unit.value}-{names}.json")
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    _show(content)
    say(
        f"Statement: {path}. Public key, to publish where people can find it: "
        f"{content['public key']}"
    )


def _read_statement(path: Path) -> dict[str, Any]:
    with suppress(ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    raise InvalidValue(f"verify={str(path)!r}: expected a statement that `withdraw` wrote (JSON)")


def _show(content: Mapping[str, Any]) -> None:
    named = ", ".join(map(str, content["numbers"]))
    table = titled_table(
        f"{content['unit']} {named}, withdrawn from {content['study']}",
        ("run", "method", "its model, and one without this person"),
    )
    for run in content["runs"]:
        table.add_row(run["name"], run["method"], run["claim"])
    table.add_row("all together", "", content["all runs together"])
    console.print(table)
    say(content["meaning"])
    say(f"Memory: {content['memory of clients']}.")
    for text in content["not claimed"]:
        say(f"Not claimed: {text}.")
