"""Forming a team: all survivors agree on the same members, and a member that was left out gives up."""

from __future__ import annotations

import random
from typing import Any

import pytest

import syncline as sl
from syncline.control import Arrival, ControlLog, MemoryStore, Team, TeamFormation
from syncline.control.team import find_cut_off
from syncline.errors import WorldError
from syncline.runtime import RealRuntime
from syncline.testing import hunt_cases
from syncline.transports.simulated import kill_rank
from syncline.world import World
from tests.hunting import seeds

HERE, LATER = ("data0", 2), ("data0", 3)


def formation(store: MemoryStore, member: int, **options: Any) -> TeamFormation:
    return TeamFormation(store, member, RealRuntime(), dict, **{"timeout_s": 0.01, **options})


def agree(seed: int) -> None:
    """Members with different progress meet; some are killed on the way. The others must see one sequence of teams."""
    draw = random.Random(seed)
    size, values = draw.randint(2, 5), dict[str, bytes]()
    killed = set(draw.sample(range(size), draw.randint(0, size - 1)))
    operations = [draw.randint(3, 4) for _ in range(size)]
    lost: dict[int, str] = {}

    def meet(world: World) -> list[tuple[int, tuple[int, ...]]]:
        def lost_members() -> dict[int, str]:
            return dict.fromkeys(world.lost, "it was killed")

        store = MemoryStore(values, lambda: world.runtime.sleep(1e-4))
        form = TeamFormation(store, world.rank, world.runtime, lost_members, timeout_s=1000.0)
        team, seen = Team(0, tuple(range(size))), []
        if world.rank in killed:
            kill_rank(world.transport)
        for _ in range(3):
            team = form.form(team, Arrival(operations[world.rank], between_steps=False))
            seen.append((team.generation, team.members))
        return seen

    simulation = sl.simulate(meet, size, seed=seed, chaos=True)
    survivors = [result for result in simulation.results if result is not None]
    assert len(survivors) >= size - len(killed)
    assert all(found == survivors[0] for found in survivors), survivors
    assert [generation for generation, _ in survivors[0]] == [1, 2, 3]
    alive = {rank for rank, result in enumerate(simulation.results) if result is not None}
    assert alive <= set(survivors[0][-1][1])
    entries = [entry for entry in ControlLog(MemoryStore(values)).read() if entry.kind == "team"]
    by_generation = {entry.fields["generation"]: tuple(entry.fields["team"]) for entry in entries}
    assert all(dict(survivors[0])[number] == members for number, members in by_generation.items())
    assert not lost


@pytest.mark.hunt
def test_survivors_agree_on_every_team() -> None:
    hunt_cases(agree, seeds(60, 3000), "tests.control.test_team.agree({seed})")


def test_a_member_that_was_left_out_gives_up() -> None:
    store = MemoryStore()
    before = Team(0, (0, 1))
    first = formation(store, 0)
    assert first.form(before, Arrival(0, between_steps=False)).members == (0,)
    with pytest.raises(WorldError, match="declared lost"):
        formation(store, 1).form(before, Arrival(0, between_steps=False))
    assert [entry.kind for entry in ControlLog(store).read()] == ["lost", "team"]


@pytest.mark.parametrize(
    ("unreachable", "left_out"),
    [
        ({0: (1,), 1: (0,)}, [1]),  # the higher rank of the pair
        ({2: (0,)}, [2]),  # one of the two is enough
        ({0: (3, 2, 1)}, [0]),  # the one that reaches nobody
        ({0: (2, 3), 1: (2, 3)}, [3, 2]),  # two halves
        ({1: (9,)}, []),  # not in the team
    ],
)
def test_one_member_of_a_pair_that_cannot_talk_is_left_out(
    unreachable: dict[int, tuple[int, ...]], left_out: list[int]
) -> None:
    store = MemoryStore()
    arrivals = {member: Arrival(4, False, unreachable=unreachable.get(member, ())) for member in range(4)}
    assert list(find_cut_off(arrivals)) == left_out
    runtime, ended, teams = RealRuntime(), dict[int, str](), dict[int, Team]()

    def meet(member: int) -> None:
        form = formation(store, member, timeout_s=60.0, unreachable=lambda: unreachable.get(member, ()))
        try:
            teams[member] = form.form(Team(0, (0, 1, 2, 3)), Arrival(4, between_steps=False))
        except WorldError as error:
            ended[member] = str(error)

    tasks = [runtime.spawn(meet, member) for member in range(4)]
    assert all(task.join(60.0) for task in tasks)
    assert sorted(ended) == sorted(left_out)
    assert all("was declared lost" in text and "cannot reach each other" in text for text in ended.values())
    members = tuple(member for member in range(4) if member not in left_out)
    assert {team.members for team in teams.values()} == {members}
    assert [entry.fields["member"] for entry in ControlLog(store).read() if entry.kind == "lost"] == left_out


