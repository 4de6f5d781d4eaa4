"""Test which run a restarted script continues, in the log and in trackers."""

import pytest
import torch

from headway import Accelerator
from headway.core.runtime.events import notify_listeners
from headway.core.tracking.runlog_reader import read_run
from tests.unit.core.tracking.own import OwnTracker, build_accelerator, list_events, prepare_training, train_batches


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_resume_continues_the_same_run():
    first = OwnTracker(identity={})
    accelerator = build_accelerator(first, automatic=True)
    objects = prepare_training(accelerator)
    accelerator.init_trackers("p")
    for _ in range(3):
        train_batches(accelerator, *objects, 1)
        accelerator.log({"loss": float(accelerator.num_updates)})
        if accelerator.num_updates == 2:
            accelerator.save_state()
    # killed here
    second = OwnTracker(identity={})
    accelerator = build_accelerator(second, automatic=True)
    objects = prepare_training(accelerator)
    accelerator.init_trackers("p")
    accelerator.load_state()
    train_batches(accelerator, *objects, 1)
    accelerator.log({"loss": 30.0})
    accelerator.end_trackers()
    assert second.own == first.own
    assert second.list_calls("rewind") == [(2,)]
    assert [point[::2] for point in read_run("run/p").values["loss"]] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [name for name, _ in list_events()] == ["tracker", "checkpoint", "restart", "resumed"]
    (resumed,) = [each for each in read_run("run/p").events if each.name == "resumed"]
    assert resumed.step == 2
    assert resumed.details["folder"].endswith("checkpoint_0")
    assert ("flush",) in first.calls  # values up to the checkpoint are not lost with the process


def test_values_that_a_tracker_buffered_at_the_kill_are_logged_again():
    accelerator = build_accelerator(OwnTracker(identity={}), automatic=True)
    objects = prepare_training(accelerator)
    accelerator.init_trackers("p")
    for _ in range(3):
        train_batches(accelerator, *objects, 1)
        accelerator.log({"loss": float(accelerator.num_updates), "rate": 0.1})
        if accelerator.num_updates == 2:
            accelerator.save_state()
    slow, quick = OwnTracker(identity={}), OwnTracker(identity={})
    slow.holds_back, quick.name = 1e6, "quick"
    accelerator = build_accelerator(slow, quick, automatic=True)
    prepare_training(accelerator)
    accelerator.init_trackers("p")
    accelerator.load_state()
    assert slow.list_calls("log") == [({"loss": 1.0, "rate": 0.1}, 1, {}), ({"loss": 2.0, "rate": 0.1}, 2, {})]
    assert quick.list_calls("log") == []
    assert [point[0] for point in read_run("run/p").values["loss"]] == [1, 2]


def test_out_of_memory_error_is_an_event():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, microbatching="auto", project_dir="run")
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.init_trackers("p")

    def compute_loss(piece):
        if len(piece) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return model(piece).square().mean()

    accelerator.forward_backward(torch.randn(4, 3), compute_loss)
    optimizer.step()
    (event,) = read_run("run/p").events
    assert (event.name, event.details) == ("out_of_memory", {"ranks": [0], "rows": 4, "pieces": 2})


def test_resume_before_init_trackers_counts():
    accelerator = build_accelerator(automatic=True)
    objects = prepare_training(accelerator)
    train_batches(accelerator, *objects, 2)
    accelerator.save_state()
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    own = OwnTracker(identity={})
    accelerator = build_accelerator(own, automatic=True)
    prepare_training(accelerator)
    accelerator.resume()
    accelerator.init_trackers("p")
    assert ("resumed", 2) in list_events()
    assert own.list_calls("rewind") == [(2,)]


