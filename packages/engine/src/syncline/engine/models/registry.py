"""The architectures the engine builds, by the name a checkpoint gives."""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from syncline.engine.layers import Ops
from syncline.engine.models.base import Model
from syncline.engine.models.config import ModelConfig
from syncline.engine.models.qwen3 import Qwen3Model
from syncline.engine.weights import WeightBuilder

MODELS: Final[Mapping[str, Callable[[ModelConfig, Ops, WeightBuilder, Tensor], Model]]] = {
    "Qwen3ForCausalLM": Qwen3Model,
}


def build_model(config: ModelConfig, ops: Ops, builder: WeightBuilder, cos_sin_PD: Tensor) -> Model:
    """Every slot of the model is in `builder` afterwards; none has its values yet."""
    return MODELS[config.architecture](config, ops, builder, cos_sin_PD)
