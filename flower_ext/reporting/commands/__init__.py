"""Commands of ``flower-ext`` that are more than a call."""
