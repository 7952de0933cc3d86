"""K-means by one-sided asynchronous SGD: each worker leaves its centres where others find them, and nobody waits.

python examples/kmeans.py
syncline run --mpi -n 2 examples/kmeans.py
"""

import numpy as np

import syncline as sl
from syncline.solvers import KMeans, aggregate, asgd

random = np.random.default_rng(0)
centres = random.uniform(-10, 10, (20, 4))
points = centres[random.integers(20, size=100_000)] + random.normal(size=(100_000, 4))

with sl.init() as world:
    found = asgd(KMeans(20), points, rate=0.3, rate_end=0.01, batch=200, part=0.5)
    rounds = aggregate(KMeans(20), points)
    if world.rank == 0:
        counts = ", ".join(f"{found.total(name)} {name}" for name in ("steps", "accepted", "rejected", "torn"))
        print(f"one-sided on {world.size} workers: {found.value:.4f} a point in {found.seconds:.2f} s ({counts})")
        rest = f"{rounds.value:.4f} a point in {rounds.seconds:.2f} s ({rounds.efforts[0].steps} rounds)"
        print(f"aggregated:             {rest}")
        print(f"at the true centres:    {KMeans(20).value(centres.reshape(-1), (points,)):.4f}")
