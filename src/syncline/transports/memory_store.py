"""A key-value store in memory, for simulated ranks and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `KeyValueStore` in memory. `before_call` is called before each operation, where a simulation may switch tasks.

    >>> store = MemoryStore()
    >>> store.compare_set("team/1", "", "a"), store.compare_set("team/1", "", "b")
    (b'a', b'a')
    >>> store.add("count", 2), store.check(["count"]), store.check(["other"])
    (2, True, False)
    """

    def __init__(self, values: dict[str, bytes] | None = None, before_call: Callable[[], None] | None = None) -> None:
        self._values = {} if values is None else values
        """Shared with the other stores of the same job."""
        self._before_call = before_call or (lambda: None)

    def set(self, key: str, value: str) -> None:
        self._before_call()
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """The value of a key, which must exist: nothing here waits for it."""
        self._before_call()
        if key not in self._values:
            raise RuntimeError(f"the store has no key {key!r}")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._before_call()
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number

    def check(self, keys: Sequence[str]) -> bool:
        self._before_call()
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value, or is absent and "" is expected. Returns its value afterwards."""
        self._before_call()
        present = self._values.get(key)
        if (present is None and not expected) or (present is not None and present == expected.encode()):
            self._values[key] = desired.encode()
        return self._values.get(key, expected.encode())

    def close(self) -> None:
        """Does nothing: other processes may still use the values."""
