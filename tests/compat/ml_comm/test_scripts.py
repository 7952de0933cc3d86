"""Scripts of Cray's plugin in real processes: nothing in them names Syncline, or one import does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from syncline.compat.module_aliases import ALIASES, alias_variables, install_aliases
from syncline.errors import IncompatibleError
from tests.launch.runs import Runs
from tests.launching import ROOT
from tests.mpi import MPICH, mpiexec

MNIST = str(ROOT / "examples" / "ml_comm_mnist.py")
SCRIPT = f"""
import runpy, subprocess
import ml_comm as mc
import ml_comm_torch as cdl
import dl_comm.torch as dl
import numpy as np
import syncline as sl
import torch

runpy.run_path({MNIST!r}, run_name="__main__")  # it calls init_mpi() and finalize()
finder = "import importlib.util as u; assert u.find_spec('ml_comm_torch') and u.find_spec('dl_comm')"
subprocess.run([sys.executable, "-c", finder], check=True)  # a process of the script finds them too

mc.init_mpi()

def train(wrap):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def by_hand(strategy):
    def wrap(model, optimizer):
        sl.distribute(model, optimizer, strategy=strategy)
        return optimizer
    return train(wrap)

for warmup, strategy in ((1.0, "allreduce"), (0.1, "allreduce(delay=1, warmup=2)")):
    ours = train(lambda model, optimizer: cdl.DistributedOptimizer(optimizer, 20, 1, 2, warmup, 0, 1))
    assert torch.equal(ours, by_hand(strategy)), warmup
    assert mc.check_buffers_match([ours.numpy()], 0) == 0
ours = train(lambda model, optimizer: dl.DistributedOptimizer(optimizer, nteam=1, nthread_per_team=2))
assert torch.equal(ours, by_hand("allreduce"))
mc.finalize()
mc.finalize()

sl.init(timeout=5)  # for what follows
mc.init_mpi()
mc.check_buffers_match([np.ones(1)], 0)
if mc.get_rank() == 0:
    try:
        mc.check_buffers_match([np.ones(1)], 0)
    except sl.errors.PeerLostError as error:
        post("alone", error)
else:
    until("alone")
os._exit(0)  # the ranks are no longer at the same place
"""


def check_recipe(out: str) -> None:
    """The lines that rank 0 of the recipe prints."""
    found = re.search(r"step 100, loss ([\d.]+), accuracy [\d.]+\n(?:.*\n)*step 200, loss ([\d.]+), ", out)
    assert found is not None, out
    assert float(found[2]) < float(found[1]) < 2.3  # ln 10 to begin with
    assert "all ranks have the same buffers" in out
    assert "team 0: 2 ranks, synchronous for 100 steps, then pipelined" in out


def test_a_script_as_it_is(runs: Runs) -> None:
    run = runs.run("run", "-n", "2", "--as", "ml_comm", runs.script(SCRIPT))
    assert run.code == 0, run.describe()
    check_recipe(run.out)
    assert "check_buffers_match: rank 1 did not call it within 5" in runs.read("alone")


@pytest.mark.xdist_group("mpi")
def test_one_import_under_mpiexec() -> None:
    words = f"import runpy, syncline.compat.ml_comm.install; runpy.run_path({MNIST!r}, run_name='__main__')"
    ended = mpiexec(MPICH, "-c", words, variables={"SYNCLINE_TRANSPORT": "mpi"})
    assert ended.code == 0, ended.err
    check_recipe(ended.out)


def test_every_alias_has_its_folder() -> None:
    for name, modules in ALIASES.items():
        folder = Path(alias_variables([name], {})["PYTHONPATH"])
        assert {path.stem for path in folder.iterdir() if path.name != "__pycache__"} == set(modules)


def test_an_alias_after_the_module_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dl_comm", pytest)
    with pytest.raises(IncompatibleError, match=r"dl_comm was imported already.*ml_comm\.install before it"):
        install_aliases("ml_comm")
