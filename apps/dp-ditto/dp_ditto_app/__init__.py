"""DP-Ditto and its rivals as one Flower app."""
