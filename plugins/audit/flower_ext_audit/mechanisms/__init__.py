"""The package's mechanisms as experiments: tiny runs that a canary moves as far as it can.

All of them train the problem of `linear`. Each is a `LinearMechanism`: a plan for any noise and
number of rounds, the strategy under this plan, and each partition's data without and with the
canary.
"""

from flower_ext_audit.mechanisms.of_clients import OF_CLIENTS
from flower_ext_audit.mechanisms.of_records import OF_RECORDS
from flower_ext_audit.mechanisms.of_users import OF_USERS

MECHANISMS = {each.name: each for each in (*OF_CLIENTS, *OF_USERS, *OF_RECORDS)}
"""Mechanisms by their names in ``flower-ext audit``."""
