"""A process that uses Ray for something else than a simulation of Flower."""

import sys
from types import ModuleType, SimpleNamespace


def use_ray(monkeypatch, actor_id=None, function=None):
    """Make Ray look initialised: in a driver, or in ``function`` of an actor."""
    here = SimpleNamespace(
        get_actor_id=lambda: actor_id, get_task_function_name=lambda: function or ""
    )
    ray = ModuleType("ray")
    ray.is_initialized, ray.get_runtime_context = (lambda: True), (lambda: here)
    monkeypatch.setitem(sys.modules, "ray", ray)
