"""A consortium's study: user numbers common to all silos, statistics, and stages under one budget.

Import names from the modules of this package: `flower_ext_consortium.statistics`, ``linkage``.
"""
