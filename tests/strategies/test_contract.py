"""Every strategy keeps the contract."""

from __future__ import annotations

from typing import Any, ClassVar

from syncline.strategies import Strategy, build_strategy
from syncline.testing import StrategyContract


class Spec(StrategyContract):
    """One that is made from its spec."""

    spec: ClassVar[str]

    def make(self) -> Strategy:
        return build_strategy(self.spec)


class TestAllReduce(Spec):
    spec = "allreduce"
    options: ClassVar[dict[str, Any]] = {"algorithm": "ring"}
    conserves = False  # it averages gradients, and never looks at weights


class TestBsp(Spec):
    spec = "bsp"
    conserves = False


class TestLocal(Spec):
    spec = "local(period=4)"


class TestLocalWithACodec(Spec):
    spec = "local(period=3)"
    options: ClassVar[dict[str, Any]] = {"codec": "quantize(8)"}
    as_one = False  # to the codec's loss
    conserves = False


class TestPostLocal(Spec):
    spec = "local(period=4, after=5)"


class TestAveragedState(Spec):
    spec = "local(period=4, state='average')"


class TestFederated(Spec):
    spec = "local(period=4, fraction=0.5, seed=3)"
    conserves = False  # a part of the workers counts


class TestAdaComm(Spec):
    spec = "adacomm(start=4, interval=4)"


class TestDiLoCo(Spec):
    spec = "diloco(period=4)"
    as_one = False  # the outer momentum
    conserves = False


class TestOverlappedDiLoCo(Spec):
    spec = "diloco(period=4, outer_lr=1.0, outer_momentum=0.0, overlap=True, delay=3)"


class TestAverage(Spec):
    spec = "average"
    silent = True


class TestEnsemble(Spec):
    spec = "ensemble"
    silent = True
    keeps_own = True