def test_newcomers_without_the_state_are_left_out_first() -> None:
    arrivals = {0: Arrival(4, True, unreachable=(2, 3)), 2: Arrival(-1, True), 3: Arrival(-1, True)}
    assert sorted(find_cut_off(arrivals)) == [2, 3]


def test_newcomers_are_admitted_between_steps_only() -> None:
    store = MemoryStore()
    formation(store, 5).ask_to_join(HERE)
    member = formation(store, 0)
    team = member.form(Team(0, (0,)), Arrival(0, between_steps=False))
    assert team.members == (0,)
    assert member.waiting(team, HERE)
    team = member.form(team, Arrival(4, between_steps=True), HERE)
    assert (team.members, team.completed(0), team.completed(5)) == ((0, 5), 4, -1)
    assert formation(store, 5).await_admission() == team
    assert not member.waiting(team, HERE)


def test_a_newcomer_is_admitted_at_its_place_in_the_data() -> None:
    store = MemoryStore()
    newcomer = formation(store, 5)
    newcomer.ask_to_join(HERE)
    member = formation(store, 0)
    team = member.form(Team(0, (0,)), Arrival(0, between_steps=True), LATER)
    assert team.members == (0,)
    assert not member.waiting(team, LATER)
    assert newcomer.await_admission(gave_up=lambda: True) is None
    newcomer.ask_to_join(LATER)
    assert member.waiting(team, LATER)
    assert member.form(team, Arrival(1, between_steps=True), LATER).members == (0, 5)


def test_a_newcomer_waits_where_the_team_is_complete() -> None:
    store = MemoryStore()
    formation(store, 5).ask_to_join(HERE)
    member = formation(store, 0, maximum=1)
    team = member.form(Team(0, (0,)), Arrival(0, between_steps=True), HERE)
    assert team.members == (0,)
    assert not member.waiting(team, HERE)
    with pytest.raises(WorldError, match="not admitted"):
        formation(store, 5).await_admission()


def test_a_newcomer_without_the_state_waits_again() -> None:
    """Its team could not be connected, and the others repeat an operation without it."""
    store = MemoryStore()
    formation(store, 5).ask_to_join(HERE)
    member = formation(store, 0)
    team = member.form(Team(0, (0,)), Arrival(2, between_steps=True), HERE)
    store.set(f"control/arrive/{team.generation + 1}/5", '{"operations": -1, "between_steps": true}')
    team = member.form(team, Arrival(2, between_steps=False))
    assert team.members == (0,)
    team = member.form(team, Arrival(3, between_steps=True), HERE)
    assert team.members == (0, 5)


def test_too_few_members_end_with_a_sentence() -> None:
    with pytest.raises(WorldError, match="at least 2"):
        formation(MemoryStore(), 0, minimum=2).form(Team(0, (0,)), Arrival(0, between_steps=True))


def test_a_newcomer_of_an_ended_job_is_told() -> None:
    store = MemoryStore()
    member = formation(store, 0)
    member.form(Team(0, (0,)), Arrival(0, between_steps=True))
    member.leave("it has finished")
    with pytest.raises(WorldError, match="the job has ended"):
        formation(store, 5).await_admission()


def test_a_member_that_has_left_does_not_come_back() -> None:
    store = MemoryStore()
    formation(store, 0).refuse_second_world()
    formation(store, 0).leave("it has closed its world")
    with pytest.raises(WorldError, match="one world"):
        formation(store, 0).refuse_second_world()


def test_newcomer_that_is_lost_while_it_waits_is_not_awaited() -> None:
    """Only the ends of members that are followed are known, and a newcomer is in no team."""
    values, followed = dict[str, bytes](), set[int]()
    formation(MemoryStore(values), 4).ask_to_join(HERE)
    formation(MemoryStore(values), 5).ask_to_join(HERE)
    member = TeamFormation(
        MemoryStore(values),
        0,
        RealRuntime(),
        lambda: dict.fromkeys({4} & followed, "it was killed"),
        timeout_s=0.01,
        follow=followed.update,
    )
    assert member.waiting(Team(1, (0,)), HERE) == (5,)
