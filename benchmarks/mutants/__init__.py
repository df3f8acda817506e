"""Small faults planted one at a time, and the share of them that the tests find."""
