"""Samplers, releases, and the accountants that bound (ε, δ) of releases."""
