"""A model directory's `config.json` and `generation_config.json` as checked, frozen values.

Reads what changes the arithmetic of the models we build, and refuses by name what it cannot honour:
a feature that is read past in silence gives a model that is almost right. Keys that matter only to
training or to other software are not looked at. Knows no tensor and no weight file.
Where transformers reads one setting from two keys, both must say the same.
Source: the keys and defaults of transformers 5.24, `configuration_qwen3.py`; both spellings of the
rope settings (`rope_parameters`, and `rope_theta` with `rope_scaling` before transformers 5).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

from syncline.engine.errors import CheckpointError, UnsupportedModelError

SUPPORTED_ARCHITECTURES: Final = ("Qwen3ForCausalLM",)

_DEFAULT_HEAD_DIM: Final = 128
_DEFAULT_RMS_NORM_EPS: Final = 1e-6
_DEFAULT_ROPE_THETA: Final = 10_000.0
_DEFAULT_SLIDING_WINDOW: Final = 4096
_DEFAULT_MAX_WINDOW_LAYERS: Final = 28
_MODEL_TYPE: Final = "qwen3"
_ROPE_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

CheckpointDType = Literal["float32", "bfloat16", "float16"]
Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder of the Qwen3 family is made of; `vocab_size` counts embedding rows."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    has_attention_bias: bool
    has_tied_embeddings: bool
    dtype_name: CheckpointDType

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read and check `config.json`.

    CheckpointError: no such directory, no file, not JSON, a key missing or out of range.
    UnsupportedModelError: an architecture or a feature that the engine does not build.
    """
    path = Path(directory)
    if not path.is_dir():
        kind = "a file, not a directory" if path.exists() else "no such directory"
        raise CheckpointError(str(path), kind)
    raw = _read_json(path, "config.json")
    if raw is None:
        raise CheckpointError(str(path), "config.json is missing")
    return _parse(_Fields(str(path), raw))


def read_eos_token_ids(directory: str | Path, true_vocab_size: int | None = None) -> frozenset[int]:
    """Ids that end a sequence: `generation_config.json`'s where it names any, else the model's.

    CheckpointError for an id in either file that is none, or that lies beyond `true_vocab_size`
    and could never end anything.
    """
    path = Path(directory)
    chosen: frozenset[int] | None = None
    for name in ("generation_config.json", "config.json"):
        raw = _read_json(path, name)
        value = None if raw is None else raw.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(
                str(path), f"{name}: eos_token_id must be token ids, got {value!r}"
            )
        named = frozenset(cast("list[int]", ids))  # cast: each element was checked above
        if true_vocab_size is not None and max(named, default=0) >= true_vocab_size:
            raise CheckpointError(
                str(path),
                f"{name}: eos_token_id names {max(named)}; "
                f"the tokenizer's ids end at {true_vocab_size - 1}",
            )
        chosen = named if chosen is None else chosen
    return frozenset() if chosen is None else chosen


class _Fields:
    """Typed access to the keys of one config.json; every error names the key."""

    __slots__ = ("path", "raw")

    def __init__(self, path: str, raw: Json) -> None:
        self.path = path
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(self.path, f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                self.path, f"config.json: {key} must be a positive integer, got {value!r}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        return self.check_number(key, self.raw.get(key, default))

    def check_number(self, key: str, value: object) -> float:
        # Not `value <= 0`, which lets NaN through; JSON as Python reads it has NaN and Infinity.
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= sys.float_info.max
        ):
            raise CheckpointError(
                self.path, f"config.json: {key} must be a positive number, got {value!r}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(
                self.path, f"config.json: {key} must be true or false, got {value!r}"
            )
        return value

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(self.path, f"{what} is not supported")


