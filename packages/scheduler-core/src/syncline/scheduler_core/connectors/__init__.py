"""What a connector is asked and told, and the transfers that ride in plans: protocols, no I/O.

A connector decides and remembers; the runner, or a transport beside it, moves the bytes.
"""

from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.connectors.values import (
    Handoff,
    KVLoad,
    KVStore,
    RemotePrefill,
    TransferId,
)

__all__ = ["Handoff", "KVLoad", "KVStore", "OffloadConnector", "RemotePrefill", "TransferId"]
