"""Who is in a server network: co-located, dedicated, on each engine."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

import pytest
import torch

import syncline as sl
from syncline.server import __main__ as server_process
from syncline.server import server
from syncline.server.network import import_handlers, join_network, network_of, read_roles, server_network
from syncline.transports import SingleTransport, Transport
from syncline.world.simulation import ExtraProcess
from tests.launching import launch, torch_variables
from tests.server.network_cases import expected, serve, use


def test_every_worker_is_a_server_by_default() -> None:
    def work(world: sl.World) -> list[float]:
        network = server_network(world)
        assert network.workers == network.servers == tuple(range(world.size))
        assert network.serves
        return use(world)

    run = sl.simulate(work, 3)
    assert run.results == tuple(expected(rank, range(3)) for rank in range(3))


def test_servers_beside_the_ranks_of_a_simulation() -> None:
    def served(transport: Transport) -> None:
        network = network_of(transport, workers=3, servers=2)
        assert network.serves
        assert network.dedicated
        serve(network)

    run = sl.simulate(use, 3, extra=[served, served])
    assert run.results == tuple(expected(rank, range(3, 5)) for rank in range(3))


def test_an_evaluator_beside_workers_that_serve() -> None:
    seen: list[float] = []

    def evaluate(transport: Transport) -> None:
        network = network_of(transport, workers=2, evaluators=1)
        assert not network.serves
        answer = torch.zeros(1)
        handle = transport.recv(answer, 1, 2)
        transport.send(torch.zeros(1), 1, 1)
        handle.wait()
        seen.append(float(answer))

    def work(world: sl.World) -> None:
        network = server_network(world)
        assert (network.servers, network.evaluators, network.dedicated) == ((0, 1), (2,), False)
        use(world)
        world.compute(1.0)

    sl.simulate(work, 2, extra=[ExtraProcess(evaluate, "evaluator")])
    assert seen == [1000.0]


def test_a_world_of_one_serves_itself_and_closes_its_network() -> None:
    with sl.init() as world:
        assert use(world) == [0.0]
        network = server_network(world)
        idle = world.runtime.spawn(network.transport.recv(torch.zeros(1), None, 5).wait, math.inf)
    with pytest.raises(sl.errors.WorldError, match="closed"):
        idle.join(60)


def test_the_variables_of_a_launcher_do_not_reach_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SYNCLINE_SERVERS": "2", "SYNCLINE_WORKERS": "7", "SYNCLINE_HANDLERS": "no_such"}.items():
        monkeypatch.setenv(name, value)
    assert sl.simulate(lambda world: len(server_network(world).servers), 2).results == (2, 2)


SCRIPT = """
import syncline as sl
from tests.server.network_cases import expected, use
with sl.init(transport={engine!r}) as world:
    assert use(world) == expected(world.rank, range(world.size))
    print(world.transport.name)
    from syncline.server.network import server_network
    print(server_network(world).transport.name)
with sl.init(transport={engine!r}) as world:  # a second world in the same processes meets afresh
    assert use(world) == expected(world.rank, range(world.size))
"""


@pytest.mark.parametrize(("engine", "name"), [("torch_dist", "torch.distributed"), ("zeromq", "zeromq")])
def test_workers_serve_each_other_over_zeromq(engine: str, name: str) -> None:
    for ended in launch(SCRIPT.format(engine=engine), torch_variables(3)):
        assert ended.code == 0, ended.err
        assert ended.out.split() == [name, "zeromq"]


def test_members_must_fit_the_channel() -> None:
    with pytest.raises(sl.errors.WorldError, match="2 workers, 1 servers and 0 evaluators are not the 1 members"):
        network_of(SingleTransport(), workers=2, servers=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SYNCLINE_ROLE": "boss"}, "SYNCLINE_ROLE='boss' is none of worker, server, evaluator"),
        ({"SYNCLINE_SERVERS": "2"}, "SYNCLINE_WORKERS is not set"),
        ({"SYNCLINE_SERVERS": "two"}, "SYNCLINE_SERVERS='two' is not a whole number"),
        (
            {"SYNCLINE_ROLE": "server", "SYNCLINE_SERVERS": "2", "SYNCLINE_WORKERS": "1", "SYNCLINE_SERVER": "2"},
            "SYNCLINE_SERVER=2 do not fit together",
        ),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(sl.errors.WorldError, match=message):
        read_roles(variables)


def test_the_number_of_replicas_is_read() -> None:
    variables = {"SYNCLINE_SERVERS": "3", "SYNCLINE_WORKERS": "1", "SYNCLINE_REPLICAS": "2"}
    assert (read_roles(variables).replicas, read_roles({}).replicas) == (2, 1)


def test_a_server_without_a_rendezvous_is_refused() -> None:
    roles = read_roles({"SYNCLINE_ROLE": "server", "SYNCLINE_SERVERS": "1", "SYNCLINE_WORKERS": "1"})
    with pytest.raises(sl.errors.WorldError, match="syncline run --servers S"):
        join_network(roles)


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_SERVERS", "1")
    monkeypatch.setenv("SYNCLINE_WORKERS", "4")
    with (
        sl.init() as world,
        pytest.raises(sl.errors.WorldError, match="this world has 1 ranks, but 4 workers were started"),
    ):
        server_network(world)


def test_modules_that_register_handlers_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_handlers_a.py").write_text("")
    (tmp_path / "my_handlers_b.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    import_handlers({"SYNCLINE_HANDLERS": " my_handlers_a, "})
    assert "my_handlers_a" in sys.modules
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_handlers({"SYNCLINE_HANDLERS": "my_handlers_a,my_handlers_b"})
    with pytest.raises(sl.errors.SpecError, match="there is no module 'my_handlers_c'"):
        import_handlers({"SYNCLINE_HANDLERS": "my_handlers_c"})


def test_servers_come_before_evaluators() -> None:
    def idle(transport: Transport) -> None:
        transport.recv(torch.zeros(1), None).wait(timeout=math.inf)

    with pytest.raises(sl.errors.WorldError, match="beside the ranks are evaluator, server: servers come first"):
        sl.simulate(server_network, 1, extra=[ExtraProcess(idle, "evaluator"), idle])


def test_a_server_says_goodbye_and_ends_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 0 its launcher would take it for one whose workers have all left."""
    told: list[object] = []

    class Network:
        def close(self) -> None:
            told.append("goodbye")

    def serve_until_terminated(network: Network) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(server_process, "_join", Network)
    monkeypatch.setattr(server, "serve", serve_until_terminated)
    monkeypatch.setattr(server_process, "end_by", told.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        server_process.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["goodbye", signal.SIGTERM]
