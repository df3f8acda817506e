"""One module a method: Strategy and client side next to each other."""

from flower_ext.algorithms.dp2_fedsam import Centaur, DP2FedSAM
from flower_ext.algorithms.dp_fedavg import DPFedAvg, DPFedAvgFT, DPFedSAM, DPFedSAMFT

__all__ = ["Centaur", "DP2FedSAM", "DPFedAvg", "DPFedAvgFT", "DPFedSAM", "DPFedSAMFT"]
