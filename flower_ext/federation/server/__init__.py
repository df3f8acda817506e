"""The server's side of a run: its rounds, its loop, its privacy account and its guarantees."""
