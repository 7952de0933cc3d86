"""Pipeline schedules, one file each. A schedule is chosen by its spec, such as ``"1f1b(microbatches=8)"``."""

from __future__ import annotations

import re
from dataclasses import replace

from syncline.errors import SpecError
from syncline.parallel.schedules.base import Action, Kind, PipelineSchedule, PipelineSetting, with_reductions
from syncline.parallel.schedules.gpipe import GPipe
from syncline.parallel.schedules.interleaved import Interleaved
from syncline.parallel.schedules.one_f_one_b import OneFOneB
from syncline.parallel.schedules.pipedream import PipeDream
from syncline.parallel.schedules.zbv import ZBV
from syncline.parallel.schedules.zero_bubble import ZeroBubble
from syncline.specs import Registry, Spec

__all__ = [
    "ZBV",
    "Action",
    "GPipe",
    "Interleaved",
    "Kind",
    "OneFOneB",
    "PipeDream",
    "PipelineSchedule",
    "PipelineSetting",
    "ZeroBubble",
    "build_schedule",
    "names",
    "with_reductions",
]

OTHER_NAMES = {
    **dict.fromkeys(("fillanddrain", "filldrain", "allforwardallbackward", "afab", "torchgpipe"), "gpipe"),
    **dict.fromkeys(("onefoneb", "dapple", "pipedreamflush", "schedule1f1b", "flush", "synchronous1f1b"), "1f1b"),
    **dict.fromkeys(("interleaved1f1b", "1f1binterleaved", "1f1bi", "looped", "megatron", "vpp"), "interleaved"),
    "virtualpipeline": "interleaved",
    **dict.fromkeys(("zb", "zbh1", "zb1p", "zerobubbleh1"), "zero_bubble"),
    "interleavedzerobubble": "zero_bubble(chunks=2)",
    **dict.fromkeys(("zbvzerobubble", "zerobubblev", "vschedule"), "zbv"),
    **dict.fromkeys(("async1f1b", "asynchronous1f1b", "asynchronous", "async", "1f1brr"), "pipedream"),
    "loopedbfs": "a breadth-first schedule is not available; 'interleaved' has several stages a rank too.",
    **dict.fromkeys(("zbh2", "zb2p"), "this schedule is not available; 'zero_bubble' is ZB-H1, and 'zbv' is ZB-V."),
    **dict.fromkeys(("dualpipe", "dualpipev"), "DualPipe is not available; 'zbv' has two stages a rank as a V too."),
}
"""Names of schedules in papers and other libraries, and ours for them."""

PARSED_1F1B = "n1f1b"
"""1f1b for the parser, which refuses names that begin with a digit."""


class _ScheduleRegistry(Registry[PipelineSchedule]):
    """A registry that also reads 1f1b, which is no name in Python."""

    def read(self, text: str) -> tuple[Spec, ...]:
        if not isinstance(text, str) or not re.match(rf"\s*{OneFOneB.name}\b", text):
            return super().read(text)
        try:
            links = super().read(text.replace(OneFOneB.name, PARSED_1F1B, 1))
        except SpecError as error:
            raise SpecError(str(error).replace(PARSED_1F1B, OneFOneB.name)) from None
        return tuple(replace(link, name=link.name.replace(PARSED_1F1B, OneFOneB.name)) for link in links)


_REGISTRY = _ScheduleRegistry("pipeline schedule", OTHER_NAMES)
for _schedule in (GPipe, OneFOneB, Interleaved, ZeroBubble, ZBV, PipeDream):
    _REGISTRY.add(_schedule.name, _schedule)


def build_schedule(spec: str | PipelineSchedule) -> PipelineSchedule:
    """The schedule that a spec describes. A schedule is returned as it is.

    >>> build_schedule("1f1b(microbatches=8)")
    1f1b(microbatches=8)
    >>> build_schedule("DAPPLE")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: unknown pipeline schedule 'DAPPLE'; did you mean '1f1b'? available: '1f1b', 'gpipe', \
'interleaved', 'pipedream', 'zbv', 'zero_bubble'
    """
    return spec if isinstance(spec, PipelineSchedule) else _REGISTRY.build(spec)


def names() -> list[str]:
    """The names of all pipeline schedules.

    >>> names()
    ['1f1b', 'gpipe', 'interleaved', 'pipedream', 'zbv', 'zero_bubble']
    """
    return _REGISTRY.names()
