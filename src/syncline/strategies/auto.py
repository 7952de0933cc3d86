"""The planner's choice for this model, this world and this network. `sl.distribute` replaces it by the chosen strategy.

```text
auto                                        allreduce: nothing else gives every step the same result
auto(allow=["local(period=8)", "onebit"])   allreduce, local(period=8), or allreduce with onebit
```

Local SGD and codecs that lose bits change the result of training, and the planner does not know what that costs in
accuracy. So they are candidates only if the user names them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.codecs import Codec, build_codec, codec_names
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator
from syncline.specs import parse
from syncline.strategies.base import RunSettings, Strategy, StrategyRun
from syncline.strategies.local import Local

__all__ = ["AutoCandidate", "AutoStrategy"]


@dataclass(frozen=True)
class AutoCandidate:
    """A strategy and a codec that may be chosen, as specs."""

    strategy: str
    codec: str | None = None

    def __str__(self) -> str:
        return self.strategy if self.codec is None else f"{self.strategy} with {self.codec}"


@dataclass(frozen=True, repr=False)
class AutoStrategy(Strategy):
    """The planner's choice. `allow` names what may be chosen besides all-reduce: codecs, and local SGD.

    The step time comes from `step`, which computes forward and backward of one batch and is timed, or from
    `profile`, a file of `syncline profile`. Without them the choice is all-reduce. `earlier` is the choice of an
    earlier run, from its config.json: it is kept if it was made for the same candidates and as many workers.

    >>> AutoStrategy(allow="local(period=8)")
    auto(allow='local(period=8)')
    >>> print(*AutoStrategy(allow=["local(period=8)", "topk(0.01)|quantize(4)"]).candidates(None), sep="; ")
    allreduce; local(period=8); allreduce with topk(0.01)|quantize(4)
    """

    allow: str | Sequence[str] = ()
    profile: str | None = None
    step: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    earlier: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    name: ClassVar[str] = "auto"
    several_optimizers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        several = isinstance(self.allow, (list, tuple))
        if not isinstance(self.allow, str) and not (several and all(isinstance(each, str) for each in self.allow)):
            raise SpecError(f"auto(allow={self.allow!r}): a spec such as 'local(period=8)', or a list of them")
        if several:
            object.__setattr__(self, "allow", tuple(self.allow))
        if self.profile is not None and (not isinstance(self.profile, str) or not self.profile):
            raise SpecError(f"auto(profile={self.profile!r}): the file of syncline profile, as text")
        if self.step is not None and not callable(self.step):
            raise SpecError(f"auto(step={self.step!r}): a function that computes forward and backward of a batch")
        if self.earlier is not None and not isinstance(self.earlier, Mapping):
            raise SpecError(f"auto(earlier={self.earlier!r}): the choice in the config.json of an earlier run")
        if self.step is not None and self.profile is not None:
            raise SpecError("auto: both step and profile give the step time; leave one out")
        self.candidates(None)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The specs that `allow` names, without repetitions."""
        given = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        return tuple(dict.fromkeys(given))

    def candidates(self, codec: str | None) -> tuple[AutoCandidate, ...]:
        """All-reduce, and what is allowed besides. A `codec` that is given is that of every candidate."""
        found = [AutoCandidate("allreduce", codec)]
        for text in self.allowed:
            name = parse(text)[0].name
            if name == Local.name:
                found.append(AutoCandidate(_check_local(text), codec))
            elif name not in codec_names():
                raise SpecError(f"auto(allow=…): {_refusal(text, name)}")
            elif codec is not None:
                raise SpecError(
                    f"auto: codec={codec!r} is given, so no other can be chosen: leave {text!r} out of allow"
                )
            else:
                found.append(AutoCandidate("allreduce", repr(build_codec(text))))
        return tuple(found)

    def check_codec(self, codec: Codec) -> None:
        from syncline.strategies import build_strategy

        for each in self.candidates(repr(codec)):
            build_strategy(each.strategy).check_codec(codec)

    def attach(
        self, model: nn.Module, optimizer: Optimizer, communicator: Communicator, settings: RunSettings
    ) -> StrategyRun:
        self.refuse_division()
        raise AssertionError("sl.distribute replaces it")

    def refuse_division(self) -> None:
        """Raise the error for a model that is not whole on every worker."""
        raise IncompatibleError(
            f"{self!r} chooses for models that every worker has whole: name the strategy beside a pipeline or divided "
            "layers, such as allreduce"
        )


def _check_local(text: str) -> str:
    from syncline.strategies import build_strategy

    built = build_strategy(text)
    assert isinstance(built, Local)
    if built != Local(period=built.period):
        raise SpecError(f"auto(allow=…): the planner predicts local by its period alone, not {built!r}")
    return f"{Local.name}(period={built.period})"


def _refusal(text: str, name: str) -> str:
    """Why a spec cannot be allowed."""
    from syncline.strategies import build_strategy, strategy_names

    if name in strategy_names():
        build_strategy(text)
        if name == "allreduce":
            return f"{text!r} is a candidate anyway, without arguments; leave it out"
        return f"{text!r} is a strategy that the planner does not predict well enough to choose it; leave it out"
    close = difflib.get_close_matches(name, [Local.name, *codec_names()], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{text!r} is neither a codec nor local(period=…); {hint}codecs: {', '.join(codec_names())}"
