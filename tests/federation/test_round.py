"""A round that keeps no updates says how to keep them."""

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.federation.round import _NOT_KEPT


@pytest.mark.parametrize("read", [dict, list, len, lambda kept: kept["w"], lambda k: k.items()])
def test_arrays_of_updates_that_are_not_kept_are_refused_however_they_are_read(read):
    with pytest.raises(InvalidValue, match="needs_each_update = True"):
        read(_NOT_KEPT)
