"""Upcycled-FL and the methods it wraps, as one Flower app."""
