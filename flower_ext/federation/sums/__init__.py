"""Sums of the clients' contributions: plain, or masked so that nobody sees a contribution."""
