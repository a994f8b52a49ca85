"""Images computed in their context: where, when, in how many steps, and by whom."""

from __future__ import annotations

import pytest

from mmserve.config import SchedulerConfig
from mmserve.scheduler.batch import Batch
from mmserve.sequence import SequenceStatus
from tests.scheduler.world import FULL, World, image, prompt, window


def rows(batch: Batch) -> list[tuple[str, int, int, list[int]]]:
    """Sequence, first text token, text tokens and images (by their text index) of each chunk."""
    return [
        (c.seq.id, c.start, c.count, [x.placed.text_index for x in c.images]) for c in batch.chunks
    ]


def contexts(budget: int = 64, **options: object) -> World:
    config = SchedulerConfig(max_num_batched_tokens=budget)
    return World(config=config, in_context=True, **options)  # type: ignore[arg-type]


def test_images_are_computed_in_order_between_their_text_and_never_encoded_alone() -> None:
    world = contexts()
    world.submit(prompt(5, image(0), 4, image(1), 3))
    batch = world.step()
    assert rows(batch) == [("1", 0, 12, [5, 9])] and not batch.images
    assert batch.num_tokens == 12 + 6 + 6
    world.run()
    world.assert_right()


def test_an_image_is_never_split_and_waits_for_a_step_with_room() -> None:
    world = contexts(budget=8)
    world.submit(prompt(5, image(0), 4, image(1), 3), 1)
    assert [rows(world.step())[0][2:] for _ in range(4)] == [
        (5, []),
        (2, [5]),
        (2, [9]),
        (3, []),
    ]
    world.run()
    world.assert_right()


def test_a_chunk_may_be_an_image_alone_and_exceed_the_budget_if_the_image_does() -> None:
    world = contexts(budget=4)
    world.submit(prompt(2, image(0), 3), 1)
    assert [rows(world.step())[0][1:] for _ in range(3)] == [
        (0, 2, []),
        (2, 0, [2]),
        (2, 3, []),
    ]
    world.assert_right()


def test_a_large_image_does_not_wait_for_ever_beside_answers_nor_do_they_wait_for_it() -> None:
    world = contexts(budget=7)
    answer = world.submit(prompt(3), 9)
    world.step()
    world.submit(prompt(1, image(0, 7), image(1, 9), 1, base=50))
    steps = [rows(world.step()) for _ in range(3)]
    assert all(step[0] == (answer.id, 3 + n, 1, []) for n, step in enumerate(steps))
    assert [step[1][2:] for step in steps] == [(1, []), (0, [1]), (0, [1])]
    world.run()
    world.assert_right()


def test_two_large_images_of_two_prompts_take_turns() -> None:
    world = contexts(budget=4)
    for n in range(2):
        world.submit(prompt(image(n), 2, base=40 * n))
    assert [[c.seq.id for c in world.step().chunks] for _ in range(2)] == [["1"], ["1"]]
    world.run()
    world.assert_right()


def test_the_same_image_behind_other_text_is_another_one_and_behind_the_same_it_is_found() -> None:
    world = contexts()
    for base in (0, 0, 500):
        world.submit(prompt(5, image(0), 4, base=base))
        world.run()
    assert len(world.encoded) == len(set(world.encoded)) == 2
    world.assert_right()


def test_an_image_that_is_forgotten_is_computed_again_and_the_text_behind_it_is_not() -> None:
    world = contexts()
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[0].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 12, 4, [5])]
    world.assert_right()
    assert len(world.encoded) == 2


def test_with_a_window_text_is_found_up_to_the_image_that_is_forgotten() -> None:
    world = contexts(groups=(FULL, window(6)))
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[0].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 4, 12, [5])]
    world.assert_right()


def test_an_image_is_written_only_where_it_is_missing() -> None:
    world = contexts(groups=(FULL, window(40)))
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[1].clear()
    world.submit(segments, 1)
    (context,) = world.step().chunks[0].images
    assert context.writes == (False, True)
    world.assert_right()


def test_an_image_lost_where_no_row_to_come_reads_it_is_not_computed() -> None:
    world = contexts(groups=(FULL, window(6)))
    segments = prompt(5, image(0), 14)
    world.submit(segments, 1)
    world.run()
    world.vision[1].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 16, 3, [])]
    world.assert_right()


