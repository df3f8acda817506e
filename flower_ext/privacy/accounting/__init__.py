"""Samplers and releases, and accountants that bound their (ε, δ)."""
