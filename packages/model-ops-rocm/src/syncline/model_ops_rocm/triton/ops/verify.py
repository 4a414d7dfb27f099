"""Verifying drafts by Triton: one launch against ids, four against logits."""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.decoding import VERIFY, check_verify
from syncline.model_ops_rocm.checks import refuse, workspace_of
from syncline.model_ops_rocm.contracts.decoding import Rejection
from syncline.model_ops_rocm.reference.philox import PURPOSE_ACCEPT, PURPOSE_RECOVER
from syncline.model_ops_rocm.triton.configs.decoding import MAX_IDS
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.rejection import accept_kernel, stats_kernel
from syncline.model_ops_rocm.triton.kernels.residual import follow_kernel, residual_kernel
from syncline.model_ops_rocm.triton.kernels.verify import verify_exact_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen, require_reachable

TILE: Final = 1_024
KIND_TILES: Final = "rejection-tiles"  # programs that read tiles
KIND_ROWS: Final = "rejection-rows"  # programs that have a row each
_FACTS: Final = 4
Result = tuple[torch.Tensor, torch.Tensor]


class TritonVerifyDrafts:
    """See `contracts.VerifyDrafts`."""

    __slots__ = ()

    def workspace_bytes(
        self, drafts_RK: torch.Tensor, target: torch.Tensor, rejection: Rejection | None = None
    ) -> int:
        if rejection is None:
            return 0
        return sum(_Sizes.of(drafts_RK, target, rejection).parts)

    def __call__(
        self,
        drafts_RK: torch.Tensor,
        target: torch.Tensor,
        *,
        rejection: Rejection | None = None,
        query_start_loc_R1: torch.Tensor | None = None,
        out: Result | None = None,
        workspace: torch.Tensor | None = None,
    ) -> Result:
        starts = query_start_loc_R1
        check_verify(*(drafts_RK, target), rejection=rejection, query_start_loc_R1=starts, out=out)
        num_rows, num_drafts = drafts_RK.shape
        if out is None:
            out = (
                torch.empty((num_rows, num_drafts + 1), dtype=torch.int64, device=target.device),
                torch.empty(num_rows, dtype=torch.int32, device=target.device),
            )
        require_reachable(VERIFY, drafts=drafts_RK, target=target, query_start_loc=starts)
        require_reachable(VERIFY, **{"out[0]": out[0], "out[1]": out[1]})
        if rejection is None:
            if num_rows:
                _verify_exactly(drafts_RK, target, starts, out)
            return out
        num_bytes = self.workspace_bytes(drafts_RK, target, rejection)
        staged = workspace_of(VERIFY, workspace, num_bytes, target.device)
        require_reachable(VERIFY, workspace=staged)
        _require_reachable(rejection)
        if num_rows:
            _Rejecting(drafts_RK, target, rejection, starts).verify(out, staged)
        return out


VERIFY_DRAFTS: Final = TritonVerifyDrafts()


