"""Where captured graphs live, one store per kind of graph."""

from syncline.graph_lifecycle.stores.base import GraphStore
from syncline.graph_lifecycle.stores.recorded import RecordedStore

__all__ = ["GraphStore", "RecordedStore"]
