"""Values in codecs and through filters: what is not sent now is sent later, and both ends agree on what was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.codecs import build_codec
from syncline.server import Client, Server, network_of, open_space, store
from syncline.server.filters import build_filter
from syncline.transports import Transport

CODECS = ["topk(0.25)", "quantize(4)", "onebit", "cast('bf16')", "randomk(0.5)", "lossless", "threshold(0.5)",
          "ternary", "topk(0.5)|quantize(4)", "powersgd(2)"]  # fmt: skip
NUMEL = 60


class Kept:
    """One dedicated server that can be looked at."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.server: Server | None = None

    def __call__(self, transport: Transport) -> None:
        self.server = Server(network_of(transport, self._workers, 1)).start()
        self.server.join()

    def weights(self, client: Client) -> Tensor:
        assert self.server is not None
        return self.server.handler.shards[client.description.space_id].weights

    def view(self, client: Client) -> Tensor:
        assert self.server is not None
        found = self.server.handler.sessions[client.description.space_id, client.network.me].view
        assert found is not None
        return found


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("keyed", [False, True])
def test_sent_values_and_the_residual_add_up(spec: str, keyed: bool) -> None:
    """Σ values = Σ sent + residual, for ranges and for lists."""
    kept = Kept(1)

    def work(world: sl.World) -> tuple[Tensor, Tensor, Tensor | None]:
        client = open_space(world, "s", NUMEL, codec=spec, piece=25)
        total = torch.zeros(NUMEL)
        keys = torch.arange(0, NUMEL, 2) if keyed else None
        for step in range(8):
            values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
            chosen = values if keys is None else values[keys]
            total[slice(None) if keys is None else keys] += chosen
            client.push(keys, chosen).wait()
        found = total, kept.weights(client).clone(), client.residual
        client.close()
        return found

    total, sent, residual = sl.simulate(work, 1, extra=[kept]).results[0]
    codec = build_codec(spec)
    assert codec is not None
    assert sent.any()
    if residual is not None:
        torch.testing.assert_close(sent + residual, total, rtol=1e-4, atol=1e-4)
    elif codec.traits.exact:
        torch.testing.assert_close(sent, total, rtol=1e-5, atol=1e-5)
    else:
        assert (sent - total).norm() < 3 * total.norm()  # unbiased, with nothing kept


@pytest.mark.parametrize("spec", CODECS)
def test_encoded_replies_follow_the_weights(spec: str) -> None:
    kept = Kept(2)

    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", NUMEL, codec=spec, piece=25)
        errors = []
        for step in range(6):
            client.push(None, torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))).wait()
            futures = [client.pull(encoded=True) for _ in range(3)]  # several at once, about the same keys
            for future in reversed(futures):
                found = future.wait()
            assert found is not None
            assert torch.equal(client.encoder.view(0, NUMEL), kept.view(client))
        world.barrier()
        for _ in range(30):  # nothing changes any more: what codecs lost comes in the end
            found = client.pull(encoded=True).wait()
        assert found is not None
        world.barrier()
        errors.append(float((client.get() - found).abs().max()))
        world.barrier()
        client.close()
        return errors

    for errors in sl.simulate(work, 2, extra=[kept]).results:
        assert errors[-1] < (0.5 if spec == "threshold(0.5)" else 1e-4)


def test_replies_of_an_exact_codec_are_exact() -> None:
    def work(world: sl.World) -> bool:
        client = open_space(world, "s", NUMEL, codec="lossless")
        same = True
        for step in range(5):
            found = client.push_pull(None, torch.full((NUMEL,), float(step)), encoded=True).wait()
            assert found is not None
            same &= torch.equal(found, client.get())
        client.close()
        return same

    assert sl.simulate(work, 1).results == (True,)