def test_finished_run_that_is_resumed_is_reopened():
    first = OwnTracker(identity={})
    accelerator = build_accelerator(first)
    objects = prepare_training(accelerator)
    accelerator.init_trackers("p")
    train_batches(accelerator, *objects, 1)
    accelerator.log({"loss": 1.0})
    accelerator.save_state("kept")
    accelerator.end_trackers()
    second = OwnTracker(identity={})
    accelerator = build_accelerator(second)
    prepare_training(accelerator)
    accelerator.init_trackers("p")
    assert second.own != first.own or len(second.list_calls("begin")) == 1
    accelerator.load_state("kept")
    assert [run.identity for (run,) in second.list_calls("begin")] == [None, first.own]
    assert second.own == first.own


def test_run_from_the_start_in_the_same_folder_is_a_new_run():
    first = OwnTracker(identity={})
    accelerator = build_accelerator(first)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0}, step=10)
    # killed here; the next process could continue the run
    second = OwnTracker(identity={})
    accelerator = build_accelerator(second)
    accelerator.init_trackers("p")
    assert second.list_calls("begin")[0][0].identity == first.own
    accelerator.log({"loss": 2.0}, step=10)
    assert [run.identity for (run,) in second.list_calls("begin")] == [first.own, None]
    assert second.list_calls("rewind") == [(-1,)]
    assert [point[::2] for point in read_run("run/p").values["loss"]] == [(10, 2.0)]


def test_script_that_resumes_by_itself_continues_the_run():
    for steps in ([10, 20, 30], [21, 31]):
        own = OwnTracker(identity={})
        accelerator = build_accelerator(own)
        accelerator.init_trackers("p")
        for step in steps:
            accelerator.log({"loss": 1.0}, step=step)
    assert len(own.list_calls("begin")) == 1
    assert [point[0] for point in read_run("run/p").values["loss"]] == [10, 20, 21, 31]


def test_steps_counted_by_the_script_are_kept_in_checkpoints():
    def start():
        accelerator = build_accelerator(automatic=True)
        objects = prepare_training(accelerator)
        accelerator.init_trackers("p")
        return accelerator, objects

    accelerator, objects = start()
    for _ in range(3):  # steps counted in samples, 200 for each update
        train_batches(accelerator, *objects, 1)
        accelerator.log({"loss": 1.0}, step=200 * accelerator.num_updates)
        if accelerator.num_updates == 2:
            accelerator.save_state()
    accelerator, objects = start()
    accelerator.resume()
    assert ("resumed", 400) in list_events()
    assert [point[0] for point in read_run("run/p").values["loss"]] == [200, 400]


def test_events_of_other_accelerators_are_not_logged():
    student, teacher = build_accelerator(), build_accelerator(folder="other")
    objects = prepare_training(teacher)
    student.init_trackers("p")
    train_batches(teacher, *objects, 2)
    teacher.save_state("kept")
    teacher.load_state("kept")
    assert list_events() == []  # neither the checkpoint nor the resume of the teacher
    notify_listeners("out_of_memory", rows=4)
    assert ("out_of_memory", 0) in list_events()


def test_starting_a_run_ends_the_current_one():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("a")
    accelerator.log({"loss": 1.0})
    accelerator.init_trackers("b/c")
    accelerator.end_trackers({"accuracy": torch.tensor(0.5)})
    accelerator.end_trackers()
    assert [name for name, *_ in own.calls] == ["begin", "config", "log", "finish", "begin", "config", "finish"]
    assert read_run("run/a").is_ended
    assert read_run("run/b/c").summary["accuracy"] == 0.5


@pytest.mark.parametrize("reason", [None, "rank 1 of 2 failed first (ended by SIGKILL)"])
def test_restart_by_the_launcher_is_logged(monkeypatch, reason):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    if reason is not None:
        monkeypatch.setenv("HEADWAY_RESTART_REASON", reason)
    build_accelerator().init_trackers("p")
    (event,) = read_run("run/p").events
    about = {} if reason is None else {"reason": reason}
    assert (event.name, event.details) == ("restart", about | {"restart_count": 2})


def test_unfinished_run_is_flushed_at_exit(monkeypatch):
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator._recorder._exit_finalizer()
    assert own.calls[-1] == ("flush",)
    accelerator.end_trackers()
    assert not accelerator._recorder._exit_finalizer.alive