def _parse(fields: _Fields) -> ModelConfig:
    architecture = _architecture(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", _DEFAULT_HEAD_DIM)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            fields.path,
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}",
        )
    if head_dim % 2:
        raise CheckpointError(fields.path, f"config.json: head_dim must be even, got {head_dim}")
    _refuse_unsupported(fields, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
        rope_theta=_rope_theta(fields),
        has_attention_bias=fields.flag("attention_bias", False),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype_name=_dtype_name(fields),
    )


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(
            fields.path, f"config.json: architectures must name one class, got {names!r}"
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            fields.path,
            f"architecture {names[0]} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    return str(names[0])


def _refuse_unsupported(fields: _Fields, num_layers: int) -> None:
    raw = fields.raw
    model_type = raw.get("model_type", _MODEL_TYPE)
    if model_type != _MODEL_TYPE:
        raise fields.unsupported(f"model_type {model_type!r}")
    if not fields.flag("is_causal", True):
        raise fields.unsupported("bidirectional attention (is_causal)")
    if raw.get("per_layer_config"):
        raise fields.unsupported("a configuration per layer (per_layer_config)")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.unsupported(f"hidden_act {activation!r}")
    if raw.get("quantization_config") is not None:
        raise fields.unsupported("a quantised checkpoint (quantization_config)")
    _refuse_sliding_layers(fields, num_layers)


def _refuse_sliding_layers(fields: _Fields, num_layers: int) -> None:
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(
            fields.path, f"config.json: layer_types must be a list, got {layer_types!r}"
        )
    if layer_types is not None:
        other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if other:
            raise fields.unsupported(f"layer type {', '.join(other)}")
        if len(layer_types) != num_layers:
            raise CheckpointError(
                fields.path,
                f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers",
            )
    elif _has_sliding_layers(fields, num_layers):
        raise fields.unsupported("sliding-window attention (use_sliding_window)")


def _has_sliding_layers(fields: _Fields, num_layers: int) -> bool:
    """Without layer_types, the layers from max_window_layers on are the sliding ones."""
    if not fields.flag("use_sliding_window", False):
        return False
    if fields.raw.get("sliding_window", _DEFAULT_SLIDING_WINDOW) is None:
        return False
    return fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS) < num_layers


def _rope_theta(fields: _Fields) -> float:
    """The base of the default rope, the only one that is built.

    transformers lets a `rope_scaling` replace `rope_parameters` whole, other software the other way
    round: where both are there, both must come to the same rope.
    """
    if fields.raw.get("partial_rotary_factor") not in (None, 1.0):
        raise fields.unsupported("partial_rotary_factor")
    spellings = ("rope_parameters", "rope_scaling")
    thetas = {
        key: _theta_of(fields, key, fields.raw[key])
        for key in spellings
        if fields.raw.get(key) is not None
    }
    if not thetas:
        return fields.number("rope_theta", _DEFAULT_ROPE_THETA)
    if len(set(thetas.values())) > 1:
        raise fields.unsupported(
            f"rope_scaling beside rope_parameters that says otherwise (rope_theta: {thetas})"
        )
    return next(iter(thetas.values()))


def _theta_of(fields: _Fields, key: str, settings: object) -> float:
    if not isinstance(settings, dict):
        raise CheckpointError(fields.path, f"config.json: {key} must be an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise fields.unsupported(f"rope scaling of type {kind!r} ({key})")
    unknown = sorted(set(settings) - _ROPE_KEYS)
    if unknown:  # One rope per layer type is nested under keys of its own.
        raise fields.unsupported(f"{', '.join(unknown)} in {key}")
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.unsupported(f"partial_rotary_factor ({key})")
    theta = settings.get("rope_theta", fields.raw.get("rope_theta", _DEFAULT_ROPE_THETA))
    return fields.check_number("rope_theta", theta)


def _dtype_name(fields: _Fields) -> CheckpointDType:
    name = fields.raw.get("dtype", fields.raw.get("torch_dtype", "float32"))
    for known in get_args(CheckpointDType):
        if name == known:
            return cast(CheckpointDType, known)  # cast: it is one of the literal's own values
    raise fields.unsupported(f"dtype {name!r}")


def _read_json(directory: Path, name: str) -> Json | None:
    """The object in one file; None when the file does not exist."""
    try:
        text = (directory / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(directory), f"{name} cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(str(directory), f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(directory), f"{name} must hold an object")
    return value
