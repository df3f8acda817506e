"""Bounds, noise, grids and protections, which together make a release private."""
