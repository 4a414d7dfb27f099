"""The arithmetic of draft tokens: what may be asked for, how a budget is shared, what a row yields.

A decode row with k drafts in a window of w steps writes w * (1 + k) positions at most: in each step
its last token and k drafts. Each step yields the accepted drafts and one token more, recovered or
bonus. Knows no draft id: the runner has those.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import TypeAlias

from syncline.scheduler_core.checking import require_int, require_mapping
from syncline.scheduler_core.types import SequenceId

DraftCounts: TypeAlias = int | Mapping[SequenceId, int]
"""Drafts wanted for each step of a decode row: one number for all rows, or by sequence."""


def new_token_interval(window: int, num_draft_tokens: int = 0) -> tuple[int, int]:
    """[min_new, max_new] of a decode row: each of `window` steps yields 1 to 1 + drafts tokens.

    The minimum is 1, not `window`: a runner that sees a sequence end inside a window may stop it.
    A final prefill chunk is (1, 1), a chunk that is not final (0, 0).
    """
    return 1, window * (1 + num_draft_tokens)


def check_draft_counts(wanted: DraftCounts, num_sequence_ids: int) -> None:
    """Raise ValueError for a negative number or a sequence id that was never given out.

    num_sequence_ids: how many ids have been given out, from 0 on.
    """
    if isinstance(wanted, int):
        if wanted < 0:
            raise ValueError(f"num_draft_tokens must be at least 0, got {wanted}")
        return
    require_mapping("num_draft_tokens", wanted)
    for seq_id, num_drafts in wanted.items():
        require_int("a sequence id in num_draft_tokens", seq_id)
        require_int(f"num_draft_tokens of sequence {seq_id}", num_drafts)
        if not 0 <= seq_id < num_sequence_ids:
            raise ValueError(
                f"num_draft_tokens must name sequences below {num_sequence_ids}, got {seq_id}"
            )
        if num_drafts < 0:
            raise ValueError(
                f"num_draft_tokens of sequence {seq_id} must be at least 0, got {num_drafts}"
            )


def share_budget(wanted: SequenceABC[int], budget: int) -> list[int]:
    """Cut each number to one level, so that their sum is at most `budget`.

    What the level leaves over goes to the first that want more, one each.
    """
    if sum(wanted) <= budget:
        return list(wanted)
    level, left = 0, budget
    ascending = sorted(wanted)
    for i, num_wanted in enumerate(ascending):
        level = left // (len(ascending) - i)
        if num_wanted > level:
            left -= level * (len(ascending) - i)
            break
        left -= num_wanted
    shares: list[int] = []
    for num_wanted in wanted:
        has_more = num_wanted > level and left > 0
        left -= has_more
        shares.append(min(num_wanted, level + has_more))
    return shares
