"""The judge of compiled kernels, on code written for the purpose: each fault is seen, alone."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The modules of tools/ as they import one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import kernel_code
        import kernel_families.base
        import kernel_families.judge

        yield {
            "code": kernel_code,
            "base": kernel_families.base,
            "judge": kernel_families.judge,
        }
        for name in [name for name in sys.modules if name.startswith("kernel_")]:
            del sys.modules[name]


def test_the_operands_of_a_matrix_instruction_are_read_from_it(
    tools: dict[str, ModuleType],
) -> None:
    operands, amd = tools["code"]._operands, tools["code"]._amd_matrix
    scaled = "v_mfma_scale_f32_16x16x128_f8f6f4"
    assert operands("v_mfma_f32_32x32x16_fp8_fp8") == "e4m3 e4m3"
    assert operands("v_mfma_f32_32x32x16_fp8_bf8") == "e4m3 e5m2"
    assert operands("v_mfma_f32_32x32x8_bf16") == "bf16 bf16"
    assert operands("v_mfma_f32_16x16x16_bf16_1k") == "bf16 bf16"
    assert operands("v_mfma_f32_32x32x8_f16") == "f16 f16"
    assert operands("v_mfma_f32_16x16x4_f32") == "f32 f32"
    assert operands(amd(scaled, " v[0:3], v[4:11], v[12:15], 0 cbsz:4 blgp:4")) == "e2m1 e2m1"
    assert operands(amd(scaled, " v[0:3], v[4:11], v[12:19], 0 blgp:4")) == "e4m3 e2m1"
    assert operands("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3") == "e4m3 e4m3"
    assert operands("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == "f16 f16"


def test_each_fault_is_seen_and_a_kernel_without_one_passes(tools: dict[str, ModuleType]) -> None:
    facts_of, rules_of = tools["code"].CodeFacts, tools["base"].Rules
    from syncline.model_ops_rocm.triton.configs.base import ConfigKey

    key = ConfigKey("linear", "gfx942", torch.bfloat16, 16)
    rules = rules_of(
        is_matrix=True,
        without_matrix=frozenset({"sum"}),
        min_occupancy={"gfx942": 2},
        narrow_loads={"gather": 1},
        narrow_stores={"scatter": 1},
    )
    good = facts_of(
        registers=96,
        accumulators=16,
        num_accumulator_moves=0,
        scalar_registers=9,
        num_spills=0,
        num_scalar_spills=0,
        shared_bytes=65_536,
        occupancy=2,
        loads={"buffer_load_dwordx4": 3},
        stores={"global_store_dwordx4": 2},
        matrix={"v_mfma_f32_32x32x8_bf16": 4},
    )

    def faults(kernel: str = "product", **changes: object) -> list[str]:
        return list(tools["judge"].faults_of(replace(good, **changes), rules, key, kernel))

    assert faults() == []
    assert faults(num_spills=1) == ["spills 1"]
    assert faults(num_scalar_spills=2) == ["spills 2 scalar registers"]
    assert faults(shared_bytes=65_537) == ["needs 65537 bytes of shared memory"]
    assert faults(occupancy=1) == ["has occupancy 1"]
    assert faults(num_accumulator_moves=3) == ["moves 3 times to or from an accumulator"]
    (narrow,) = faults(loads={"buffer_load_dwordx4": 3, "buffer_load_ushort": 1})
    assert narrow.startswith("has 1 narrow loads")
    (narrow,) = faults(stores={"buffer_store_short": 1})
    assert narrow.startswith("has narrow stores")
    one_load, one_store = {"loads": {"global_load_dword": 1}}, {"stores": {"global_store_dword": 1}}
    assert faults("gather", **one_load) == faults("scatter", **one_store) == []
    assert len(faults("scatter", **one_load)) == len(faults("gather", **one_store)) == 1
    assert len(faults("gather", loads={"global_load_dword": 2})) == 1
    for converted in ({"v_mfma_f32_32x32x8_f16": 4}, {}):
        (other,) = faults(matrix=converted)
        assert other.startswith("multiplies")
    (other,) = faults("sum", accumulators=0)
    assert other.startswith("multiplies ['bf16 bf16'], not []")
    assert faults("sum", matrix={}) == ["has 16 accumulators, and needs none"]


def test_occupancy_is_what_registers_and_shared_memory_leave(
    tools: dict[str, ModuleType],
) -> None:
    code = """
	buffer_load_dwordx4 v[0:3], v4, s[0:3], 0
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0
; Occupancy: 4
	.amdgpu_metadata
  - .agpr_count:     0
    .private_segment_fixed_size: 0
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     100
    .vgpr_spill_count: 0
"""
    read = tools["code"]._read_amd
    assert read(code, 0, 4, 65_536).occupancy == 4
    assert read(code, 32_768, 4, 65_536).occupancy == 2
    assert read(code, 32_768, 8, 65_536).occupancy == 4
    assert read(code, 32_769, 4, 163_840).occupancy == 4
    assert read(code, 32_768, 4, 65_536).operands() == ["bf16 bf16"]
