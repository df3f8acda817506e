"""Privacy theorems, a module for each paper: what the paper claims, and what can be proved."""
