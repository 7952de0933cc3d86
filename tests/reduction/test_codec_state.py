"""The codec's state of each parameter."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from syncline.codecs import PerLayer, PowerSGD, Quantize, TopK
from syncline.codecs.base import Codec
from syncline.errors import IncompatibleError
from syncline.reduction.codec_state import CodecState

NAMES = ["weight", "bias"]


def state_of(codec: Codec, size: int = 2, seed: int = 0) -> CodecState:
    return CodecState(codec, NAMES, [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))], 0, size, seed)


def test_residuals_are_kept_by_parameter() -> None:
    state = state_of(TopK(0.5))
    first = state.slice_of(0, torch.ones(6), present=True)
    assert first.residual is not None
    first.residual.fill_(2.0)
    again = state.slice_of(0, torch.ones(6), present=True)
    assert again.residual is first.residual
    assert (again.name, again.shape) == ("weight", (2, 3))


def test_a_missing_gradient_leaves_the_residual_alone() -> None:
    state = state_of(TopK(0.5))
    assert state.slice_of(0, torch.zeros(6), present=False).residual is None


def test_codecs_are_chosen_by_name() -> None:
    state = state_of(PerLayer({"bias": None, "*": "topk(0.5)"}))
    assert state.codecs == [TopK(0.5), None]


def test_the_key_follows_seed_and_step() -> None:
    state, other = state_of(Quantize(4), seed=1), state_of(Quantize(4), seed=2)
    first = state.rng.key
    assert other.rng.key != first
    state.step += 1
    assert state.rng.key != first


def test_sums_decide_the_residual_of_powersgd_alone() -> None:
    assert state_of(PowerSGD()).residual_needs_sum
    assert not state_of(TopK(0.5)).residual_needs_sum


def test_state_is_restored() -> None:
    state = state_of(PowerSGD(1))
    state.step = 7
    part = state.slice_of(0, torch.ones(6), present=True)
    assert part.residual is not None
    part.residual.fill_(3.0)
    part.memory["q"] = torch.ones(3, 1)
    state.owner_residuals["bias", 1] = torch.ones(2)
    other = state_of(PowerSGD(1))
    other.load_shared_state(state.shared_state())
    other.load([state.state()])
    found = other.slice_of(0, torch.ones(6), present=True)
    assert other.step == 7
    assert found.residual is not None
    assert torch.equal(found.residual, torch.full((6,), 3.0))
    assert torch.equal(found.memory["q"], torch.ones(3, 1))
    assert torch.equal(other.owner_residuals["bias", 1], torch.ones(2))


def test_residuals_are_scaled_to_the_number_of_ranks() -> None:
    saved = {"size": 2, "residuals": {"bias": torch.ones(3)}}
    state = state_of(TopK(0.5), size=4)
    state.load([saved, saved])  # this rank's, and those of a rank that is gone
    part = state.slice_of(1, torch.zeros(3), present=True)
    assert part.residual is not None
    assert part.residual.tolist() == [4.0, 4.0, 4.0]


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="another model"):
        state_of(TopK(0.5)).load([{"residuals": {"head": torch.ones(3)}}])


def test_residuals_without_feedback_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(TopK(0.5, feedback=False))
    with caplog.at_level(logging.WARNING, "syncline"):
        state.load([{"residuals": {"bias": torch.ones(3)}}])
    assert "dropped" in caplog.text


def test_a_second_pass_before_the_step_is_refused_with_momentum() -> None:
    state, gradient = state_of(TopK(0.5, momentum=0.9)), torch.ones(6)
    state.note_reduced(0, gradient, steps=4)
    state.check_whole_step(0, gradient, steps=4)
    gradient.add_(1.0)
    with pytest.raises(IncompatibleError, match=r"no_sync\(\)"):
        state.check_whole_step(0, gradient, steps=4)
    state.check_whole_step(0, gradient, steps=5)
