"""How many tokens a row may still yield: the interval from which caps and reservations follow.

Draft counts are in the data model; plans carry none yet (`StepPlan.num_draft_tokens` is None).
"""


def new_token_interval(window: int, num_draft_tokens: int = 0) -> tuple[int, int]:
    """[min_new, max_new] of a decode row: each of `window` steps yields 1 to 1 + drafts tokens.

    The minimum is 1, not `window`: a runner that sees a sequence end inside a window may stop it.
    A final prefill chunk is (1, 1), a chunk that is not final (0, 0).
    """
    return 1, window * (1 + num_draft_tokens)
