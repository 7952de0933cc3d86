"""Run on each rank by test_cuda, and by hand on a machine with a GPU: tensors that lie on it."""

import torch

import syncline as sl
from tests.gpus import share_gpus


def main() -> None:
    if not torch.cuda.is_available():
        print("there is no GPU, so nothing is tested")
        return
    with sl.init(transport="torch_dist", timeout=60) as world:
        device = world.device
        mine = torch.arange(1000.0, device=device) + world.rank
        total = world.size * torch.arange(1000.0) + sum(range(world.size))
        share_gpus(world)
        for algorithm in ["ring", "halving_doubling", "sharded", "native"]:
            found = sl.allreduce(mine, op="sum", algorithm=algorithm)
            assert found.device == device, algorithm
            assert torch.equal(found.cpu(), total), algorithm
        for algorithm in ("ring", "native"):
            gathered = sl.allgather(torch.full((world.rank + 1,), world.rank, device=device), algorithm=algorithm)
            assert gathered.tolist() == [rank for rank in range(world.size) for _ in range(rank + 1)], algorithm
        buffer = torch.zeros(3, device=device)
        sender = world.runtime.spawn(
            sl.send, torch.full((3,), 1.0 + world.rank, device=device), (world.rank + 1) % world.size, 0, world.everyone
        )
        left = (world.rank - 1) % world.size
        sl.recv(buffer, left)
        sender.join(60)
        assert buffer.tolist() == [1.0 + left] * 3
        print("fine on", torch.cuda.get_device_name(), "rank", world.rank, "of", world.size)


if __name__ == "__main__":
    main()
