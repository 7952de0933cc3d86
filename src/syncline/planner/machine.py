"""What was measured of a machine and its network: messages, codecs, and computing while communicating.

one worker   │ compute ───────────────│            alone, then again while an all-reduce is under way
the engine   │ all-reduce ─────────│               alone, then again while the worker computes
together     │ ───────────────────────────────│    the share that was hidden: (compute + all-reduce − together)
                                                    ÷ the shorter of the two

Ranks that share processors compute more slowly together than one alone. Of a whole exchange of gradients, Python and
thread wake-ups are a part that is in no model of a network, so exchanges are measured as a training step makes
them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from syncline.costs import Calibration
from syncline.errors import SpecError
from syncline.parallel.partition.json_files import JsonFields, read_json_fields, write_json_text

__all__ = ["CodecRate", "GradientExchange", "MachineMeasurement", "TimedAllreduce"]

MACHINE_KIND = "measurement of a machine"
MACHINE_VERSION = 1
EXCHANGES_OF_A_KIND = 3
"""One small gradient, several of as many bytes together, and a large one."""


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """What a codec does on one worker while all encode, as in training."""

    spec: str
    encode_bytes_per_s: float
    """Bytes of float32 gradients, with the residual if the codec keeps one."""
    decode_bytes_per_s: float
    payload_ratio: float
    """Bytes that are sent for each byte of gradients."""

    def seconds(self, nbytes: float) -> float:
        """Encoding and decoding gradients of so many bytes once.

        >>> rate = CodecRate(spec="onebit", encode_bytes_per_s=1e9, decode_bytes_per_s=4e9, payload_ratio=1 / 32)
        >>> rate.seconds(4e6)
        0.005
        """
        return nbytes / self.encode_bytes_per_s + nbytes / self.decode_bytes_per_s


@dataclass(frozen=True)
class TimedAllreduce:
    """An all-reduce by the engine. The seconds are the median of the slowest worker."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """A training step's exchange of gradients: what it adds to the same step without other workers."""

    strategy: str
    """allreduce, or ssp: by parameter servers on all workers."""
    codec: str
    """Empty: unencoded, with allreduce by the engine's own."""
    tensors: int
    """Equal square matrices whose gradients are exchanged."""
    nbytes: int
    """Of all gradients."""
    seconds: float
    """Median, of the slowest worker."""


