"""Plant small faults one at a time, and measure the share that the tests find."""
