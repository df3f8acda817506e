"""Privacy theorems of individual papers: what each claims, next to what is provable."""
