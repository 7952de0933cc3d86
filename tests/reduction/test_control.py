"""The control numbers at the end of the last bucket."""

from __future__ import annotations

import torch

from syncline.reduction.control import ControlNumbers, ExpectedControl, control_length, write_control


def test_numbers_of_all_ranks_are_summed() -> None:
    total = torch.zeros(control_length(2))
    for active, weight, bad, dense in ((True, 1.0, False, [True, False]), (False, 0.5, True, [False, False])):
        own = torch.zeros(control_length(2))
        write_control(own, active, weight, bad, dense, [False, True])
        total += own
    assert ControlNumbers.read(total) == ControlNumbers(1, 1.5, 1, (1, 0), (0, 2))


def test_nonfinite_may_be_a_flag_on_a_device() -> None:
    own = torch.zeros(control_length(1))
    write_control(own, True, 1.0, torch.tensor(True), [True], [False])
    assert ControlNumbers.read(own).not_finite == 1


def test_the_expected_numbers_are_those_of_a_complete_step() -> None:
    expected = ExpectedControl(3, size=4, like=torch.zeros(1))
    assert torch.equal(expected.own * 4, expected.summed)
    assert expected.control == ControlNumbers(4, 4.0, 0, (4, 4, 4), (0, 0, 0))
