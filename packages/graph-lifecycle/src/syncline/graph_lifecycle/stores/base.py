"""What the registry asks of a store: a place where one kind of captured graph lives.

Whole-step graphs, per-piece graphs, drafter graphs and micro-batch graphs each have a store;
each is asked separately, so that none can be forgotten behind another one's answer.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from syncline.graph_lifecycle.types import GraphKey, StepFunction


class GraphStore(Protocol):
    """Captured graphs of one kind, with their static inputs, outputs and memory pools."""

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every graph held, in order of capture."""
        ...

    @property
    def num_bytes(self) -> int:
        """Everything that the graphs pin: static inputs, outputs, pools. 0 without graphs."""
        ...

    def capture(
        self, key: GraphKey, fn: StepFunction, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Capture `fn`; returns the tensors it reads or writes outside of the graph.

        CaptureError (or whatever `fn` raised) if it cannot be captured. The registry then
        calls `discard`, so a store may leave a half-made entry behind.
        """
        ...

    def replay(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the graph on `inputs`, without any question about the memory it reads."""
        ...

    def discard(self, key: GraphKey) -> None:
        """Drop the graph, or what a failed capture left of it; an unknown key is no fault."""
        ...
