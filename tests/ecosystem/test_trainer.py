"""transformers' Trainer, unchanged, on Accelerate and on Headway in its place: the same losses, metrics, weights and files."""

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
    """What a run is told."""

    arguments: dict = field(default_factory=dict)
    options: list = field(default_factory=list)
    num_processes: int = 1

    def line(self):
        return ["--arguments", json.dumps(self.arguments), *self.options]


def differences(sides: Sides) -> dict[str, float]:
    """What is not equal bit by bit."""
    return {name: found for name, found in sides.differences().items() if found}


def compared(one: list[Numbers], other: list[Numbers], without=()) -> dict[str, float]:
    """The same of two runs that noted as much under each name, but for some."""
    kept = [[{name: each[name] for name in each if name not in without} for each in side] for side in (one, other)]
    return differences(Sides(*kept))


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
def test_trains_alike(both, case):
    sides = both.run("trainer", *case.line(), world_size=case.num_processes)
    assert differences(sides) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_resumes_from_either_librarys_checkpoint(both, num_processes):
    arguments = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 3}
    line = Case(arguments, ["--save", "steps", "--evaluate"]).line()
    straight = both.run("trainer", *line, world_size=num_processes)
    assert differences(straight) == {}
    written = [both.latest(library, "trainer") / "out" / "checkpoint-3" for library in LIBRARIES]
    for checkpoint in written:  # in the second epoch on two processes, in the first on one
        resumed = both.run("trainer", *line, "--perturbed", "--resume", str(checkpoint), world_size=num_processes)
        assert differences(resumed) == {}
        # The mean loss of the run counts what was trained on here, and older checkpoints are not in this run's folder.
        other = ("train_loss", "log: train_loss", "checkpoints")
        assert compared(straight.accelerate, resumed.headway, other) == {}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_batch_size_is_found_where_memory_runs_out(both, num_processes):
    """On two processes it runs out on one of them only, which Accelerate's other one would wait for."""
    arguments = {"num_train_epochs": 1, "auto_find_batch_size": True}
    hungry = ["--hungry", str(num_processes - 1)]
    found = both.run_on("headway", "trainer", *Case(arguments, hungry).line(), world_size=num_processes)
    fitting = Case({**arguments, "per_device_train_batch_size": 2}).line()
    known = both.run_on("accelerate", "trainer", *fitting, world_size=num_processes)
    assert [each["batch size"][0] for each in found] == [2.0] * num_processes
    assert compared(known, found) == {}


@pytest.mark.parametrize("options", [[], ["--configured"]], ids=["of its own", "made before"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_transformers_reads_the_same_of_the_states(both, num_processes, options):
    assert differences(both.run("contracts", *options, world_size=num_processes)) == {}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_sharded_model_trains_alike_and_resumes(both, kind):
    """On CPUs Accelerate trains a replica where FSDP is asked for, and Headway shards."""
    arguments = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 2, "max_grad_norm": 0.0}
    sharded = {**arguments, "fsdp": True, "fsdp_config": {"state_dict_type": kind}}
    line = Case(sharded, ["--save", "steps", "--evaluate"]).line()
    sides = both.run("trainer", *line, world_size=2)
    assert all(each.pop("is sharded") == [0.0] for each in sides.accelerate)
    assert all(each.pop("is sharded") == [1.0] for each in sides.headway)
    assert max(sides.differences().values()) < 1e-6
    checkpoint = both.latest("headway", "trainer") / "out" / "checkpoint-2"
    resumed = both.run_on("headway", "trainer", *line, "--perturbed", "--resume", str(checkpoint), world_size=2)
    assert compared(sides.headway, resumed, ("train_loss", "log: train_loss", "checkpoints", "is sharded")) == {}


@pytest.mark.parametrize("options", [[], ["--adapter"]], ids=["all weights", "a PEFT adapter"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_files_are_read_by_either_library_on_another_number_of_processes(both, kind, options):
    line = ["--kind", kind, *options]
    made = both.run("sharded_files", *line, world_size=2)
    assert differences(made) == {}
    written = {library: both.latest(library, "sharded_files") / "saved" for library in LIBRARIES}
    for writer, reader in zip(LIBRARIES, reversed(LIBRARIES)):
        read = both.run_on(reader, "sharded_files", *line, "--read", str(written[writer]), world_size=3)
        assert compared(made.accelerate[:1], read[:1]) == {}
