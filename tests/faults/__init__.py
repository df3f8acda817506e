"""What goes wrong, and what should hold all the same: for tests and `benchmarks.faults`."""
