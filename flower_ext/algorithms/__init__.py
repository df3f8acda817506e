"""Federated-learning methods, one module each, with the server's step and the client side."""

from flower_ext.algorithms.apfl import APFL
from flower_ext.algorithms.apple import Apple
from flower_ext.algorithms.dp2_fedsam import Centaur, DP2FedSAM, FedRep
from flower_ext.algorithms.dp_ditto import DPDitto
from flower_ext.algorithms.dp_fedavg import DPFedAvg, DPFedSAM
from flower_ext.algorithms.fedala import FedALA
from flower_ext.algorithms.fedamp import FedAMP
from flower_ext.algorithms.fedbn import FedBN
from flower_ext.algorithms.feddyn import FedDyn
from flower_ext.algorithms.fedper import FedPer
from flower_ext.algorithms.hosted import Hosted
from flower_ext.algorithms.pfedme import PFedMe
from flower_ext.algorithms.scaffold import Scaffold
from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.algorithms.upcycled import Upcycled

__all__ = [
    "APFL",
    "Apple",
    "Centaur",
    "DP2FedSAM",
    "DPDitto",
    "DPFedAvg",
    "DPFedSAM",
    "FedALA",
    "FedAMP",
    "FedBN",
    "FedDyn",
    "FedPer",
    "FedRep",
    "Hosted",
    "PFedMe",
    "Scaffold",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "Upcycled",
]
