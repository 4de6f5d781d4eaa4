"""Test the run log: lines are read back as written, even after kills, resumes, damage and full disks."""

import json
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.tracking.runlog import FILE, RunLog, convert_to_json
from headway.core.tracking.runlog_reader import read_run
from headway.errors import StateError, TrackingError


@pytest.fixture
def log(tmp_path):
    """Open run log with a first line."""
    opened = RunLog(tmp_path)
    opened.write_start("digits", {"lr": 0.1})
    yield opened
    opened.close()


def read_lines(log):
    return [json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()]


def reopen(log):
    """Return the log as continued by the next process after a kill."""
    log.close()
    opened = RunLog(log.folder)
    opened.write_start("digits", {"lr": 0.2})
    return opened


def test_details_of_an_event_may_be_called_name_and_step(tmp_path):
    log = RunLog(tmp_path)
    log.write_start("digits")
    log.write_event("spike", 3, name="loss", step=2)
    log.close()
    assert [(each.name, each.step, each.details) for each in read_run(tmp_path).events] == [
        ("spike", 3, {"name": "loss", "step": 2})
    ]


def test_everything_written_is_read_back(tmp_path):
    log = RunLog(tmp_path)
    config = {"lr": 0.1, "sizes": (1, 2), "path": tmp_path, "kind": int, "deep": {"x": math.nan}}
    assert log.write_start("digits", config, world_size=2, device="cuda", versions={"torch": "2.13"}) == 1
    log.write_values(3, {"loss": 1.5, "note": "warm"})
    log.write_values(None, {"loss": 2})
    log.write_event("checkpoint", 3, folder="c")
    log.write_medium("image", "samples", 3, tmp_path / "images" / "samples.png")
    log.write_medium("artifact", "weights", None, tmp_path.parent / "weights.bin")
    log.write_end({"train_loss": math.inf})
    log.close()
    run = read_run(tmp_path)
    assert run.config == {"lr": 0.1, "sizes": [1, 2], "path": str(tmp_path), "kind": repr(int), "deep": {"x": "nan"}}
    (start,) = run.starts
    assert (start.project, start.attempt, start.world_size, start.device) == ("digits", 1, 2, "cuda")
    assert start.versions == {"torch": "2.13"}
    assert [(step, value) for step, _, value in run.values["loss"]] == [(3, 1.5), (None, 2)]
    assert [value for _, _, value in run.values["note"]] == ["warm"]
    assert [(each.name, each.step, each.details) for each in run.events] == [("checkpoint", 3, {"folder": "c"})]
    assert [(each.kind, each.name, each.step) for each in run.media] == [
        ("image", "samples", 3),
        ("artifact", "weights", None),
    ]
    assert run.media[0].path == tmp_path / "images" / "samples.png"
    assert run.media[1].path.resolve() == (tmp_path.parent / "weights.bin").resolve()
    assert run.summary == {"train_loss": "inf"}
    assert run.is_ended
    assert read_run(tmp_path / FILE).values == run.values


def test_non_finite_values_are_strict_json_and_restored(log):
    log.write_values(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0})
    assert read_lines(log)[1]["values"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 0.0}
    values = read_run(log.folder).values
    assert math.isnan(values["a"][0][2])
    assert [values[name][0][2] for name in "bcd"] == [math.inf, -math.inf, 0.0]


def test_each_line_is_written_when_the_call_returns(log):
    log.write_values(1, {"loss": 1.0})
    assert read_lines(log)[-1]["values"] == {"loss": 1.0}


def test_torn_last_line_is_ignored_and_removed_by_the_next_start(log):
    log.write_values(1, {"loss": 1.0})
    whole = log.path.read_bytes()
    for cut in (b'{"kind":"val', b"{", b'{"kind":"values","time":1,"step":2,"values":{"loss":"\xc3'):
        log.path.write_bytes(whole + cut)
        run = read_run(log.folder)
        assert [point[2] for point in run.values["loss"]] == [1.0]
        assert run.damaged_lines == []
        opened = reopen(log)
        opened.write_values(2, {"loss": 0.5})
        opened.close()
        assert [entry["kind"] for entry in read_lines(log)] == ["run", "values", "run", "values"]
        assert [point[0] for point in read_run(log.folder).values["loss"]] == [1, 2]


