"""Parts of a private release: bounds on contributions, noise, public grids, and protections."""
