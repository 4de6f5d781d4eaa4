"""Test the Accelerator's methods for tracking with trackers that the script defines."""

import argparse
import logging
import random
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from headway import GeneralTracker, on_main_process
from headway.core.tracking import guarded, run_logger
from headway.core.tracking.runlog_reader import read_run
from headway.errors import ConfigError, TrackingError
from tests.unit.core.tracking.own import OwnTracker, build_accelerator, list_events, prepare_training, train_batches


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# -------------------------------------------------------------------- logged values


def test_values_reach_the_log_and_every_tracker():
    one, two = OwnTracker(), OwnTracker()
    two.name = "two"
    accelerator = build_accelerator(one, two)
    accelerator.init_trackers("p", {"lr": numpy.float64(0.1), "layers": [1, 2]})
    accelerator.log(
        {"loss": torch.tensor(0.5), "eval": {"accuracy": numpy.float32(0.25)}}, log_kwargs={"two": {"group": "a"}}
    )
    accelerator.log({"note": "x"}, step=7)
    accelerator.log_event("evaluation", samples=3)
    accelerator.end_training()
    flat = {"loss": 0.5, "eval/accuracy": 0.25}
    assert one.list_calls("log") == [(flat, 0, {}), ({"note": "x"}, 7, {})]
    assert two.list_calls("log") == [(flat, 0, {"group": "a"}), ({"note": "x"}, 7, {})]
    assert one.list_calls("config") == [({"lr": 0.1, "layers": [1, 2]},)]
    ((run,),) = one.list_calls("begin")
    assert (run.project, run.folder, run.identity) == ("p", Path("run/p").absolute(), None)
    assert one.calls[-1] == ("finish",)
    read = read_run("run/p")
    assert read.config == {"lr": 0.1, "layers": [1, 2]}
    assert {name: [point[::2] for point in points] for name, points in read.values.items()} == {
        "loss": [(0, 0.5)], "eval/accuracy": [(0, 0.25)], "note": [(7, "x")],
    }  # fmt: skip
    assert read.starts[0].versions["torch"] == torch.__version__
    assert [(each.name, each.details) for each in read.events] == [("evaluation", {"samples": 3})]
    assert read.summary["num_updates"] == 0


def test_default_step_is_the_number_of_updates():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    objects = prepare_training(accelerator)
    accelerator.init_trackers("p")
    for _ in range(2):
        train_batches(accelerator, *objects, 2)
        accelerator.log({"loss": 1.0})
    assert [step for _, step, _ in own.list_calls("log")] == [2, 4]


def test_log_kwargs_that_repeat_an_argument_are_a_failure_of_the_tracker():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    Path("weights.bin").write_text("w")
    accelerator.log_artifact("weights.bin", log_kwargs={own.name: {"name": "again"}})
    accelerator.log({"loss": 1.0}, log_kwargs={own.name: {"values": {}}})
    assert [name for name, _ in list_events()] == ["tracker_failed"]


def test_images_whose_names_differ_in_replaced_characters_have_files_of_their_own():
    accelerator = build_accelerator()
    accelerator.init_trackers("p")
    accelerator.log_images(
        {"eval/x": numpy.full((2, 2), 0, "uint8"), "eval_x": numpy.full((2, 2), 255, "uint8")}, step=4
    )
    accelerator.log_images({"eval_x": numpy.full((2, 2), 7, "uint8"), "eval/x": numpy.full((2, 2), 8, "uint8")}, step=5)
    accelerator.end_training()
    media = read_run("run/p").media
    values = {(medium.name, medium.step): numpy.asarray(Image.open(medium.path))[0, 0] for medium in media}
    assert values == {("eval/x", 4): 0, ("eval_x", 4): 255, ("eval_x", 5): 7, ("eval/x", 5): 8}


