"""Faults to inject, and the properties that must hold all the same, for tests and benchmarks."""