@dataclass(frozen=True, kw_only=True)
class MachineMeasurement:
    """What `syncline bench machine` measures."""

    workers: int
    hosts: int
    threads: int
    network: Calibration
    """Latency, bandwidth, and the work of a message in Python."""
    call_s: float
    """An all-reduce of one number by the engine: Python, the message, and waking up the waiting worker."""
    compute_s: float
    """The computation that was timed, alone."""
    allreduce_s: float
    """The all-reduce that was timed, alone."""
    together_s: float
    """Both, begun together."""
    compute_slowdown: float
    """By which factor the computation takes longer while the all-reduce is under way."""
    codecs: tuple[CodecRate, ...] = ()
    cores: int = 0
    """Processors of a machine of the workers. 0: not measured, as in files of earlier releases."""
    compute_contention: float = 1.0
    """How many times as long computation takes while all workers compute as while one does."""
    copy_contention: float = 1.0
    """The same for copies in memory that do not fit the caches."""
    copy_bytes_per_s: float = 0.0
    """Bytes that each worker copies in memory while all do. 0: not measured."""
    allreduces: tuple[TimedAllreduce, ...] = ()
    """The engine's all-reduce of several sizes, ascending."""
    exchanges: tuple[GradientExchange, ...] = ()
    memory_bytes: float = 0.0
    """Memory of a machine. 0: not measured."""
    micro_batch_s: float = 0.0
    """Python's work on each rank for a micro-batch in a pipeline: a forward, a backward and their messages, while the
    other ranks work too."""
    lab: str = ""
    """The emulated cluster, such as 4@100mbit: its hosts share the processors of one machine."""
    torch_version: str = ""
    syncline_version: str = ""

    @property
    def hidden_share(self) -> float:
        """The share of the shorter one that runs beside the other, from 0 to 1.

        >>> from syncline.costs import Calibration
        >>> network = Calibration(1e-5, 1e9, 1e-5, 1e-10, 0.0, 0.0)
        >>> times = dict(compute_s=0.04, allreduce_s=0.02, together_s=0.05, compute_slowdown=1.2)
        >>> machine = MachineMeasurement(workers=2, hosts=1, threads=1, network=network, call_s=1e-4, **times)
        >>> round(machine.hidden_share, 6)
        0.5
        """
        saved = self.compute_s + self.allreduce_s - self.together_s
        return min(1.0, max(0.0, saved / min(self.compute_s, self.allreduce_s)))

    def codec(self, spec: str) -> CodecRate:
        """The rate of a codec that was measured.

        Raises:
            SpecError: if it was not.
        """
        for each in self.codecs:
            if each.spec == spec:
                return each
        known = ", ".join(each.spec for each in self.codecs) or "none"
        raise SpecError(f"{spec} was not measured on this machine; measured: {known}; syncline bench machine --codecs")

    def write(self, path: str | Path) -> None:
        """Write a JSON file."""
        head = {"format": MACHINE_KIND, "version": MACHINE_VERSION}
        write_json_text(path, json.dumps({**head, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> MachineMeasurement:
        """Read it from a JSON file.

        Raises:
            SpecError: if the file cannot be read, or a value in it cannot be right.
        """
        fields = read_json_fields(path, kind=MACHINE_KIND, version=MACHINE_VERSION)
        network, codecs = fields.inner("network"), fields.inners("codecs")
        exchanges, reduced = (fields.inners(key) if key in fields else [] for key in ("exchanges", "allreduces"))
        names = ("call_s", "compute_s", "allreduce_s", "together_s", "compute_slowdown")
        found = cls(
            workers=fields.whole("workers", least=2),
            hosts=fields.whole("hosts", least=1),
            threads=fields.whole("threads", least=1),
            network=_read_network(network),
            codecs=tuple(map(_read_codec, codecs)),
            cores=fields.whole("cores", least=0) if "cores" in fields else 0,
            compute_contention=fields.number("compute_contention", 1.0),
            copy_contention=fields.number("copy_contention", 1.0),
            copy_bytes_per_s=fields.number("copy_bytes_per_s", 0.0),
            allreduces=tuple(TimedAllreduce(each.whole("nbytes", least=1), each.number("seconds")) for each in reduced),
            exchanges=tuple(map(_read_exchange, exchanges)),
            memory_bytes=fields.number("memory_bytes", 0.0),
            micro_batch_s=fields.number("micro_batch_s", 0.0),
            lab=fields.text("lab", ""),
            torch_version=fields.text("torch_version", ""),
            syncline_version=fields.text("syncline_version", ""),
            **{name: _above_0(fields, name) for name in names},
        )
        for each in (fields, network, *codecs, *exchanges, *reduced):
            each.finish()
        for kind, rows in Counter((each.strategy, each.codec) for each in found.exchanges).items():
            if rows != EXCHANGES_OF_A_KIND:
                named = " with ".join(filter(None, kind))
                raise SpecError(
                    f"'exchanges' has {rows} of {named}, and needs {EXCHANGES_OF_A_KIND}: measure again with "
                    "syncline bench machine"
                )
        return found


def _read_network(fields: JsonFields) -> Calibration:
    needed = ("latency", "bandwidth", "per_message", "combine", "latency_spread", "bandwidth_spread")
    return Calibration(
        **{name: fields.number(name) for name in needed},
        inside_latency=fields.number("inside_latency", 0.0),
        inside_bandwidth=fields.number("inside_bandwidth", 0.0),
        ranks_per_host=fields.whole("ranks_per_host", least=0),
    )


def _read_codec(fields: JsonFields) -> CodecRate:
    names = ("encode_bytes_per_s", "decode_bytes_per_s", "payload_ratio")
    return CodecRate(spec=fields.text("spec"), **{name: _above_0(fields, name) for name in names})


def _read_exchange(fields: JsonFields) -> GradientExchange:
    return GradientExchange(
        strategy=fields.text("strategy"),
        codec=fields.text("codec", ""),
        tensors=fields.whole("tensors", least=1),
        nbytes=fields.whole("nbytes", least=1),
        seconds=fields.number("seconds"),
    )


def _above_0(fields: JsonFields, key: str) -> float:
    value = fields.number(key)
    if not value:
        raise SpecError(f"{key!r} is 0; it must be above 0: measure again with syncline bench machine")
    return value
