"""What a rank leaves for the launcher before it ends, having saved."""

from headway.launch.agent.records import PreemptedRun, find_preempted


def test_it_is_found_beside_the_record(tmp_path):
    record = tmp_path / "rank0-attempt0.json"
    assert find_preempted(record) is None
    left = PreemptedRun("SIGTERM on rank 1", 70, "/data/run/checkpoints/checkpoint_3")
    left.leave(record)
    assert find_preempted(record) == left
    assert not record.exists()
    assert left.exit_code == 75
    assert left.text().splitlines()[0] == (
        "headway: preempted by SIGTERM on rank 1 after update 70; checkpoint /data/run/checkpoints/checkpoint_3"
    )
