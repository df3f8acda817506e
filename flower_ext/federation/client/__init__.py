"""The client side that all methods share: requests, local training, protection, replies."""

from flower_ext.federation.client.app import client_app
from flower_ext.federation.client.client_method import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Question,
    own_model,
    shared_model,
)

__all__ = [
    "ClientMethod",
    "ClientWork",
    "LocalResult",
    "Memory",
    "Question",
    "client_app",
    "own_model",
    "shared_model",
]