def test_values_a_codec_cannot_carry_are_refused_before_sending() -> None:
    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", 30, codec="topk(0.5)", piece=10)
        bad = torch.ones(30)
        bad[25] = float("nan")
        with pytest.raises(sl.errors.DivergedError, match="not finite"):
            client.push(None, bad, tick=True)
        found = client.get().tolist()
        client.push(None, torch.ones(30), tick=True).wait()  # the step was not taken
        client.close()
        return found

    assert sl.simulate(work, 1).results == ([0.0] * 30,)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("spec", ["significant(0.5)", "skip(0.5, seed=3)", "significant(0.5)|skip(0.3)|cache"])
def test_values_held_back_are_sent_in_the_end(spec: str, synchronous: bool) -> None:
    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        filters = build_filter(spec)
        client = open_space(world, "s", 40, filters=filters, synchronous=synchronous, piece=16)
        total = torch.zeros(40)
        for step in range(12):
            values = torch.randint(-4, 5, (40,), generator=torch.Generator().manual_seed(step)) / 8.0
            total += 2 * values
            client.push(None, values, scale=2.0, tick=True).wait()
        client.push(range(3), torch.ones(3), handler="add").wait()  # goes past the filter
        total[:3] += 1
        client.flush()
        found = client.get()
        client.close()
        return total, found

    total, found = sl.simulate(work, 1, faults=(), seed=1).results[0]
    assert torch.equal(total, found)


def test_closing_sends_the_values_held_back() -> None:
    def work(world: sl.World) -> Tensor:
        client = open_space(world, "s", 4, filters=build_filter("significant(100.0)") if world.rank else None)
        client.push(None, torch.ones(4)).wait()
        if world.rank:
            client.close()
            return torch.zeros(4)
        found = client.get()
        while client.status.live > 1:
            found = client.get()
        client.close()
        return found

    assert sl.simulate(work, 2, extra=[Kept(2)]).results[0].tolist() == [2.0] * 4


def test_key_lists_are_sent_once() -> None:
    kept = Kept(1)

    def work(world: sl.World) -> tuple[list[int], Tensor]:
        client = open_space(world, "s", 1000, filters=build_filter("cache"), piece=300)
        keys = torch.arange(0, 1000, 3)
        sent = []
        for round_ in range(6):
            before = client.bytes_wire
            if round_ == 3:  # the server has forgotten them
                assert kept.server is not None
                for session in kept.server.handler.sessions.values():
                    session.key_lists.clear()
            futures = [client.push(keys, torch.ones(keys.numel())), client.pull(keys)]
            # Once nobody waits for the push itself.
            found = futures[1].wait() if round_ == 4 else [future.wait() for future in futures][1]
            assert found is not None
            assert found.tolist() == [round_ + 1.0] * keys.numel()
            sent.append(client.bytes_wire - before)
        total = client.get()
        client.close()
        return sent, total

    sent, total = sl.simulate(work, 1, extra=[kept]).results[0]
    assert sent[0] > sent[1] + 2000
    assert sent[1] == sent[2]
    assert total.sum().item() == 6 * 334


def test_forgotten_lists_are_sent_again_without_a_wait() -> None:
    """Seen as a deadlock: a read came after a push whose keys the server had asked for."""
    kept = Kept(1)

    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", 10, filters=build_filter("cache"))
        keys = torch.tensor([1, 7])
        client.push(keys, torch.ones(2)).wait()
        assert kept.server is not None
        for session in kept.server.handler.sessions.values():
            session.key_lists.clear()
        client.push(keys, torch.ones(2), tick=True)
        found = client.pull(keys, min_clock=1).wait()
        assert found is not None
        client.close()
        return found.tolist()

    assert sl.simulate(work, 1, extra=[kept]).results == ([2.0, 2.0],)


def test_bytes_are_counted_both_ways() -> None:
    def work(world: sl.World) -> tuple[int, int]:
        with store(1000, codec="topk(0.01)") as space:
            start = space.bytes_logical, space.bytes_wire
            space.push(None, torch.randn(1000)).wait()
            return space.bytes_logical - start[0], space.bytes_wire - start[1]

    logical, wire = sl.simulate(work, 1).results[0]
    assert logical == 4000
    assert 0 < wire < 400
