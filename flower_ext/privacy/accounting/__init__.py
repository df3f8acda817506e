"""Events and samplers, and the (ε, δ) that they are worth."""
