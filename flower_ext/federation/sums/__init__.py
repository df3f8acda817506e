"""Sums of the clients' contributions: plain, masked, or weighted under encryption."""
