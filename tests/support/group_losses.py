"""Losses of groups by three conversions, for silos that run DP-SGD."""

from flower_ext.privacy import DpSgd
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.theorems.uldp_group_theorem import (
    group_loss_by_conversion,
    group_loss_by_renyi,
)

FIGURE_2 = DpSgd(noise_multiplier=5.0, sampling_rate=0.01, steps=100_000)

SMALL = DpSgd(noise_multiplier=1.2, sampling_rate=0.1, steps=40)

DELTA = 1e-5


def tight(silo, group_size, delta=DELTA):
    return group_loss(silo, group_size=group_size, delta=delta).epsilon


def renyi(silo, group_size, delta=DELTA):
    return group_loss_by_renyi(silo, group_size=group_size, delta=delta).epsilon


def conversion(silo, group_size, delta=DELTA):
    return group_loss_by_conversion(silo, group_size=group_size, delta=delta).epsilon
