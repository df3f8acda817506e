"""Storage of a silo of private weighting between messages, each of which may reach a new process.

The silo's state is in the client's vault. Every step starts from the stored state, and stores its
outcome before anything leaves. Tables of powers and pools of zeros stay in the process as long as
it lives; they only save time.
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
"""Least ratio of a round's re-randomised ciphertexts to a pool's set-up for which a pool pays."""
_PROCESS_KEEPS = 8
"""Number of silos whose tables stay in memory, of up to ``table_memory_limit`` bytes each."""
_earlier: OrderedDict[tuple[bytes, int], WeightingSilo] = OrderedDict()
_pools: OrderedDict[str, ZeroPool] = OrderedDict()


def settings_to_facts(settings: WeightingSettings) -> dict[str, Any]:
    """Return the settings of a run as plain values, without those that are None."""
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
    """Store a silo's current state."""
    _store(vault, silo.settings, silo.export_state())


def resume(vault: ClientVault) -> WeightingSilo | None:
    """Return the silo that was stored last, or None. It stores itself before it sends."""
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
        except ValueError:  # the silo was set up anew meanwhile
            del _earlier[settings.context, silo.index]
    return silo


def pool_pays(settings: WeightingSettings) -> bool:
    """Return True if a pool of zeros pays off within one round."""
    share = math.ceil(settings.ciphertexts / settings.silos)
    return share >= _POOL_PAYS * ZeroPool.size(settings.key_bits)


def prepare(silo: WeightingSilo) -> None:
    """Set up a pool of zeros if it pays off, shared with the other silos of this process."""
    settings = silo.settings
    if silo.prepared or not pool_pays(settings):
        return
    name = f"silo {silo.index}: pool of zeros"
    pool = silo.prepare(_pools.get(settings.run), progress=Remaining(name))
    _pools[settings.run] = pool
    while len(_pools) > 1:
        _pools.popitem(last=False)


def remember(silo: WeightingSilo) -> None:
    """Keep a silo's tables in this process for its next message."""
    _earlier[silo.settings.context, silo.index] = silo
    _earlier.move_to_end((silo.settings.context, silo.index))
    while len(_earlier) > _PROCESS_KEEPS:
        _earlier.popitem(last=False)


def _store(vault: ClientVault, settings: WeightingSettings, state: bytes) -> None:
    vault.store(json.dumps({"plan": settings_to_facts(settings), "silo": state.decode()}).encode())
