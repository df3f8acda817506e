"""Bounds, noise, grids and protections: what makes a release private."""
