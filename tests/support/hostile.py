"""Plans and replies for tests of hostile messages."""

from functools import partial

from flower_ext.training import LocalTraining
from tests.support.plans import release_plan

CLIENTS = 4
FAST = LocalTraining(epochs=1, batch_size=10)
plan = partial(release_plan, CLIENTS)
