"""HOROVOD_* variables: read, refused, or named as without effect."""

from __future__ import annotations

import pytest

from syncline.compat.horovod.settings import LEVELS, HorovodSettings, read, without_effect
from syncline.errors import SpecError


def test_nothing_set_gives_horovods_defaults() -> None:
    assert read({}) == read({"HOROVOD_CYCLE_TIME": "", "HOROVOD_TIMELINE": ""}) == HorovodSettings()
    found = read({})
    assert (found.fusion_bytes, found.cycle_seconds, found.cache_capacity) == (128 * 1024 * 1024, 0.001, 1024)
    assert (found.stall_warning, found.stall_shutdown, found.stall_check) == (60.0, 0.0, True)


def test_all_of_them() -> None:
    found = read(
        {
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_CYCLE_TIME": "3.5",
            "HOROVOD_CACHE_CAPACITY": "12",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_TIMELINE": "/tmp/timeline.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
            "HOROVOD_LOG_LEVEL": "DEBUG",
        }
    )
    assert found == HorovodSettings(
        fusion_bytes=0,
        cycle_seconds=0.0035,
        cache_capacity=12,
        stall_warning=7.0,
        stall_shutdown=9.0,
        stall_check=False,
        timeline="/tmp/timeline.json",
        mark_cycles=True,
        dynamic_process_sets=False,
        hierarchical_allreduce=True,
        log_level="debug",
    )
    assert found.log_level in LEVELS


def test_a_dynamic_timeline_names_no_file() -> None:
    assert read({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("FUSION_THRESHOLD", "64MB", "a whole number of bytes"),
        ("FUSION_THRESHOLD", "-1", "0 or more"),
        ("FUSION_THRESHOLD", "1_000", "a whole number of bytes"),
        ("CACHE_CAPACITY", "1.5", "a whole number of requests"),
        ("CYCLE_TIME", "soon", "a number of milliseconds"),
        ("CYCLE_TIME", "-2", "0 or more"),
        ("STALL_CHECK_TIME_SECONDS", "nan", "a number of seconds"),
        ("STALL_SHUTDOWN_TIME_SECONDS", "inf", "a number of seconds"),
        ("STALL_CHECK_DISABLE", "true", "it takes 0 or 1"),
        ("HIERARCHICAL_ALLREDUCE", "2", "it takes 0 or 1"),
        ("LOG_LEVEL", "loud", "trace, debug, info, warning, error, fatal"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_is_taken(name: str, value: str, taken: str) -> None:
    with pytest.raises(SpecError, match=taken) as caught:
        read({f"HOROVOD_{name}": value})
    assert f"HOROVOD_{name}={value!r}" in str(caught.value)


def test_those_without_effect_are_named() -> None:
    environ = {
        "HOROVOD_RANK": "0",
        "HOROVOD_FUSION_THRESHOLD": "1",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_NO_SUCH_THING": "1",
        "HOROVOD_THREAD_AFFINITY": "",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
        "PATH": "/bin",
    }
    assert without_effect(environ) == ["HOROVOD_AUTOTUNE", "HOROVOD_NO_SUCH_THING", "HOROVOD_NUM_NCCL_STREAMS"]
    assert without_effect({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) == ["HOROVOD_DYNAMIC_PROCESS_SETS"]
