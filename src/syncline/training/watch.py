"""How long a run has trained, and how long it has taken in all."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Watch"]


class Watch:
    """Two times of one clock, both going on from where an earlier attempt ended.

    ```text
    elapsed   ├──────────────────────────────┤       everything
    trained   ├────────┤  evaluate  ├────────┤       between start() and pause() alone
    ```

    >>> seconds = iter([10.0, 11.0, 14.0, 20.0])
    >>> watch = Watch(seconds.__next__)
    >>> watch.start()
    >>> watch.pause()
    >>> watch.trained, watch.elapsed
    (3.0, 10.0)
    """

    def __init__(self, clock: Callable[[], float], trained: float = 0.0, elapsed: float = 0.0) -> None:
        self._clock = clock
        self._trained = trained
        self._since: float | None = None
        self._began = clock() - elapsed
        self.elapsed_before = elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of everything."""
        return self._clock() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training."""
        return self._trained if self._since is None else self._trained + self._clock() - self._since

    @property
    def running(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        """Count everything from now on: what came before was preparing."""
        self._began = self._clock() - self.elapsed_before

    def start(self) -> None:
        """What follows is training."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """What follows is not."""
        self._trained, self._since = self.trained, None