def _verify_exactly(
    drafts_RK: torch.Tensor, target: torch.Tensor, starts: torch.Tensor | None, out: Result
) -> None:
    num_rows, num_drafts = drafts_RK.shape
    chosen = LAUNCHER.config(VERIFY, torch.int32, num_drafts + 1)
    LAUNCHER.launch(
        verify_exact_kernel,
        (-(-num_rows // chosen[1].constants["BLOCK_ROWS"]),),
        chosen,
        (
            *(drafts_RK, target, starts, *out, num_rows, target.numel()),
            *drafts_RK.stride(),
            *((0, target.stride(0)) if target.ndim == 1 else target.stride()),
            *out[0].stride(),
        ),
        {"NUM_DRAFTS": num_drafts, "BLOCK_QUERIES": power_of_two(num_drafts + 1)},
    )


def _require_reachable(rejection: Rejection) -> None:
    require_reachable(
        VERIFY,
        **{
            "rejection.seeds": rejection.seeds_R,
            "rejection.sample_index": rejection.sample_index_R,
            "rejection.positions": rejection.positions_R,
            "rejection.draft_logits": rejection.draft_logits_RKV,
            "rejection.temperature": rejection.temperature_R,
        },
    )


class _Sizes(NamedTuple):
    """Of one call: its places, and those of its drafter's logits, in tiles of a vocabulary."""

    num_rows: int
    num_places: int
    num_draft_places: int
    num_tiles: int

    @classmethod
    def of(cls, drafts_RK: torch.Tensor, target: torch.Tensor, rejection: Rejection) -> "_Sizes":
        num_ids = target.shape[-1]
        if num_ids > MAX_IDS:
            refuse(VERIFY, "target", f"have at most {MAX_IDS} ids", num_ids)
        return cls(
            num_rows=drafts_RK.shape[0],
            num_places=target.shape[:-1].numel(),
            num_draft_places=0 if rejection.draft_logits_RKV is None else drafts_RK.numel(),
            num_tiles=-(-num_ids // TILE),
        )

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes: facts of rows, maxima and sums of places and of the drafter's, residuals.

        Each begins at 16 bytes, whatever the number of rows: loads are as wide for all.
        """
        of_row = 4 * self.num_tiles
        num_stats = 2 * (self.num_places + self.num_draft_places)
        parts = (8 * _FACTS * self.num_rows, of_row * num_stats, of_row * self.num_rows)
        return tuple(-(-part // 16) * 16 for part in parts)


class _Rejecting:
    """One call by rejection: what its launches share."""

    __slots__ = (
        "_draft_logits",
        "_drafts",
        "_rejection",
        "_sizes",
        "_starts",
        "_strides",
        "_target",
    )

    def __init__(
        self,
        drafts_RK: torch.Tensor,
        target: torch.Tensor,
        rejection: Rejection,
        starts: torch.Tensor | None,
    ) -> None:
        self._drafts = drafts_RK
        self._target = target
        self._rejection = rejection
        self._starts = starts
        self._sizes = _Sizes.of(drafts_RK, target, rejection)
        # Without drafts there is nothing that they were drawn from.
        own = rejection.draft_logits_RKV if drafts_RK.shape[1] else None
        self._draft_logits = own
        # Row, place, id each: packed places have no stride of rows.
        self._strides = (
            *((0, *target.stride()) if target.ndim == 2 else target.stride()),
            *((0, 0, 0) if own is None else own.stride()),
            *drafts_RK.stride(),
        )

    def verify(self, out: Result, workspace: torch.Tensor) -> None:
        parts = self._sizes.parts
        facts, stats, residuals = torch.split(workspace[: sum(parts)], list(parts))
        facts = facts.view(torch.float64)
        stats, residuals = stats.view(torch.float32), residuals.view(torch.float32)
        own = self._draft_logits
        num_rows, num_drafts = self._drafts.shape
        self._sum_places(stats)
        if own is not None:
            self._sum_draft_places(own, stats)
        rows = LAUNCHER.config(VERIFY, self._target.dtype, self._target.shape[-1], KIND_ROWS)
        given = (self._drafts, self._starts, self._target, own, self._rejection.temperature_R)
        draws = (
            *(self._rejection.seeds_R, self._rejection.sample_index_R),
            self._rejection.positions_R,
        )
        sizes = (self._sizes.num_places, self._target.shape[-1], self._sizes.num_tiles)
        walked = (*sizes, *self._strides, *out[0].stride())
        constants = {
            "NUM_DRAFTS": num_drafts,
            "TILE_SLOTS": power_of_two(self._sizes.num_tiles),
            "TILE": TILE,
        }
        LAUNCHER.launch(
            accept_kernel,
            (num_rows,),
            rows,
            (*given, *draws, stats, facts, *out, *walked),
            {
                "PURPOSE": PURPOSE_ACCEPT,
                "BLOCK_QUERIES": max(power_of_two(num_drafts + 1), 2),
                **constants,
            },
        )
        if own is not None:
            tiles = self._tiles_config()
            LAUNCHER.launch(
                residual_kernel,
                self._grid(num_rows, tiles),
                tiles,
                (*given, out[1], facts, residuals, *sizes, *self._strides),
                {"NUM_DRAFTS": num_drafts, "TILE": TILE},
            )
        LAUNCHER.launch(
            follow_kernel,
            (num_rows,),
            rows,
            (*given, *draws, stats, facts, residuals, *out, *walked),
            {"PURPOSE": PURPOSE_RECOVER, **constants},
        )

    def _sum_places(self, stats: torch.Tensor) -> None:
        """Of the target: place 0 of a row always, place i if draft i - 1 is there."""
        packed = self._starts is not None
        given = (self._target, self._rejection.temperature_R, self._drafts, self._starts)
        num_of_row = 1 if packed else self._drafts.shape[1] + 1
        tiles = self._tiles_config()
        LAUNCHER.launch(
            stats_kernel,
            self._grid(self._sizes.num_places, tiles),
            tiles,
            (*given, stats, 0, *self._numbers(), *self._strides[:3], *self._strides[6:]),
            {"NUM_OF_ROW": num_of_row, "FIRST_DRAFT": 1, "TILE": TILE},
        )

    def _sum_draft_places(self, logits: torch.Tensor, stats: torch.Tensor) -> None:
        given = (logits, self._rejection.temperature_R, self._drafts, None)
        tiles = self._tiles_config()
        LAUNCHER.launch(
            stats_kernel,
            self._grid(self._sizes.num_draft_places, tiles),
            tiles,
            (*given, stats, self._sizes.num_places, *self._numbers(), *self._strides[3:]),
            {"NUM_OF_ROW": self._drafts.shape[1], "FIRST_DRAFT": 0, "TILE": TILE},
        )

    def _numbers(self) -> tuple[int, int, int]:
        return self._sizes.num_rows, self._target.shape[-1], self._sizes.num_tiles

    def _tiles_config(self) -> Chosen:
        return LAUNCHER.config(VERIFY, self._target.dtype, self._target.shape[-1], KIND_TILES)

    def _grid(self, num: int, tiles: Chosen) -> tuple[int, int]:
        return num, -(-self._sizes.num_tiles // tiles[1].constants["TILES"])
