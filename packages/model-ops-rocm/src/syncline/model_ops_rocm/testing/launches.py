"""Which of Triton's kernels a call would launch; imports Triton when it is asked."""

from collections.abc import Callable


def launched_by(call: Callable[[], object], *, is_preparing: bool = False) -> list[str]:
    """Names of the kernels, in order; or of all that are compiled where `call` is prepared.

    They are compiled, and none is launched.
    """
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    with LAUNCHER.compiling(is_preparing=is_preparing) as compiled:
        call()
    return [one.binary.metadata.name for one in compiled]
