"""A consortium's study: common numbers of people, released statistics, and stages under one budget.

Import names from the modules of this package: `flower_ext_consortium.statistics`, ``linkage``.
"""