def test_last_line_without_a_line_break_counts(log):
    log.write_values(1, {"loss": 1.0})
    log.path.write_bytes(log.path.read_bytes()[:-1])
    assert len(read_run(log.folder).values["loss"]) == 1
    reopen(log).close()
    assert [entry["kind"] for entry in read_lines(log)] == ["run", "values", "run"]


def test_torn_first_line_starts_a_new_log(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"kind":"run","ti')
    with pytest.raises(TrackingError, match="no complete line yet"):
        read_run(tmp_path)
    log = RunLog(tmp_path)
    assert log.write_start("p") == 1
    log.close()
    assert len(read_run(tmp_path).starts) == 1


def test_damaged_line_is_reported_by_its_number(log):
    log.write_values(1, {"loss": 1.0})
    log.path.write_bytes(
        log.path.read_bytes() + b"\x00\x00\xff\n" + b'{"kind":"values","time":1,"step":"x","values":{}}\n'
    )
    log.write_values(2, {"loss": 0.5})
    run = read_run(log.folder)
    assert run.damaged_lines == [3, 4]
    assert [point[0] for point in run.values["loss"]] == [1, 2]


def test_interrupted_write_does_not_damage_the_next_line(log):
    class Full:
        closed, left = False, 12

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            done, self.left = data[: self.left], 0
            return real.write(done)

    real, log._file = log._file, Full()
    with pytest.raises(OSError, match="No space"):
        log.write_values(1, {"loss": 1.0})
    log._file = real
    log.write_values(2, {"loss": 0.5})
    run = read_run(log.folder)
    assert run.damaged_lines == [2]
    assert [point[0] for point in run.values["loss"]] == [2]


def test_resume_supersedes_values_of_later_steps(log):
    for step in range(1, 7):
        log.write_values(step, {"loss": 10.0 - step})
    log.write_values(None, {"note": "kept"})
    log.write_values(6, {"eval_loss": 1.0})
    log.write_medium("image", "samples", 6, "samples.png")
    log.write_event("checkpoint", 6)
    opened = reopen(log)
    opened.write_event("resumed", 4)
    opened.write_values(5, {"loss": 50.0})
    opened.close()
    run = read_run(log.folder)
    assert [(step, value) for step, _, value in run.values["loss"]] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
        (4, 6.0),
        (5, 50.0),
    ]
    assert "note" in run.values
    assert "eval_loss" not in run.values
    assert run.media == []
    assert [event.name for event in run.events] == ["checkpoint", "resumed"]
    assert [start.attempt for start in run.starts] == [1, 2]
    assert run.config == {"lr": 0.2}


@pytest.mark.slow
@pytest.mark.timeout(60)  # quadratic work would take minutes
def test_very_many_resumes_take_seconds(tmp_path):
    lines = [{"kind": "run", "format": 1, "time": 0.0}]
    for step in range(60_000):
        lines.append({"kind": "values", "time": 1.0, "step": step + 1, "values": {"loss": 1.0}})
        lines.append({"kind": "values", "time": 1.0, "step": step + 2, "values": {"loss": 2.0}})
        lines.append({"kind": "event", "time": 1.0, "event": "resumed", "step": step + 1})
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_run(tmp_path).values == {"loss": [(step + 1, 1.0, 1.0) for step in range(60_000)]}


def test_run_that_starts_over_supersedes_all_values(log):
    log.write_values(3, {"loss": 1.0})
    opened = reopen(log)
    opened.write_event("started_over", 0)
    opened.write_values(2, {"loss": 2.0})
    opened.close()
    assert [point[0] for point in read_run(log.folder).values["loss"]] == [2]


def test_later_start_counts_if_two_starts_logged_one_step(log):
    log.write_values(1, {"loss": 1.0})
    log.write_values(2, {"loss": 2.0})
    log.write_values(2, {"loss": 2.5})
    opened = reopen(log)
    opened.write_values(2, {"loss": 20.0})
    opened.write_values(2, {"loss": 25.0})
    opened.close()
    assert [point[2] for point in read_run(log.folder).values["loss"]] == [1.0, 20.0, 25.0]


