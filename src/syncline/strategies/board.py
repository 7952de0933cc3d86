"""What workers that go at their own pace tell each other: step counts, a wish to stop, and small posts.

```text
worker 0 ──┐  steps()  stopping()  read_posts()      ┌── evaluator
worker 1 ──┼──────────────►  board  ◄────────────────┤   weights_into(), post("evaluation", …), stop()
worker 2 ──┘  post("finished", …)  stop()  finish()  └── nobody waits for anybody
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from syncline.server import Post

__all__ = ["Board", "Post"]


class Board(Protocol):
    """A loose run's door to the others. Its methods may be called from any task of the process, also beside a step."""

    def steps(self) -> list[int]:
        """Steps taken by each worker so far."""
        ...

    def weights_into(self, model: nn.Module) -> None:
        """Fill a model's parameters and floating-point buffers with the weights as they are now."""
        ...

    def stopping(self) -> bool:
        """Whether somebody has called `stop()`. Sends nothing: asked after every step."""
        ...

    def stop(self) -> None:
        """All workers are to end soon."""
        ...

    def post(self, kind: str, values: Sequence[float]) -> None:
        """Leave some numbers: a kind of at most 32 bytes, at most 24 values."""
        ...

    def read_posts(self, since: int) -> list[Post]:
        """Posts with a number above `since`."""
        ...

    def finish(self) -> None:
        """This worker takes no more steps: its clock holds nobody back."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
