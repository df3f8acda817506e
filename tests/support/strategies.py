"""Strategies from one list of options, which belong to the method or to the strategy."""

from dataclasses import fields
from typing import Any

from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpSgd, weighted_sum
from flower_ext.federation import FederatedStrategy, Method


def strategy_of(method: type[Method], *values: Any, **options: Any) -> FederatedStrategy:
    """Return the strategy of a method whose fields are among the options."""
    names = {field.name for field in fields(method)}
    method_options = {name: options.pop(name) for name in [*options] if name in names}
    return FederatedStrategy(method(*values, **method_options), options.pop("plan"), **options)


def private_strategy_of(
    method: type[UldpAvg | UldpSgd] = UldpAvg, *, protocol: Any = None, **options: Any
) -> FederatedStrategy:
    """Return the strategy of a method whose weights by records no party learns."""
    chosen = {"weighting": "by-records", "sum": weighted_sum(protocol or "paillier"), **options}
    return strategy_of(method, **chosen)


def group_strategy(*, delta: float, **options: Any) -> FederatedStrategy:
    """Return the strategy of ULDP-GROUP under its own plan."""
    names = {field.name for field in fields(UldpGroup)}
    method = UldpGroup(**{name: options.pop(name) for name in [*options] if name in names})
    return FederatedStrategy(method, method.plan(delta), **options)