def test_images_and_artifacts_are_written_into_the_folder():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator.log_images({"one": torch.rand(3, 5, 6), "two": numpy.zeros((2, 5, 6, 1))}, step=4)
    Path("weights.bin").write_text("w")
    accelerator.log_artifact("weights.bin")
    assert own.list_calls("images") == [({"one": [(5, 6, 3)], "two": [(5, 6, 1)] * 2}, 4)]
    assert own.list_calls("artifact") == [(Path("weights.bin").absolute(), "weights.bin", 0)]
    run = read_run("run/p")
    assert [(each.kind, each.name, each.step) for each in run.media] == [
        ("image", "one", 4), ("image", "two/0", 4), ("image", "two/1", 4), ("artifact", "weights.bin", 0),
    ]  # fmt: skip
    assert all(each.path.is_file() for each in run.media)
    with pytest.raises(TrackingError, match="no such file or folder"):
        accelerator.log_artifact("nowhere.bin")


def test_values_that_the_log_cannot_store_reach_trackers_and_never_end_the_run(caplog):
    class Row(OwnTracker):
        name = "row"

        def __init__(self, takes):
            super().__init__()
            self.takes, self.name = takes, takes

    several = [Row(takes) for takes in ("numbers", "objects", "given")]
    accelerator = build_accelerator(*several)
    accelerator.init_trackers("p")
    image, vector = object(), torch.ones(2)
    values = {"loss": torch.tensor(1.0), "image": image, "in": {"vector": vector}, "none": None}
    for step in (1, 2):
        accelerator.log(values, step=step)
    accelerator.log([1, 2])
    assert "log() takes a mapping of names and values; builtins.list is left out" in caplog.text
    numbers, objects, given = ([each[0] for each in tracker.list_calls("log")] for tracker in several)
    assert numbers == [{"loss": 1.0}] * 2
    assert objects == [{"loss": 1.0, "image": image, "in/vector": vector}] * 2
    assert given == [values] * 2
    accelerator.log({"image": image}, step=3)  # no value for trackers of numbers
    assert [len(tracker.list_calls("log")) for tracker in several] == [2, 3, 3]
    accelerator.end_training()
    read = read_run("run/p")
    assert set(read.values) == {"loss"}
    kinds = {"image": "builtins.object", "in/vector": "a tensor of shape (2,) and type torch.float32"}
    assert [(each.name, each.step, each.details) for each in read.events] == [("objects", 1, {"kinds": kinds})]


def test_without_trackers_any_value_can_be_logged():
    accelerator = build_accelerator(folder=None)
    for values in ({"loss": [1.0]}, {"loss": torch.zeros(4)}, 3, None):
        accelerator.log(values)  # raises nothing, as a script's logging must also work while tracking is off


@dataclass
class Config:
    lr: float = 0.1


@dataclass(slots=True)
class SlottedConfig:
    lr: float = 0.1


@pytest.mark.parametrize(
    "config",
    [argparse.Namespace(lr=0.1), {"lr": 0.1}, None, Config(), SlottedConfig()],
    ids=["namespace", "mapping", "none", "dataclass", "dataclass with slots"],
)
def test_configurations_of_every_type_are_logged(config):
    accelerator = build_accelerator()
    accelerator.init_trackers("p", config)
    assert read_run("run/p").config == ({} if config is None else {"lr": 0.1})


@pytest.mark.parametrize("name", ["", "/tmp/p", "a/../b"])
def test_name_that_is_not_a_folder_is_refused(name):
    with pytest.raises(ConfigError, match="project_name="):
        build_accelerator().init_trackers(name)


def test_invalid_config_is_refused():
    with pytest.raises(ConfigError, match="config=3"):
        build_accelerator().init_trackers("p", 3)


def test_log_file_of_another_program_is_an_error():
    Path("run/p").mkdir(parents=True)
    Path("run/p/log.jsonl").write_text("mine\n")
    with pytest.raises(TrackingError, match="is not a run log of Headway's"):
        build_accelerator().init_trackers("p")


def test_log_before_init_trackers_causes_a_warning(caplog):
    build_accelerator(OwnTracker()).log({"loss": 1.0})
    assert "log() has no effect before accelerator.init_trackers" in caplog.text


# -------------------------------------------------------------------- get_tracker


def test_get_tracker_and_trackers():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    assert not accelerator.get_tracker("own")  # no run yet
    accelerator.init_trackers("p")
    assert accelerator.get_tracker("own") is own
    assert accelerator.get_tracker("own", unwrap=True) is own
    assert accelerator.trackers == [own]
    with pytest.raises(ConfigError, match=r"get_tracker\('wandb'\): log_with has own"):
        accelerator.get_tracker("wandb")


