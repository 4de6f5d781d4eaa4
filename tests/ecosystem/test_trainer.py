"""transformers' unchanged Trainer with Accelerate and with Headway: equal losses, metrics, weights and files."""

import json
from dataclasses import dataclass, field

import pytest

from tests.ecosystem.both import LIBRARIES, Both, Numbers, Sides

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("trainer"))


@dataclass
class Case:
    """Arguments and options of one run."""

    arguments: dict = field(default_factory=dict)
    options: list = field(default_factory=list)
    num_processes: int = 1

    def make_arguments(self):
        return ["--arguments", json.dumps(self.arguments), *self.options]


def find_differences(sides: Sides) -> dict[str, float]:
    """Return the differences that are not zero."""
    return {name: found for name, found in sides.differences().items() if found}


def compare(one: list[Numbers], other: list[Numbers], without=()) -> dict[str, float]:
    """Return the differences that are not zero between two runs, without those under the names in `without`."""
    kept = [[{name: each[name] for name in each if name not in without} for each in side] for side in (one, other)]
    return find_differences(Sides(*kept))


EPOCHS = {"num_train_epochs": 2}
LENGTHS = {"train_sampling_strategy": "group_by_length"}
UNSEEDED = {"accelerator_config": {"use_seedable_sampler": False}}
BEST = {
    "save_steps": 3,
    "eval_steps": 3,
    "eval_strategy": "steps",
    "load_best_model_at_end": True,
    "save_total_limit": 2,
}

CASES = {
    "a short last window, evaluation after each epoch, predict": Case(
        {**EPOCHS, "gradient_accumulation_steps": 3, "eval_strategy": "epoch"}, ["--evaluate"]
    ),
    "data_seed": Case({**EPOCHS, "data_seed": 11, "dataloader_drop_last": True}),
    "shuffled by the global generator": Case({**EPOCHS, **UNSEEDED}),
    "a collator that draws random numbers": Case(EPOCHS, ["--data", "corrupt"]),
    "batches of one length": Case({**EPOCHS, **LENGTHS}, ["--data", "lengths"]),
    "a stream": Case({"max_steps": 9, "gradient_accumulation_steps": 2}, ["--data", "stream"]),
    "bf16": Case({"num_train_epochs": 1, "bf16": True, "gradient_accumulation_steps": 2}, ["--evaluate"]),
    "gradient checkpointing": Case({"num_train_epochs": 1, "gradient_checkpointing": True}),
    "label smoothing": Case({"num_train_epochs": 1, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
    "the best model at the end": Case({**EPOCHS, **BEST}, ["--save", "steps"]),
    "2 processes": Case({**EPOCHS, "gradient_accumulation_steps": 3}, ["--evaluate"], 2),
    "2 processes, shuffled by a shared generator": Case({**EPOCHS, **UNSEEDED}, num_processes=2),
    "2 processes, bf16": Case({"num_train_epochs": 1, "bf16": True}, num_processes=2),
    "2 processes, batches of one length": Case(LENGTHS | {"num_train_epochs": 1}, ["--data", "lengths"], 2),
    "2 processes, batches that are split": Case(
        {"num_train_epochs": 1, "accelerator_config": {"split_batches": True}}, ["--evaluate"], 2
    ),
    "2 processes, workers that draw random numbers": Case(
        {"num_train_epochs": 2, "dataloader_num_workers": 2}, ["--data", "corrupt"], 2
    ),
    "2 processes, a stream": Case({"max_steps": 6}, ["--data", "stream"], 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trainer_trains_equally(both, case):
    sides = both.run("trainer", *case.make_arguments(), world_size=case.num_processes)
    assert find_differences(sides) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_trainer_resumes_from_either_librarys_checkpoint(both, num_processes):
    arguments = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 3}
    line = Case(arguments, ["--save", "steps", "--evaluate"]).make_arguments()
    straight = both.run("trainer", *line, world_size=num_processes)
    assert find_differences(straight) == {}
    written = [both.get_latest_folder(library, "trainer") / "out" / "checkpoint-3" for library in LIBRARIES]
    for checkpoint in written:  # in the second epoch with two processes, in the first with one
        resumed = both.run("trainer", *line, "--perturbed", "--resume", str(checkpoint), world_size=num_processes)
        assert find_differences(resumed) == {}
        # The mean loss covers only the resumed part, and older checkpoints are not in this run's folder.
        other = ("train_loss", "log: train_loss", "checkpoints")
        assert compare(straight.accelerate, resumed.headway, other) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_batch_size_is_reduced_if_memory_runs_out_on_one_process(both, num_processes):
    """Run out of memory on the last process only.

    With Accelerate, the other process would wait forever.
    """
    arguments = {"num_train_epochs": 1, "auto_find_batch_size": True}
    hungry = ["--hungry", str(num_processes - 1)]
    found = both.run_on("headway", "trainer", *Case(arguments, hungry).make_arguments(), world_size=num_processes)
    fitting = Case({**arguments, "per_device_train_batch_size": 2}).make_arguments()
    known = both.run_on("accelerate", "trainer", *fitting, world_size=num_processes)
    assert [each["batch size"][0] for each in found] == [2.0] * num_processes
    assert compare(known, found) == {}


@pytest.mark.parametrize("options", [[], ["--configured"]], ids=["of its own", "made before"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_transformers_reads_equal_states(both, num_processes, options):
    assert find_differences(both.run("contracts", *options, world_size=num_processes)) == {}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_model_trains_equally_and_resumes(both, kind):
    """Train with FSDP on CPUs, where Accelerate trains a replica and Headway shards."""
    arguments = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 2, "max_grad_norm": 0.0}
    sharded = {**arguments, "fsdp": True, "fsdp_config": {"state_dict_type": kind}}
    line = Case(sharded, ["--save", "steps", "--evaluate"]).make_arguments()
    sides = both.run("trainer", *line, world_size=2)
    assert all(each.pop("is sharded") == [0.0] for each in sides.accelerate)
    assert all(each.pop("is sharded") == [1.0] for each in sides.headway)
    assert max(sides.differences().values()) < 1e-6
    checkpoint = both.get_latest_folder("headway", "trainer") / "out" / "checkpoint-2"
    resumed = both.run_on("headway", "trainer", *line, "--perturbed", "--resume", str(checkpoint), world_size=2)
    assert compare(sides.headway, resumed, ("train_loss", "log: train_loss", "checkpoints", "is sharded")) == {}


@pytest.mark.parametrize("options", [[], ["--adapter"]], ids=["all weights", "a PEFT adapter"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_files_are_read_by_either_library_on_more_processes(both, kind, options):
    line = ["--kind", kind, *options]
    made = both.run("sharded_files", *line, world_size=2)
    assert find_differences(made) == {}
    written = {library: both.get_latest_folder(library, "sharded_files") / "saved" for library in LIBRARIES}
    for writer, reader in zip(LIBRARIES, reversed(LIBRARIES)):
        read = both.run_on(reader, "sharded_files", *line, "--read", str(written[writer]), world_size=3)
        assert compare(made.accelerate[:1], read[:1]) == {}
