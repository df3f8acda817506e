"""Waiting for nodes: the log says in time how to start more of them."""

import pytest
from flwr.clientapp import ClientApp

from flower_ext.federation import FederationNotReady, InProcessGrid, roster


def test_a_simulation_with_too_few_nodes_says_early_how_to_ask_for_more(monkeypatch, caplog):
    monkeypatch.setattr(roster, "_ADVISE_AFTER", 0.1)
    monkeypatch.setattr(roster.log, "propagate", True)
    grid = InProcessGrid(ClientApp(), 2)
    with pytest.raises(FederationNotReady, match="2 of 5 nodes"):
        roster.wait_for_nodes(grid, 5, least=5, timeout=1.5)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert '--federation-config "num-supernodes=5"' in said[0]
