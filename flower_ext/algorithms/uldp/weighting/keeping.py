"""A silo of the private weighting between two messages, each of which may reach a fresh process.

What counts is in the client's vault: every step begins from there, and has stored its outcome
before anything leaves. Tables of powers and pools of zeros stay in the process, if that stays; they
spare work and decide nothing.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import asdict
from logging import getLogger
from typing import Any

from flower_ext.algorithms.uldp.weighting.protocol import cores
from flower_ext.federation import ClientVault, Remaining
from flower_ext.secure import WeightingSettings, WeightingSilo, ZeroPool

log = getLogger("flwr")

_POOL_PAYS = 2
"""A pool is set up where a silo re-randomises this many times as many ciphertexts as it takes."""
_PROCESS_KEEPS = 8
"""Silos whose tables stay; each has up to ``table_memory_limit`` bytes of them."""
_earlier: OrderedDict[tuple[bytes, int], WeightingSilo] = OrderedDict()
_pools: OrderedDict[str, ZeroPool] = OrderedDict()


def settings_to_facts(settings: WeightingSettings) -> dict[str, Any]:
    """The settings of a run as plain values; what is not set is left out."""
    facts = {name: value for name, value in asdict(settings).items() if value is not None}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in facts.items()}


def settings_from_facts(facts: dict[str, Any]) -> WeightingSettings:
    """Undo `settings_to_facts`.

    Raises
    ------
    ValueError
        As `WeightingSettings`.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }
    return WeightingSettings(**values)


def keep(silo: WeightingSilo, vault: ClientVault) -> None:
    """Store a silo as it is now."""
    _store(vault, silo.settings, silo.export_state())


def resume(vault: ClientVault) -> WeightingSilo | None:
    """The silo as it was kept last, which stores itself before it sends; None if there is none."""
    kept = vault.load()
    if kept is None:
        return None
    facts = json.loads(kept)
    settings = settings_from_facts(facts["plan"])
    silo = WeightingSilo.from_state(
        settings,
        facts["silo"].encode(),
        save=lambda state: _store(vault, settings, state),
        workers=cores(),
    )
    earlier = _earlier.get((settings.context, silo.index))
    if earlier is not None:
        try:
            silo.adopt(earlier)
        except ValueError:  # set up anew since then
            del _earlier[settings.context, silo.index]
    return silo


def pool_pays(settings: WeightingSettings) -> bool:
    """Whether a pool of zeros pays within one round."""
    share = math.ceil(settings.ciphertexts / settings.silos)
    return share >= _POOL_PAYS * ZeroPool.size(settings.key_bits)


def prepare(silo: WeightingSilo) -> None:
    """A pool of zeros where it pays, shared with the other silos of this process."""
    settings = silo.settings
    if silo.prepared or not pool_pays(settings):
        return
    name = f"silo {silo.index}: pool of zeros"
    pool = silo.prepare(_pools.get(settings.run), progress=Remaining(name))
    _pools[settings.run] = pool
    while len(_pools) > 1:
        _pools.popitem(last=False)


def remember(silo: WeightingSilo) -> None:
    """Leave what a silo computed to its next message, if this process lives to see it."""
    _earlier[silo.settings.context, silo.index] = silo
    _earlier.move_to_end((silo.settings.context, silo.index))
    while len(_earlier) > _PROCESS_KEEPS:
        _earlier.popitem(last=False)


def _store(vault: ClientVault, settings: WeightingSettings, state: bytes) -> None:
    vault.store(json.dumps({"plan": settings_to_facts(settings), "silo": state.decode()}).encode())