def test_missing_tracker_is_replaced_by_a_blank_one():
    accelerator = build_accelerator(OwnTracker(fails=["begin"]))
    accelerator.init_trackers("p")
    blank = accelerator.get_tracker("own", unwrap=True)
    assert not blank
    assert not blank.run.log({"a": 1}).anything
    assert accelerator.trackers == []


def test_subclass_of_accelerates_general_tracker_is_used():
    class Theirs(GeneralTracker):
        name = "theirs"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.description = []

        @property
        def tracker(self):
            return self.description

        @on_main_process
        def store_init_configuration(self, values):
            self.description.append(values)

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.description.append((values, step))

    accelerator = build_accelerator(Theirs(), folder=None)
    accelerator.init_trackers("p", {"a": 1})
    accelerator.log({"loss": 1.0}, step=1)
    assert accelerator.get_tracker("theirs", unwrap=True) == [{"a": 1}, ({"loss": 1.0}, 1)]
    accelerator.end_training()


# -------------------------------------------------------------------- trackers that fail


def test_failing_tracker_is_named_once_and_dropped_after_three_failures(caplog):
    bad, good = OwnTracker(fails=["log"]), OwnTracker()
    good.name = "good"
    accelerator = build_accelerator(bad, good)
    accelerator.init_trackers("p")
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            accelerator.log({"loss": 1.0}, step=step)
    messages = [record.message.partition(" (")[0] for record in caplog.records]
    assert messages == [
        "the tracker own failed: ValueError: the server is gone in log(); training continues",
        "the tracker own is used no more: ValueError: the server is gone in log(); training continues",
    ]
    assert len(good.list_calls("log")) == 6
    assert accelerator.trackers == [good]
    assert list_events() == [("tracker_failed", 0), ("tracker_dropped", 0)]
    accelerator.end_training()
    assert ("finish",) not in bad.calls
    assert len(read_run("run/p").values["loss"]) == 6


def test_failures_between_successes_do_not_drop_a_tracker():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    for step in range(12):
        own.fails = {"log"} if step % 3 else set()
        accelerator.log({"loss": 1.0}, step=step)
    assert accelerator.trackers == [own]
    assert len(own.list_calls("log")) == 4


def test_tracker_that_cannot_begin_or_be_built_is_dropped_at_once(caplog, monkeypatch):
    monkeypatch.setattr("headway.core.tracking.local.TensorBoardAdapter.__init__", lambda self: 1 / 0)
    accelerator = build_accelerator("tensorboard", OwnTracker(fails=["begin"]))
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert "the tracker tensorboard is used no more: ZeroDivisionError" in caplog.text
    assert "the tracker own is used no more: ValueError: the server is gone in begin()" in caplog.text


def test_tracker_whose_identity_cannot_be_read_is_used(caplog):
    class Anonymous(OwnTracker):
        @property
        def identity(self):
            raise ValueError("the server is gone")

    own = Anonymous()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    assert "the tracker own failed: ValueError: the server is gone in identity()" in caplog.text
    assert len(own.list_calls("log")) == 1
    accelerator.end_training()


def test_tracker_with_an_unknown_kind_of_values_is_dropped(caplog):
    own = OwnTracker()
    own.takes = "number"
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert "takes='number'; allowed: 'numbers', 'objects', 'given'" in caplog.text
    assert own.calls == []


def test_log_kwargs_can_have_any_name():
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"own": {"step": 7, "method": "a", "is_fatal": True}})
    assert own.list_calls("log") == [({"loss": 1.0}, 7, {"method": "a", "is_fatal": True})]
    accelerator.end_training()


def test_details_of_an_event_can_have_any_name():
    accelerator = build_accelerator()
    accelerator.init_trackers("p")
    accelerator.log_event("evaluation", line=3, kind="x", event="y", details=1, args=2)
    accelerator.end_training()
    (event,) = read_run("run/p").events
    assert event.details == {"line": 3, "kind": "x", "event": "y", "details": 1, "args": 2}


