"""What the package exports, what its errors are, and that importing it needs PyTorch alone."""

import subprocess
import sys
from pathlib import Path

import syncline
import syncline.model_ops_rocm as ops
from syncline.model_ops_rocm import kv, layouts

AGREED = [
    "KNOWN_ARCHS",
    "PURPOSE_SAMPLE",
    "SURE_LOGPROB",
    "VOCAB_TILE",
    "Advance",
    "AmaxInto",
    "AmaxPartial",
    "ApplyLogitsRules",
    "AttentionMetadata",
    "Availability",
    "BackendUnavailableError",
    "CodeType",
    "CodedSource",
    "CombinePartials",
    "CountTokens",
    "DecodeFault",
    "DecodeInputs",
    "DecodeState",
    "Distribution",
    "Draw",
    "E4m3fnWeight",
    "E4m3fnuzWeight",
    "E8m0Mode",
    "Embedding",
    "Encode",
    "EncodeGrouped",
    "EncodeJob",
    "Encoded",
    "ExpertMap",
    "FormatError",
    "GatherRows",
    "Granularity",
    "KVCopyBlocks",
    "KVWrite",
    "LayoutError",
    "Linear",
    "LinearQuantised",
    "LogitsPartials",
    "LogitsRules",
    "MergeStates",
    "MoeCombine",
    "MoeExperts",
    "MoePermute",
    "MoeRoute",
    "MoeSort",
    "NoConfigurationError",
    "NoImplementationError",
    "NormStyle",
    "NotPreparedError",
    "OpError",
    "Padding",
    "PagedAttention",
    "PerTokenFp8",
    "PreparedEncode",
    "QKNormRopeKVWrite",
    "QuantiseActivation",
    "Quantised",
    "RMSNorm",
    "RMSNormQuant",
    "Recipe",
    "Region",
    "Rejection",
    "RotaryEmbedding",
    "RowMajor",
    "Sample",
    "ScaleType",
    "Shuffle16x16",
    "SiluAndMul",
    "SiluAndMulQuant",
    "SortedPairs",
    "StorageFormat",
    "TensorSpec",
    "TokenLogprobs",
    "TopLogprobs",
    "Unquantised",
    "VerifyDrafts",
    "Vocabulary",
    "WeightLayout",
    "ZeroRule",
    "available",
    "backend_for",
    "checksum_logical",
    "checksum_stored",
    "checksum_tensor",
    "detect_arch",
    "full_region",
    "prepare",
    "select",
    "sorted_capacity",
    "to_e4m3fnuz",
    "uniforms",
]

AGREED_LAYOUTS = [
    "INT4_EVENS_FIRST",
    "INT4_HALVES",
    "INT4_SEQUENTIAL",
    "REST",
    "DigitOrder",
    "Int4Packing",
    "PermutedLayout",
    "RowMajor",
    "Shuffle16x16",
    "Shuffle32x16",
    "WeightLayout",
    "batched_scale_tiles",
    "byte_tile_shuffle",
    "e8m0_gate_up_shuffle",
    "e8m0_shuffle",
    "gate_up_rows",
    "gate_up_rows_shuffle",
    "gate_up_shuffle",
    "gfx1250_tiles",
    "int4_scale_pairs",
    "n32k4_gate_up",
    "scale_tiles",
    "shuffle_nk",
]


def test_the_exported_names_are_the_agreed_ones() -> None:
    assert ops.__all__ == AGREED
    assert all(name in vars(ops) for name in AGREED)


def test_every_error_is_an_op_error() -> None:
    errors = [ops.BackendUnavailableError, ops.NoImplementationError]
    assert all(issubclass(error, ops.OpError) for error in [*errors, ops.LayoutError])
    assert issubclass(ops.FormatError, ops.OpError)


def test_the_namespace_has_no_package_of_its_own() -> None:
    assert all(not (Path(folder) / "__init__.py").exists() for folder in syncline.__path__)


def test_import_and_listing_touch_no_kernel_library() -> None:
    script = (
        "import sys\n"
        "import syncline.model_ops_rocm as ops\n"
        "import syncline.model_ops_rocm.testing\n"
        "before = {'triton', 'aiter'} & set(sys.modules)\n"
        "ops.available()\n"
        "ops.detect_arch()\n"
        "after = {'triton', 'aiter'} & set(sys.modules)\n"
        "print(sorted(before | after))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_kv_layouts_exported_are_the_agreed_ones() -> None:
    agreed = ["KVLayout", "KVOrder", "KVPool", "KVScale", "KVSupport", "Side"]
    agreed += ["logical_caches", "read_tokens", "require_agreement", "write_tokens"]
    assert kv.__all__ == agreed
    assert all(name in vars(kv) for name in agreed)


def test_the_layouts_exported_are_the_agreed_ones() -> None:
    assert layouts.__all__ == AGREED_LAYOUTS
    assert all(name in vars(layouts) for name in AGREED_LAYOUTS)
