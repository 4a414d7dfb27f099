"""Where weights and KV live: memory that can be given back and brought back, by tag."""

from syncline.graph_lifecycle.arena.base import Arena
from syncline.graph_lifecycle.arena.plain import PlainArena
from syncline.graph_lifecycle.arena.poison import PoisonArena

__all__ = ["Arena", "PlainArena", "PoisonArena"]
