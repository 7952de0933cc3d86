"""Codecs beside memcpy: a table for the terminal, and a picture of error against bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.bench.figures import save
from syncline.bench.sizes import written
from syncline.bench.stats import Summary
from syncline.errors import UnsupportedError

__all__ = ["codecs_plot", "codecs_table"]


def codecs_table(document: dict[str, Any]) -> str:
    """Bytes, error, and speeds with the paired share of memcpy's."""
    plan, rows = document["plan"], document["results"]
    width = max(len(row["contender"]) for row in rows)
    lines = [
        f"codecs on {plan['threads']} thread{'s' if plan['threads'] > 1 else ''}, rounds in turns: {plan['rounds']}; "
        "GB/s of float32 input, medians; ÷ memcpy: the share of its speed, paired, with 95 % intervals",
        f"input: {document['input']}; feedback: the encoder with error feedback",
        "",
        f"{'size':>7} {'codec':{width}} {'payload':>9} {'bits':>6} {'error':>8} {'encode':>7} {'÷ memcpy':>21} "
        f"{'feedback':>9} {'÷ memcpy':>21} {'decode':>7} {'÷ memcpy':>21}",
    ]
    for size in dict.fromkeys(row["bytes"] for row in rows):
        fed = {row["contender"]: row for row in rows if row["bytes"] == size and row["feedback"]}
        for row in rows:
            if row["bytes"] == size and not row["feedback"]:
                lines.append(_line(row, fed.get(row["contender"]), width))
        lines.append("")
    return "\n".join(lines[:-1])


def _line(row: dict[str, Any], fed: dict[str, Any] | None, width: int) -> str:
    with_residual = f"{'':>9} {'':>21}" if fed is None else f"{_speed(fed['encode']):>9} {_share(fed['encode']):>21}"
    return (
        f"{written(row['bytes']):>7} {row['contender']:{width}} {written(row['payload_bytes']):>9} {row['bits']:6.2f} "
        f"{row['error']:8.2g} {_speed(row['encode']):>7} {_share(row['encode']):>21} {with_residual} "
        f"{_speed(row['decode']):>7} {_share(row['decode']):>21}"
    )


def _speed(found: dict[str, Any]) -> str:
    return f"{found['gigabytes_a_second']['median']:.2f}"


def _share(found: dict[str, Any]) -> str:
    share = Summary(**found["of_memcpy"])
    if share.low is None or share.high is None:
        return f"{share.median:.3f} (n={share.samples})"
    return f"{share.median:.3f} [{share.low:.3f}, {share.high:.3f}]"


def codecs_plot(document: dict[str, Any], stem: Path) -> list[Path]:
    """What a codec loses against what it sends, at the largest size; as SVG and PNG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedError("a picture needs matplotlib: pip install 'syncline[plot]'") from None
    size = max(row["bytes"] for row in document["results"])
    rows = [row for row in document["results"] if row["bytes"] == size and not row["feedback"]]
    # A logarithm has no place for an error of zero: such codecs stand below all others.
    exact = min((row["error"] for row in rows if row["error"]), default=1.0) / 10
    figure, axes = pyplot.subplots(figsize=(9, 6.4))
    for number, row in enumerate(rows):
        place = (row["payload_bytes"], row["error"] or exact)
        axes.scatter(*place, color=f"C{number % 10}", marker="o" if row["error"] else "s")
        axes.annotate(row["contender"], place, xytext=(3, 5), textcoords="offset points", fontsize=8, rotation=40)
    axes.set(
        xlabel=f"payload bytes of {written(size)}",
        ylabel="‖x − decode(encode(x))‖ ÷ ‖x‖ (squares: exact)",
        xscale="log",
        yscale="log",
    )
    axes.grid(True, which="major", color="0.9")
    axes.margins(x=0.1, y=0.2)
    figure.suptitle(f"error against bytes: {document['input']}", fontsize=10)
    return save(figure, stem)
