"""Silos that run DP-SGD, and the loss of a group of records."""

from flower_ext.privacy import DpSgd
from flower_ext.privacy.accounting.group_privacy import group_loss

FIGURE_2 = DpSgd(noise_multiplier=5.0, sampling_rate=0.01, steps=100_000)

SMALL = DpSgd(noise_multiplier=1.2, sampling_rate=0.1, steps=40)

DELTA = 1e-5


def tight(silo, group_size, delta=DELTA):
    return group_loss(silo, group_size=group_size, delta=delta).epsilon
