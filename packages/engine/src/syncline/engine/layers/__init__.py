"""The few layers that dense decoders share; each declares its weight slots when it is built."""

from syncline.engine.layers.basic import Embedding, Linear, RMSNorm
from syncline.engine.layers.ops import Ops

__all__ = ["Embedding", "Linear", "Ops", "RMSNorm"]