def test_slow_tracker_is_reported_and_the_log_ends_first(caplog, monkeypatch):
    monkeypatch.setattr(run_logger, "SLOW_FINISH_SECONDS", 0.01)
    monkeypatch.setattr(guarded, "SLOW_CALL_SECONDS", -1.0)

    class Slow(OwnTracker):
        def finish(self):
            assert read_run("run/p").is_ended
            for _ in range(6000):
                if "the tracker own is still finishing" in caplog.text:
                    return super().finish()
                threading_wait(0.01)
            return None

    from time import sleep as threading_wait

    slow, after = Slow(), OwnTracker()
    after.name = "after"
    accelerator = build_accelerator(slow, after)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert "the tracker own is slow: training waits for it in log()" in caplog.text
    assert slow.calls[-1] == after.calls[-1] == ("finish",)


def test_unwritable_log_does_not_stop_the_run(caplog):
    Path("run").write_text("a file where the folder should be")
    own = OwnTracker()
    accelerator = build_accelerator(own)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert "there is no log of this run" in caplog.text
    assert len(own.list_calls("log")) == 1


def test_full_disk_is_reported_once(caplog, monkeypatch):
    accelerator = build_accelerator()
    accelerator.init_trackers("p")

    def raise_disk_full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headway.core.tracking.runlog.RunLog._write_entry", raise_disk_full)
        accelerator.log({"loss": 1.0})
        accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0}, step=1)
    assert caplog.text.count("is not complete") == 1
    assert [point[2] for point in read_run("run/p").values["loss"]] == [2.0]


def test_trackers_keep_the_rng_states_at_start_and_end():
    class Drawing(OwnTracker):
        def record_call(self, *call):
            if call[0] != "log":
                random.random(), numpy.random.random(), torch.rand(1)
            super().record_call(*call)

    def read_states():
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    accelerator = build_accelerator(Drawing())
    before = read_states()
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0})
    accelerator.end_trackers()
    assert read_states() == before


def test_none_values_are_left_out(tmp_path):
    placed = build_accelerator(folder=tmp_path)
    placed.init_trackers("run")
    placed.log({"loss": None}, step=1)
    placed.log({"loss": torch.tensor(2.0), "lr": None, "norm": numpy.float64(0.5)}, step=2)
    placed.end_trackers()
    run = read_run(tmp_path / "run")
    assert {name: [point[::2] for point in points] for name, points in run.values.items()} == {
        "loss": [(2, 2.0)], "norm": [(2, 0.5)],
    }  # fmt: skip


def test_arguments_for_unknown_trackers_cause_one_warning(caplog):
    tracker = OwnTracker()
    accelerator = build_accelerator(tracker)
    accelerator.init_trackers("p", init_kwargs={"own": {}, "wandb": {"tags": ["a"]}, "tensorbord": {}, "entity": "me"})
    for _ in range(2):
        accelerator.log({"loss": 1.0}, log_kwargs={"own": {}, "mlflow": {}, "onw": {"group": "a"}})
    accelerator.log_images({"a": torch.zeros(2, 2)}, log_kwargs={"comet": {}})
    accelerator.end_training()
    warnings = [
        record.getMessage() for record in caplog.records if "is not the name of a tracker" in record.getMessage()
    ]
    assert len(warnings) == 4
    assert "init_kwargs has no effect for 'tensorbord'" in warnings[0]
    assert "did you mean 'tensorboard'?" in warnings[0]
    assert "init_kwargs has no effect for 'entity'" in warnings[1]
    assert "log_kwargs has no effect for 'onw'" in warnings[2]
    assert "did you mean 'comet_ml'?" in warnings[3]


def test_fraction_of_a_step_causes_one_warning(caplog):
    accelerator = build_accelerator(OwnTracker())
    accelerator.init_trackers("p")
    for step in (1.0, torch.tensor(2), numpy.int64(3), 4.5, 5.5):
        accelerator.log({"loss": 1.0}, step=step)
    assert len([record for record in caplog.records if "step that is not a whole number" in record.getMessage()]) == 1
    accelerator.end_training()
