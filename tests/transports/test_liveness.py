"""What a rank on torch.distributed makes of the deaths that the launcher posts."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from syncline.runtime import RealRuntime
from syncline.transports.torch_dist.liveness import Liveness

PATIENCE = 60.0


class Flaky:
    """A launcher's store that fails the first time a death is read."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes:
        if key == "syncline/dead/2" and not self.failed:
            self.failed = True
            raise RuntimeError("the store does not answer")
        return self.store.get(key)


def test_a_death_is_read_whatever_befalls_the_store(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an entry that nobody can read nor a store that fails midway ends the beat or hides another death."""
    launcher: Any = Flaky()
    launcher.set("syncline/dead/1", "not JSON")
    launcher.set("syncline/dead/2", json.dumps({"reason": "exit code 7"}))
    launcher.add("syncline/dead", 2)
    runtime = RealRuntime()
    with caplog.at_level(logging.WARNING, "syncline"):
        liveness = Liveness(HashStore(), launcher, 0, 3, runtime, None)
        until = runtime.now() + PATIENCE
        while 2 not in liveness.dead and runtime.now() < until:
            runtime.sleep(0.01)
        liveness.close()
    assert launcher.failed
    assert liveness.dead == {2: "exit code 7"}
    assert "cannot read how rank 1 ended, and ignores it: b'not JSON'" in caplog.text
