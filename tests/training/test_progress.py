"""The progress that a run shows on the terminal."""

from __future__ import annotations

import io

from syncline.training.progress import NoProgress, Progress, ProgressReport, SpeedMeter, Speeds

REPORT = ProgressReport(
    epoch=2, epochs=5, step=30, steps=85, loss=0.4321, speeds=Speeds(12_400.0, 3.1e6, 0.125), left=75.0
)
LINE = "epoch 2/5  step 30/85  loss 0.4321  12.4 k samples/s  3.1 MB/s  12 % exposed  1:15 left"


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_terminal_line_is_rewritten_and_replaced() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock, terminal=True, width=200)
    progress.show(REPORT)
    progress.show(REPORT)
    progress.say("epoch 2/5: validation accuracy 0.9")
    progress.show(REPORT)
    progress.close()
    progress.close()
    erase = "\r\x1b[K"
    assert stream.getvalue() == (
        f"{erase}{LINE}{erase}{LINE}{erase}epoch 2/5: validation accuracy 0.9\n{erase}{LINE}{erase}"
    )


def test_a_narrow_terminal_gets_a_line_that_fits() -> None:
    stream = io.StringIO()
    Progress(stream, Clock(), terminal=True, width=40).show(REPORT)
    assert stream.getvalue() == "\r\x1b[K" + LINE[:39]


def test_plain_output_has_few_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock, terminal=False)
    seen = []
    for tenth in range(250):
        clock.seconds = tenth / 10
        if progress.due():
            seen.append(clock.seconds)
            progress.show(REPORT)
    progress.close()
    assert seen == [10.0, 20.0]
    assert stream.getvalue() == f"{LINE}\n{LINE}\n"


def test_no_progress_shows_nothing() -> None:
    silent = NoProgress()
    assert not silent.due()
    silent.show(REPORT)
    silent.say("nothing")
    silent.close()


def test_speeds_are_those_of_the_last_seconds() -> None:
    meter = SpeedMeter(window=5.0)
    for second in range(11):
        speeds = meter.read(second, samples=10 * second if second <= 5 else 50 + 100 * (second - 5), sent=0, exposed=0)
    assert speeds.samples == 100.0


def test_no_speed_without_time() -> None:
    meter = SpeedMeter()
    meter.read(1.0, 0, 0, 0.0)
    assert meter.read(1.0, 10, 10, 0.0) == Speeds()


def test_a_nan_loss_and_an_unknown_end_are_shown() -> None:
    moment = ProgressReport(epoch=1, epochs=1, step=1, steps=1, loss=float("nan"), speeds=Speeds(), left=float("inf"))
    assert "loss nan" in str(moment)
    assert str(moment).endswith("? left")
