"""What is left of killed MPI ranks in shared memory."""

from __future__ import annotations

from pathlib import Path

from syncline.launch.cleanup_process import remove_unmapped_memory


def test_shared_memory_that_nobody_has_mapped_is_removed(tmp_path: Path) -> None:
    """What a living process holds stays, and so does what was there before, and what is not MPICH's."""
    folder, proc = tmp_path / "shm", tmp_path / "proc"
    (proc / "12").mkdir(parents=True)
    folder.mkdir()
    names = ("mpich_shm_1a_0", "mpich_shm_2b_0", "sm_segment")
    for name in names:
        (folder / name).write_bytes(b"x")
    (proc / "12" / "maps").write_text(
        f"7f00-7f01 rw-s 00000000 00:19 5  {folder / names[1]}\n7f02-7f03 r-xp 00000000 08:01 9\n"
    )
    (proc / "self").mkdir()
    made = (folder / names[0]).stat().st_ctime
    assert remove_unmapped_memory(made + 10, str(folder), str(proc)) == []
    assert len(list(folder.iterdir())) == 3
    assert remove_unmapped_memory(made - 10, str(folder), str(proc)) == [folder / names[1]]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[1:])
