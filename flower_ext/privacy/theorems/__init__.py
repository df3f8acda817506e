"""Theorems of single papers: each published claim next to what is provable."""