def test_starts_are_counted_and_an_end_counts_until_the_next_start(log):
    second = reopen(log)
    second.write_end({"a": 1})
    assert read_run(log.folder).is_ended
    third = reopen(second)
    assert third.attempt == 3
    third.close()
    run = read_run(log.folder)
    assert not run.is_ended
    assert len(run.starts) == 3


def test_line_types_of_a_later_version_are_ignored(log):
    with open(log.path, "a") as file:
        file.write(
            '{"kind":"hologram","time":1.5,"step":3}\n{"kind":"values","time":2,"step":1,"values":{"a":1,"b":[1]}}\n'
        )
    run = read_run(log.folder)
    assert run.damaged_lines == []
    assert list(run.values) == ["a"]


def test_later_format_is_refused(tmp_path):
    (tmp_path / FILE).write_text('{"kind":"run","time":1,"format":2}\n')
    with pytest.raises(TrackingError, match=r"format 2.*upgrade"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "content", ["epoch,loss\n1,2\n", '{"a": 1}\n', "[1]\n{}\n", "words without an end", "\x00\x01\n"]
)
def test_foreign_file_is_refused_and_unchanged(tmp_path, content):
    path = tmp_path / FILE
    path.write_text(content)
    with pytest.raises(TrackingError, match="is not a run log of Headway's"):
        read_run(path)
    with pytest.raises(TrackingError, match="is not a run log of Headway's"):
        RunLog(tmp_path)
    assert path.read_text() == content


def test_error_for_a_missing_log_lists_the_folder(tmp_path, log):
    with pytest.raises(TrackingError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    nested = tmp_path / "parent"
    RunLog(nested / "digits").close()
    with pytest.raises(TrackingError, match="give one of its folders: digits"):
        read_run(nested)


def test_calls_in_the_wrong_order_are_errors(tmp_path):
    log = RunLog(tmp_path)
    with pytest.raises(StateError, match=r"Call write_start\(\) first"):
        log.write_values(1, {"loss": 1.0})
    log.write_start("p")
    log.close()
    log.close()
    with pytest.raises(StateError, match="has ended"):
        log.write_end()


def test_threads_share_a_log(log):
    def write(number):
        for step in range(50):
            log.write_event("checkpoint", step, thread=number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = read_run(log.folder)
    assert len(run.events) == 200
    assert run.damaged_lines == []


def test_names_of_every_type_are_restored(log):
    names = ["loss/träin", "a\nb", "\u2028", '"', "\udc80"]
    log.write_values(1, dict.fromkeys(names, 1.0))
    assert list(read_run(log.folder).values) == names


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_plain_values_are_strict_json(value):
    text = json.dumps(convert_to_json(value), allow_nan=False)
    assert json.loads(text) == convert_to_json(value)


def test_value_that_contains_itself_is_converted():
    loop = {}
    loop["loop"] = loop
    assert json.dumps(convert_to_json(loop))


def test_other_objects_are_shortened():
    class Large:
        def __repr__(self):
            return "x" * 60_000

        def size(self):
            return 1

    told = convert_to_json(
        {
            "method": Large().size,
            "function": convert_to_json,
            "built in": len,
            "object": Large(),
            "nested": [Large().size],
        }
    )
    assert told["method"].endswith("Large.size")
    assert told["nested"] == [told["method"]]
    assert told["function"] == "headway.core.tracking.runlog.convert_to_json"
    assert told["built in"] == "builtins.len"
    assert told["object"] == "x" * 200 + "..."


def test_log_that_its_process_reopens_is_one_attempt(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path)
        assert log.write_start("p") == log.attempt
        log.write_values(1, {"loss": 1.0})
        log.write_end({"num_updates": 1})
        log.close()
        again = RunLog(tmp_path)
        again.reopen()
        assert not read_run(tmp_path).is_ended
        again.write_values(1, {"eval_loss": 2.0})
        again.write_end({"num_updates": 1})
        again.close()
    run = read_run(tmp_path)
    assert [(start.attempt, start.is_after_end) for start in run.starts] == [(1, False), (2, True)]
    assert run.is_ended
    assert run.values["eval_loss"][-1][2] == 2.0