def test_of_two_that_need_an_image_one_computes_it_and_the_other_waits() -> None:
    world = contexts()
    segments = prompt(5, image(0), 4)
    first, second = (world.submit(segments, 2) for _ in range(2))
    assert rows(world.step()) == [(first.id, 0, 9, [5]), (second.id, 0, 5, [])]
    assert (second.id, 5, 4, []) in rows(world.step())
    world.run()
    world.assert_right()
    assert len(world.encoded) == 1


@pytest.mark.parametrize("budget", [5, 6])
def test_who_else_holds_an_image_computes_it_when_the_first_has_gone(budget: int) -> None:
    world = contexts(budget=budget)
    segments = prompt(5, image(0), 4)
    first, second = (world.submit(segments, 2) for _ in range(2))
    world.step()
    world.step() if budget == 6 else None
    world.abort(first)
    world.run()
    world.assert_right()
    assert second in world.done and len(world.encoded) == 1


def test_an_image_whose_sequence_was_preempted_before_it_is_computed_once_afterwards() -> None:
    world = contexts(budget=3, text_pages=8, prefix_caching=False)
    for n in range(2):
        world.submit(prompt(3, base=20 * n), 20)
    late = world.submit(prompt(9, image(0), 4, base=90), 2)
    while late.status is not SequenceStatus.PREEMPTED:
        world.step()
    assert not world.encoded and not world.vision[0].num_used
    world.run()
    assert len(world.encoded) == 1
    world.assert_right()
    world.assert_idle()


def test_a_prefill_computes_the_image_at_its_end_and_the_turn_after_it_finds_both() -> None:
    world = contexts(budget=9)
    ahead = [world.submit(prompt(8, image(0)), prefill_only=True) for _ in range(2)]
    world.run()
    assert set(ahead) == set(world.done) and len(world.encoded) == 1
    seq = world.submit(prompt(8, image(0), 5), 1)
    world.run()
    assert seq.num_cached_tokens == 8 and not seq.missing_images and len(world.encoded) == 1
    world.assert_right()


def test_a_prefill_encodes_all_images_at_its_end_however_few_a_step_takes() -> None:
    world = World(config=SchedulerConfig(max_images_per_step=1))
    world.submit(prompt(8, image(0), image(1), image(2)), prefill_only=True)
    world.run()
    assert len(world.encoded) == 3
    world.assert_idle()


def test_of_a_blended_image_the_head_is_computed_at_its_place_and_the_tail_once_for_all() -> None:
    world = contexts(head=4)
    for base in (0, 0, 500):
        world.submit(prompt(5, image(0), image(1), 4, base=base))
        world.run()
    heads = [key for key in world.encoded if key not in {image(n).digest for n in range(2)}]
    assert len(world.encoded) == len(set(world.encoded)) == 6 and len(heads) == 4
    world.assert_right()


def test_a_head_waits_for_its_tail_and_those_before_it_to_be_encoded() -> None:
    config = SchedulerConfig(max_images_per_step=1)
    world = World(config=config, in_context=True, head=4)
    world.submit(prompt(5, image(0), image(1), image(2), 4), 1)
    assert [rows(world.step())[0][2:] for _ in range(3)] == [(5, [5]), (0, [5]), (4, [5])]
    world.assert_right()


# -- prompts that see themselves ------------------------------------------------------------------


def wholes(budget: int = 64, **options: object) -> World:
    return contexts(budget, whole_prompts=True, **options)


@pytest.mark.parametrize("budget", [4, 64])
def test_a_whole_prompt_is_computed_at_once_whatever_the_budget(budget: int) -> None:
    world = wholes(budget)
    world.submit(prompt(image(0), image(1), 9))
    assert rows(world.step()) == [("1", 0, 9, [0, 0])]
    world.run()
    world.assert_right()


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    world = wholes(budget=20)
    for n in range(3):
        world.submit(prompt(image(n), 9, base=50 * n), 1)
    assert [[c.seq.id for c in world.step().chunks] for _ in range(3)] == [["1"], ["2"], ["3"]]
    world.assert_right()


def test_only_the_same_prompt_is_found_again() -> None:
    world = wholes()
    for segments, cached in (
        (prompt(image(0), 17), 0),
        (prompt(image(0), 17), 16),
        (prompt(image(0), 18), 0),
        (prompt(image(1), 17), 0),
    ):
        seq = world.submit(segments, 2)
        world.run()
        assert seq.num_cached_tokens == cached
    assert len(world.encoded) == 3
    world.assert_right()
