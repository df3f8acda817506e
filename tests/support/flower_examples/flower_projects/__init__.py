"""Projects as Flower's examples are: a CNN, mods that log, DP-SGD by Opacus, clipping by a mod."""
