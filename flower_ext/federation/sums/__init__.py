"""Sums of the clients' contributions: in the clear, or masked so that nobody sees a single one."""
