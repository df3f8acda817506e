"""Privacy theorems of single papers: the claim of each, next to what can be proved."""
