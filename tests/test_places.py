"""Folders that processes have one each."""

from pathlib import Path

from mmserve.places import own_place


def test_each_has_a_folder_of_its_own_and_the_next_finds_a_left_one(tmp_path: Path) -> None:
    with own_place(tmp_path) as first:
        with own_place(tmp_path) as second:
            assert first != second
            (second / "kept").touch()
        with own_place(tmp_path) as third:
            assert third == second and (third / "kept").exists()
