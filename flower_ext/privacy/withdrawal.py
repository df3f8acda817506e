"""Withdrawal of a person or a client from a study.

When a user or client withdraws, the study's account (`shared_ledger`) records the number of this
unit and nothing else. A run charges each round to the account, then reads the account, and only
then sends requests to clients. A round that is charged after the withdrawal therefore uses no data
of the person.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flower_ext.checks import is_integer
from flower_ext.errors import InvalidValue
from flower_ext.privacy.account_entries import CHARGE, FORGOTTEN, WITHDRAWN
from flower_ext.privacy.ledger import LedgerFile
from flower_ext.privacy.units import PrivacyUnit


def withdraw(path: Path, unit: PrivacyUnit, numbers: Collection[int]) -> list[dict[str, Any]]:
    """Record in a study's account that units withdraw; return all entries of the account.

    ``numbers`` are numbers of users, or partition ids of clients. Give several numbers to withdraw
    a person whom silos know by different numbers. A unit that has already withdrawn is not recorded
    again.
    """
    if not path.is_file():
        raise InvalidValue(
            f"ledger={path}: no such file; expected the account that the study's setting "
            "budget-ledger names"
        )
    with closing(LedgerFile(path, wait=True)) as account:
        charges = [entry for entry in account.entries if entry["kind"] == CHARGE]
        protects_users = any(charge["unit"] == PrivacyUnit.USER for charge in charges)
        if charges and protects_users != (unit is PrivacyUnit.USER):
            raise InvalidValue(
                f"{path} is the account of a study that protects {charges[0]['unit']}s: expected "
                f"{'--user' if protects_users else '--client'} for these numbers"
            )
        # Check all numbers before the first is written, because no entry can be taken back.
        population = max((charge["population"] for charge in charges), default=math.inf)
        for number in numbers:
            if not (is_integer(number) and 0 <= number < population):
                most = f" and below {population}" if charges else ""
                raise InvalidValue(f"{unit.value}={number}: expected an integer >= 0{most}")
        for number in sorted(set(numbers) - withdrawn(account.entries)):
            account.append(WITHDRAWN, {"unit": unit, "number": int(number)})
        return account.entries


def withdrawn(entries: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the numbers of the users or clients that withdrew."""
    return frozenset(entry["number"] for entry in entries if entry["kind"] == WITHDRAWN)


def forgotten(entries: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the numbers of the clients whose nodes confirmed that they deleted their memory."""
    return frozenset(entry["number"] for entry in entries if entry["kind"] == FORGOTTEN)


def runs_in(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of all runs of an account."""
    return list(dict.fromkeys(str(entry["run"]) for entry in entries if entry.get("run")))


def note_forgotten(path: Path, numbers: Collection[int]) -> None:
    """Record that the nodes of these clients deleted the values that they kept between rounds."""
    with closing(LedgerFile(path, wait=True)) as account:
        for number in sorted(set(numbers) - forgotten(account.entries)):
            account.append(FORGOTTEN, {"number": number})
