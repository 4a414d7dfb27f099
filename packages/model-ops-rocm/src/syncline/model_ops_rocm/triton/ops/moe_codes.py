"""Experts on codes: x, and what SwiGLU gives, are encoded, and codes multiply codes.

Two launches more than without a recipe, one before each projection.
"""

import torch

from syncline.model_ops_rocm.arguments.moe import MOE_EXPERTS
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.quant.scheme import CodeType
from syncline.model_ops_rocm.triton.kernels.moe_codes import codes_down_kernel, codes_gate_up_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, Chosen
from syncline.model_ops_rocm.triton.ops.moe_call import ExpertCall
from syncline.model_ops_rocm.triton.ops.moe_routing import launch_combine, launch_sort
from syncline.model_ops_rocm.triton.ops.quantise import quantise_activation
from syncline.model_ops_rocm.triton.targets import casts_natively


def require_native(recipe: Quantised) -> None:
    """Codes are multiplied only where there are instructions for them, and by the interpreter."""
    arch = LAUNCHER.arch
    if not IS_INTERPRETED and not casts_natively(arch, recipe.code):
        refuse(MOE_EXPERTS, "recipe", f"be None, or of {arch}'s own type", recipe.describe())


def run_codes(call: ExpertCall, recipe: Quantised, gate_up: Chosen, down: Chosen) -> None:
    """The call in sorted blocks, by these configurations."""
    shapes, block_size = call.shapes, gate_up[1].constants["BLOCK_M"]
    activated, y, pairs = call.activated(), call.y(), call.sort(block_size)
    of_x, of_activated = call.codes_of_x(recipe), call.codes_of_activated(recipe)
    constants = {"DECODE": IS_INTERPRETED, "FNUZ": recipe.code is CodeType.E4M3FNUZ}
    scales = call.scales_or_weights
    launch_sort(call.routing[1], pairs, block_size, 1)
    num_blocks = pairs.block_groups.shape[0]
    blocks = (pairs.pairs, pairs.block_groups, shapes.num_pairs, num_blocks)
    quantise_activation(call.x, recipe, out=of_x)
    LAUNCHER.launch(
        codes_gate_up_kernel,
        (num_blocks * -(-shapes.intermediate // gate_up[1].constants["BLOCK_N"]),),
        gate_up,
        (_read(of_x[0]), of_x[1], _read(call.w13), scales[0], activated, *blocks),
        {**constants, **call.constants(gate_up), "TOP_K": shapes.top_k},
    )
    quantise_activation(activated, recipe, out=of_activated)
    LAUNCHER.launch(
        codes_down_kernel,
        (num_blocks * -(-shapes.hidden // down[1].constants["BLOCK_N"]),),
        down,
        (_read(of_activated[0]), of_activated[1], _read(call.w2), scales[1], y, *blocks),
        {**constants, **call.constants(down)},
    )
    launch_combine(y, call.routing, call.out, shapes.num_experts, by_pair=True)


def _read(codes: torch.Tensor) -> torch.Tensor:
    """As a kernel reads them: bytes where nothing knows their type."""
    return codes.view(torch.uint8) if IS_INTERPRETED else codes
