"""A signed statement about the models of a study, for a person or a client that withdrew from it.

The statement counts all rounds that were charged before the withdrawal. Models do not change. For
each model, the statement gives the guarantee of its run: the (ε, δ) with which the model is
indistinguishable from a model that was trained without this person.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from flower_ext.errors import InvalidValue
from flower_ext.files import read_key, write_whole
from flower_ext.privacy import AdversaryView, DpSgd, Ledger, PrivacyUnit, epsilon_text
from flower_ext.privacy.account_entries import DISCLOSURE, WITHDRAWN, WITHOUT_NOISE, label_of
from flower_ext.privacy.accounting.accountant import joint_loss, privacy_loss_of
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.study_composition import RunCharges, runs_of
from flower_ext.privacy.withdrawal import forgotten, withdrawn

_MODELS = AdversaryView.RELEASED_MODELS
_NOTHING = "nothing can be claimed"


def statement(path: Path, unit: PrivacyUnit, numbers: Collection[int]) -> dict[str, Any]:
    """Return a statement about the models of all runs that charged rounds before the withdrawal."""
    entries = Ledger.read(path)
    if missing := sorted(set(numbers) - withdrawn(entries)):
        raise InvalidValue(
            f"{unit.value}={missing[0]} has not withdrawn: expected numbers that the "
            "account records as withdrawn; call withdraw first"
        )
    ends = [
        index
        for index, entry in enumerate(entries)
        if entry["kind"] == WITHDRAWN and entry["number"] in numbers
    ]
    # Until the last of the person's numbers is withdrawn, rounds may use records under it.
    before = entries[: max(ends)]
    if unit is PrivacyUnit.USER:
        memory = "silos keep no model of a single user"
    elif set(numbers) <= forgotten(entries):
        memory = "the node confirmed that it deleted the memory of all runs of the study"
    else:
        memory = "the node has not confirmed yet; the study's next run asks it to delete its memory"
    runs, size = runs_of(before), len(set(numbers))
    whole = unit is PrivacyUnit.USER or all(run.unit is unit for run in runs)
    unnoised = {label_of(entry): entry for entry in before if entry.get("what") == WITHOUT_NOISE}
    lines = [_line(run, size, is_protected=whole) for run in runs]
    lines += [
        {"run": entry["run"], "name": label, "method": entry["method"], "claim": _NOTHING}
        for label, entry in unnoised.items()
    ]
    together = _NOTHING
    if runs and whole and not unnoised:
        delta = max(run.charges[-1]["budget"]["delta"] for run in runs)
        together = _claim(_loss_of_group([run.against(_MODELS) for run in runs], size, delta))
    return {
        "study": path.name,
        "account": entries[max(ends)]["hash"],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "unit": unit.value,
        "numbers": sorted(set(numbers)),
        "meaning": (
            "The models were not changed. Each is (ε, δ)-indistinguishable from a model without "
            "this person, for an adversary who sees the released models and not who took part. No "
            "round that was charged after the withdrawal uses data of this person."
        ),
        "runs": lines,
        "all runs together": together,
        "memory of clients": memory,
        "not claimed": [
            "whether each silo deleted the person's records: ask each silo, because records for "
            "tests of a model carry no user numbers, so tests may still use this person's records",
            *sorted({entry["what"] for entry in before if entry["kind"] == DISCLOSURE}),
        ],
    }


def _line(run: RunCharges, size: int, *, is_protected: bool) -> dict[str, Any]:
    """Return the statement's entry about one run.

    ``is_protected`` is False if the run's guarantee is for another unit.
    """
    last, rounds = run.charges[-1], len(run.charges)
    of_run = {"run": last["run"], "name": run.label, "method": last["method"], "releases": rounds}
    if not is_protected:
        return {**of_run, "claim": f"{_NOTHING}: its guarantee is for one {run.unit.value}"}
    part = run.against(_MODELS)
    # A run that repeated rounds has an (ε, δ) for each stretch of rounds without repetition. Their
    # δ's add up, and ``last`` has the δ of one stretch.
    delta = last["delta"] + sum(spend.delta for spend in part.spends[1:])
    loss = _loss_of_group([part], size, delta)
    return {
        **of_run,
        "claim": _claim(loss),
        **({} if loss is None else {"epsilon": loss.epsilon, "delta": loss.delta}),
        "relation": part.relation,
        "accountant": "none" if loss is None else loss.accountant,
        "assumptions": run.texts(_MODELS, "assumptions"),
    }


def _claim(loss: PrivacyLoss | None) -> str:
    if loss is None:
        return _NOTHING
    return f"ε = {epsilon_text(loss.epsilon)} at δ = {loss.delta:.3g}"


def _loss_of_group(parts: Sequence[Any], size: int, delta: float) -> PrivacyLoss | None:
    """Return the joint privacy loss of runs for a person with ``size`` numbers.

    None if ε is infinite, or if the package cannot bound ε for a group of this size.
    """
    if any(part.is_unbounded for part in parts):
        return None
    releases = sum((part.releases for part in parts), type(parts[0].releases)())
    spends = [spend for part in parts for spend in part.spends]
    if size == 1:
        loss = joint_loss(releases, spends, delta=delta)
    elif spends or any(release.approximation_error for release in releases):
        return None
    elif all(release.sampling.sampling_rate == 1 for release in releases):
        # k numbers move each sum up to k times as far as one number, as if the noise were σ / k.
        loss = privacy_loss_of(
            {
                replace(release, noise_multiplier=release.noise_multiplier / size): count
                for release, count in releases.items()
            },
            delta=delta,
        )
    # A sampled group needs the mixture over how many of its members are drawn, which `group_loss`
    # computes for rounds that are all alike.
    elif len(releases) == 1 and (release := next(iter(releases))).poisson_rate < 1:
        rounds = DpSgd(
            noise_multiplier=release.noise_multiplier,
            sampling_rate=release.poisson_rate,
            steps=releases[release],
        )
        loss = group_loss(rounds, group_size=size, delta=delta)
    else:
        return None
    return loss if math.isfinite(loss.epsilon) else None


def signed(content: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """Return a statement with its public key and its signature."""
    whole = {**content, "public key": key.public_key().public_bytes_raw().hex()}
    return {**whole, "signature": key.sign(_bytes(whole)).hex()}


def verify(content: Mapping[str, Any], public_key: str) -> None:
    """Refuse a statement that was changed, or that the owner of ``public_key`` did not sign.

    Take the study's public key, 64 hexadecimal digits, from a source that you trust. The key inside
    the statement proves nothing.
    """
    if not public_key:
        raise InvalidValue(
            "--public-key is missing: to verify a statement, give the public key that the study "
            "published, 64 hexadecimal digits"
        )
    whole = {name: value for name, value in content.items() if name != "signature"}
    try:
        if whole["public key"] != public_key.lower():
            raise InvalidValue(
                f"public key {whole['public key']}: expected --public-key={public_key.lower()}; "
                "this statement was signed with another key"
            )
        signature = bytes.fromhex(content["signature"])
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(signature, _bytes(whole))
    except (InvalidSignature, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(
            "the signature does not fit the statement: expected the unchanged file that "
            "flower-ext withdraw wrote"
        ) from None


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the study's signing key from a file; write a new key if the file does not exist."""
    if not path.exists():
        # `write_whole` makes a file that no other user can read, even while it is being written.
        write_whole(path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode() + b"\n")
    private = read_key(path, "key", "a file that `flower-ext withdraw` wrote", is_text=True)
    return Ed25519PrivateKey.from_private_bytes(private)


def _bytes(content: Mapping[str, Any]) -> bytes:
    # Sorted and in ASCII: the bytes do not depend on how a file orders or encodes the same content.
    return json.dumps(dict(content), sort_keys=True, ensure_ascii=True).encode()
