"""The same script, unchanged, under any launcher: every rank contributes its number.

python examples/hello.py
torchrun --nproc-per-node 4 examples/hello.py
srun -n 4 python examples/hello.py
mpiexec -n 4 python examples/hello.py
"""

import torch

import syncline as sl


def main() -> None:
    with sl.init() as world:
        mean = sl.allreduce(torch.tensor([float(world.rank)]), op="mean")
        ranks = sl.allgather(torch.tensor([world.rank]), algorithm="ring")
        if world.rank == 0:
            print(f"{world!r}: mean {mean.item()}, ranks {ranks.tolist()}")


if __name__ == "__main__":
    main()
