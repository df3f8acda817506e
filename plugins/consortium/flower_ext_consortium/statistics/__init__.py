"""Statistics of people in several silos under differential privacy, such as means and histograms.

Begin with `JointStatistics`: several statistics that one noised sum releases together. The method
`ClientStatistics` or `UserStatistics` releases them.
"""

from flower_ext_consortium.statistics.kinds import (
    Bins,
    Count,
    Histogram,
    Mean,
    Quantiles,
    SurvivalCurve,
    Variance,
)
from flower_ext_consortium.statistics.notation import read_statistics
from flower_ext_consortium.statistics.release import (
    ClientStatistics,
    UserStatistics,
    estimates,
    statistics_task,
)
from flower_ext_consortium.statistics.results import StatisticsFiles
from flower_ext_consortium.statistics.statistic import Estimate, JointStatistics, Statistic

__all__ = [
    "Bins",
    "ClientStatistics",
    "Count",
    "Estimate",
    "Histogram",
    "JointStatistics",
    "Mean",
    "Quantiles",
    "Statistic",
    "StatisticsFiles",
    "SurvivalCurve",
    "UserStatistics",
    "Variance",
    "estimates",
    "read_statistics",
    "statistics_task",
]
