"""Test the log of a batch's collectives, which records while a batch is open and sends its entries to a listener."""

from headway.core.runtime.collective_log import VOTE, CollectiveLog, RecordedCollective, is_vote, parse_record


def test_nothing_is_recorded_outside_a_batch() -> None:
    trail = CollectiveLog()
    trail.record_entry("all", "numbers", "numbers", "", 1)
    assert trail.position == 0
    trail.begin_batch()
    trail.record_entry("all", "numbers", "numbers", "", 1)
    assert (trail.position, trail.is_in_collective) == (1, True)
    trail.record_exit()
    assert not trail.is_in_collective
    trail.end_batch()
    trail.record_entry("all", "numbers", "numbers", "", 1)
    assert trail.position == 1


def test_listener_gets_earlier_and_later_collectives_but_no_skipped_ones() -> None:
    trail, told = CollectiveLog(), []
    trail.begin_batch()
    trail.record_entry("fsdp", "gather", 0, 1)
    trail.skip_collective()
    trail.add_listener(trail.number, lambda index, text: told.append((index, parse_record(text))))
    trail.add_listener(
        trail.number, lambda index, text: told.append((-1, parse_record(text)))
    )  # a second request has no effect
    trail.record_entry("fsdp", "scatter", 0, 1, 8, "float32", "AVG")
    assert told == [
        (0, RecordedCollective("fsdp", "gather", [0, 1])),
        (2, RecordedCollective("fsdp", "scatter", [0, 1, 8, "float32", "AVG"])),
    ]


def test_listener_gets_nothing_of_a_finished_round() -> None:
    trail, told = CollectiveLog(), []
    trail.begin_batch()
    number = trail.number
    trail.record_entry("fsdp", "gather", 0, 1)
    trail.begin_round()
    trail.add_listener(number, lambda index, text: told.append(index))
    assert told == []
    assert (trail.position, trail.has_listener, trail.number) == (0, False, number + 1)


def test_vote_is_recognized_by_its_name() -> None:
    assert is_vote(RecordedCollective("all", "numbers", [VOTE, "", 8]))
    assert not is_vote(RecordedCollective("all", "numbers", ["numbers", "", 8]))
    assert not is_vote(RecordedCollective("all", "in place", [True, 0, []]))
