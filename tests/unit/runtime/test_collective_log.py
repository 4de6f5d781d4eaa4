"""The trail of a batch's exchanges: noted while a batch is in hand, told from the moment that somebody asks."""

from headway.runtime.collective_log import VOTE, CollectiveLog, is_vote, read


def test_nothing_is_noted_while_no_batch_is_in_hand() -> None:
    trail = CollectiveLog()
    trail.note("all", "numbers", "numbers", "", 1)
    assert trail.position == 0
    trail.open()
    trail.note("all", "numbers", "numbers", "", 1)
    assert (trail.position, trail.is_inside) == (1, True)
    trail.passed()
    assert not trail.is_inside
    trail.close()
    trail.note("all", "numbers", "numbers", "", 1)
    assert trail.position == 1


def test_what_was_and_what_follows_is_told_in_order_and_what_was_skipped_is_not() -> None:
    trail, told = CollectiveLog(), []
    trail.open()
    trail.note("fsdp", "gather", 0, 1)
    trail.skip()
    trail.tell(trail.number, lambda index, text: told.append((index, read(text))))
    trail.tell(trail.number, lambda index, text: told.append((-1, read(text))))  # asked twice
    trail.note("fsdp", "scatter", 0, 1, 8, "float32", "AVG")
    assert told == [(0, ["fsdp", "gather", 0, 1]), (2, ["fsdp", "scatter", 0, 1, 8, "float32", "AVG"])]


def test_a_round_that_is_over_is_not_told() -> None:
    trail, told = CollectiveLog(), []
    trail.open()
    number = trail.number
    trail.note("fsdp", "gather", 0, 1)
    trail.turn()
    trail.tell(number, lambda index, text: told.append(index))
    assert told == []
    assert (trail.position, trail.is_told, trail.number) == (0, False, number + 1)


def test_a_vote_is_known_by_its_name() -> None:
    assert is_vote(["all", "numbers", VOTE, "", 8])
    assert not is_vote(["all", "numbers", "numbers", "", 8])
    assert not is_vote(["all", "in place", True, 0, []])
