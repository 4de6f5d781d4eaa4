"""Test the record that a preempted rank writes for the launcher after saving."""

from headway.core.runtime.preempted_run import PreemptedRun, find_preempted


def test_record_of_a_preemption_is_found_next_to_the_exception_record(tmp_path):
    record = tmp_path / "rank0-attempt0.json"
    assert find_preempted(record) is None
    left = PreemptedRun("SIGTERM on rank 1", 70, "/data/run/checkpoints/checkpoint_3")
    left.write(record)
    assert find_preempted(record) == left
    assert not record.exists()
    assert left.exit_code == 75
    assert left.format_text().splitlines()[0] == (
        "headway: preempted by SIGTERM on rank 1 after update 70; checkpoint /data/run/checkpoints/checkpoint_3"
    )
