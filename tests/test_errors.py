"""The exceptions: the tree drawn at the top of errors.py is the tree there is."""

from __future__ import annotations

import copy
import re

import pytest

from syncline import errors
from syncline.errors import PeerLostError, ProtocolError, SynclineError

BUILTINS = {
    "SynclineError": Exception,
    "SpecError": ValueError,
    "IncompatibleError": ValueError,
    "WorldError": RuntimeError,
    "DeadlockError": RuntimeError,
    "JobEndedError": RuntimeError,
    "ProtocolError": Exception,
    "PeerLostError": ConnectionError,
    "DivergedError": ArithmeticError,
    "UnsupportedError": Exception,
}


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Name -> (parent, the builtin it also is), as the docstring of errors.py draws it."""
    found: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+)\b(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        also = re.search(r"\(also an? (\w+)\)", match[3])
        del path[depth:]
        found[match[2]] = (path[-1] if path else None, also[1] if also else None)
        path.append(match[2])
    return found


def test_every_exception_is_drawn() -> None:
    """`__all__`, the classes in the module and the drawing name the same exceptions."""
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == defined == set(drawn()) == set(BUILTINS)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_the_parent_is_the_one_drawn(name: str) -> None:
    """Each class is a child of the class above it in the drawing."""
    parents = [base.__name__ for base in getattr(errors, name).__bases__ if issubclass(base, SynclineError)]
    assert parents == [parent for parent in [drawn()[name][0]] if parent is not None]


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "SynclineError"])
def test_the_builtin_is_the_one_drawn(name: str) -> None:
    """A builtin among the bases is told in the drawing, "(also a ...)"."""
    builtin = [base.__name__ for base in getattr(errors, name).__bases__ if not issubclass(base, SynclineError)]
    assert builtin == [also for also in [drawn()[name][1]] if also is not None]


@pytest.mark.parametrize("name", errors.__all__)
def test_caught_as_a_builtin(name: str) -> None:
    """Code that knows nothing of Syncline catches each by the builtin that fits."""
    kinds = (ValueError, RuntimeError, ConnectionError, ArithmeticError)
    expected = {BUILTINS[name]} - {Exception}
    assert {kind for kind in kinds if issubclass(getattr(errors, name), kind)} == expected
    assert issubclass(getattr(errors, name), SynclineError)


def test_values_are_carried() -> None:
    """The values of an error are attributes, and its text is the message alone."""
    bad = ProtocolError("12 bytes where 32 were due", peer=3)
    assert (str(bad), bad.peer, ProtocolError("of nobody").peer) == ("12 bytes where 32 were due", 3, None)
    lost = PeerLostError("rank 2 is gone", peer=2, pending="allreduce #7", seconds=1.5)
    assert (str(lost), lost.peer, lost.pending, lost.seconds) == ("rank 2 is gone", 2, "allreduce #7", 1.5)


@pytest.mark.parametrize(
    "error", [ProtocolError("short", peer=3), PeerLostError("gone", peer=2, pending="recv", seconds=1.5)]
)
def test_a_copy_keeps_the_values(error: SynclineError) -> None:
    """An error can be copied, as process pools do to bring it home, with all it carries."""
    again = copy.copy(error)
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
