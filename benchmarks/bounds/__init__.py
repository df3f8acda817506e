"""Convergence theorems of three papers, as published and as they can be proved."""
