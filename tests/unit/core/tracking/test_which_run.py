"""Which run a restarted script continues, in the log and in trackers."""

import pytest
import torch

from headway import Accelerator
from headway.core.runtime.events import notify_listeners
from headway.core.tracking.runlog_reader import read_run
from tests.unit.core.tracking.own import Own, build, events, trained, update


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_resume_continues_the_same_run():
    first = Own(identity={})
    accelerator = build(first, automatic=True)
    objects = trained(accelerator)
    accelerator.init_trackers("p")
    for _ in range(3):
        update(accelerator, *objects, 1)
        accelerator.log({"loss": float(accelerator.num_updates)})
        if accelerator.num_updates == 2:
            accelerator.save_state()
    # killed here
    second = Own(identity={})
    accelerator = build(second, automatic=True)
    objects = trained(accelerator)
    accelerator.init_trackers("p")
    accelerator.load_state()
    update(accelerator, *objects, 1)
    accelerator.log({"loss": 30.0})
    accelerator.end_trackers()
    assert second.own == first.own
    assert second.of("rewind") == [(2,)]
    assert [point[::2] for point in read_run("run/p").values["loss"]] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [name for name, _ in events()] == ["tracker", "checkpoint", "restart", "resumed"]
    (resumed,) = [each for each in read_run("run/p").events if each.name == "resumed"]
    assert resumed.step == 2
    assert resumed.details["folder"].endswith("checkpoint_0")
    assert ("flush",) in first.calls  # what the checkpoint stands for is not lost with the process


def test_values_that_a_tracker_buffered_at_the_kill_are_logged_again():
    accelerator = build(Own(identity={}), automatic=True)
    objects = trained(accelerator)
    accelerator.init_trackers("p")
    for _ in range(3):
        update(accelerator, *objects, 1)
        accelerator.log({"loss": float(accelerator.num_updates), "rate": 0.1})
        if accelerator.num_updates == 2:
            accelerator.save_state()
    slow, quick = Own(identity={}), Own(identity={})
    slow.holds_back, quick.name = 1e6, "quick"
    accelerator = build(slow, quick, automatic=True)
    trained(accelerator)
    accelerator.init_trackers("p")
    accelerator.load_state()
    assert slow.of("log") == [({"loss": 1.0, "rate": 0.1}, 1, {}), ({"loss": 2.0, "rate": 0.1}, 2, {})]
    assert quick.of("log") == []
    assert [point[0] for point in read_run("run/p").values["loss"]] == [1, 2]


def test_memory_that_runs_out_is_an_event():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, microbatching="auto", project_dir="run")
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.init_trackers("p")

    def loss_of(piece):
        if len(piece) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return model(piece).square().mean()

    accelerator.forward_backward(torch.randn(4, 3), loss_of)
    optimizer.step()
    (event,) = read_run("run/p").events
    assert (event.name, event.details) == ("out_of_memory", {"ranks": [0], "rows": 4, "pieces": 2})


def test_a_resume_before_the_run_begins_counts_as_well():
    accelerator = build(automatic=True)
    objects = trained(accelerator)
    update(accelerator, *objects, 2)
    accelerator.save_state()
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    own = Own(identity={})
    accelerator = build(own, automatic=True)
    trained(accelerator)
    accelerator.resume()
    accelerator.init_trackers("p")
    assert ("resumed", 2) in events()
    assert own.of("rewind") == [(2,)]


def test_a_run_that_ended_and_is_resumed_is_opened_again():
    first = Own(identity={})
    accelerator = build(first)
    objects = trained(accelerator)
    accelerator.init_trackers("p")
    update(accelerator, *objects, 1)
    accelerator.log({"loss": 1.0})
    accelerator.save_state("kept")
    accelerator.end_trackers()
    second = Own(identity={})
    accelerator = build(second)
    trained(accelerator)
    accelerator.init_trackers("p")
    assert second.own != first.own or len(second.of("begin")) == 1
    accelerator.load_state("kept")
    assert [run.identity for (run,) in second.of("begin")] == [None, first.own]
    assert second.own == first.own


def test_a_run_from_the_start_in_the_same_folder_is_another_run():
    first = Own(identity={})
    accelerator = build(first)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0}, step=10)
    # killed here; nothing tells that the next will not go on
    second = Own(identity={})
    accelerator = build(second)
    accelerator.init_trackers("p")
    assert second.of("begin")[0][0].identity == first.own
    accelerator.log({"loss": 2.0}, step=10)
    assert [run.identity for (run,) in second.of("begin")] == [first.own, None]
    assert second.of("rewind") == [(-1,)]
    assert [point[::2] for point in read_run("run/p").values["loss"]] == [(10, 2.0)]


def test_a_script_that_resumes_by_itself_continues_the_run():
    for steps in ([10, 20, 30], [21, 31]):
        own = Own(identity={})
        accelerator = build(own)
        accelerator.init_trackers("p")
        for step in steps:
            accelerator.log({"loss": 1.0}, step=step)
    assert len(own.of("begin")) == 1
    assert [point[0] for point in read_run("run/p").values["loss"]] == [10, 20, 21, 31]


def test_steps_that_the_script_counts_itself_are_kept_in_checkpoints():
    def start():
        accelerator = build(automatic=True)
        objects = trained(accelerator)
        accelerator.init_trackers("p")
        return accelerator, objects

    accelerator, objects = start()
    for _ in range(3):  # in samples: 2 a batch
        update(accelerator, *objects, 1)
        accelerator.log({"loss": 1.0}, step=200 * accelerator.num_updates)
        if accelerator.num_updates == 2:
            accelerator.save_state()
    accelerator, objects = start()
    accelerator.resume()
    assert ("resumed", 400) in events()
    assert [point[0] for point in read_run("run/p").values["loss"]] == [200, 400]


def test_the_events_of_other_accelerators_stay_theirs():
    student, teacher = build(), build(folder="other")
    objects = trained(teacher)
    student.init_trackers("p")
    update(teacher, *objects, 2)
    teacher.save_state("kept")
    teacher.load_state("kept")
    assert events() == []  # neither its checkpoint nor its resume
    notify_listeners("out_of_memory", rows=4)
    assert ("out_of_memory", 0) in events()


def test_a_run_under_way_ends_when_another_begins():
    own = Own()
    accelerator = build(own)
    accelerator.init_trackers("a")
    accelerator.log({"loss": 1.0})
    accelerator.init_trackers("b/c")
    accelerator.end_trackers({"accuracy": torch.tensor(0.5)})
    accelerator.end_trackers()
    assert [name for name, *_ in own.calls] == ["begin", "config", "log", "finish", "begin", "config", "finish"]
    assert read_run("run/a").is_ended
    assert read_run("run/b/c").summary["accuracy"] == 0.5


@pytest.mark.parametrize("reason", [None, "rank 1 of 2 failed first (ended by SIGKILL)"])
def test_a_restart_by_the_launcher_is_logged(monkeypatch, reason):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    if reason is not None:
        monkeypatch.setenv("HEADWAY_RESTART_REASON", reason)
    build().init_trackers("p")
    (event,) = read_run("run/p").events
    about = {} if reason is None else {"reason": reason}
    assert (event.name, event.details) == ("restart", about | {"restart_count": 2})


def test_what_is_not_finished_is_flushed(monkeypatch):
    own = Own()
    accelerator = build(own)
    accelerator.init_trackers("p")
    accelerator._recorder._at_exit()
    assert own.calls[-1] == ("flush",)
    accelerator.end_trackers()
    assert not accelerator._recorder._at_exit.alive
