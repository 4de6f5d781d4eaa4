"""`save_state` under `if accelerator.is_main_process:`, as in public scripts: rank 0 writes, no rank waits, and all can resume."""

import logging
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.runtime import process
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.control_plane.control import current
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import launch

ALONE = (
    "saved on rank 0 alone, so others' RNG states are derived from (seed, update, rank)"
)  # fmt: skip


class Training:
    """Training on two ranks of a model with dropout. Calls the test's code after each update."""

    def __init__(self, output_dir=None, **project):
        set_seed(5)
        config = ProjectConfiguration(output_dir, automatic_checkpoint_naming=True, **project) if project else None
        self.accelerator = accelerator = Accelerator(cpu=True, project_config=config)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3, shuffle=True)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 0.01), loader
        )
        self.losses = []

    def train(self, num_updates, after_update=lambda training, step: None):
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            after_update(self, self.accelerator.num_updates)
            if self.accelerator.num_updates >= num_updates:
                break
        return self

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


# -------------------------------------------------------------------- saving code of public scripts


def make_path(args, step):
    return os.path.join(args.output_dir, f"checkpoint-{step}")


def diffusers(args, accelerator, step):
    if accelerator.sync_gradients:
        if accelerator.is_main_process:
            if step % args.checkpointing_steps == 0:
                save_path = os.path.join(args.output_dir, f"checkpoint-{step}")
                accelerator.save_state(save_path)


def diffusers_with_rotation(args, accelerator, step):
    if accelerator.is_main_process:
        if step % args.checkpointing_steps == 0:
            if args.checkpoints_total_limit is not None and os.path.isdir(args.output_dir):
                checkpoints = os.listdir(args.output_dir)
                checkpoints = [d for d in checkpoints if d.startswith("checkpoint")]
                checkpoints = sorted(checkpoints, key=lambda x: int(x.split("-")[1]))
                if len(checkpoints) >= args.checkpoints_total_limit:
                    num_to_remove = len(checkpoints) - args.checkpoints_total_limit + 1
                    for removing in checkpoints[0:num_to_remove]:
                        shutil.rmtree(os.path.join(args.output_dir, removing))
            accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{step}"))


def deepspeed_or_main(args, accelerator, step):
    distributed_type = "MULTI_CPU"
    if accelerator.is_main_process or distributed_type == "DEEPSPEED":
        if step % args.checkpointing_steps == 0:
            accelerator.save_state(make_path(args, step))


def condition_in_one(args, accelerator, step):
    if step % args.checkpointing_steps == 0 and accelerator.is_main_process:
        accelerator.save_state(output_dir=make_path(args, step))


def local_main(args, accelerator, step):
    if accelerator.is_local_main_process and step % args.checkpointing_steps == 0:
        accelerator.save_state(make_path(args, step), safe_serialization=False)


def process_index(args, accelerator, step):
    if step % args.checkpointing_steps == 0:
        if accelerator.process_index == 0:
            accelerator.save_state(make_path(args, step))


def guard_clause(args, accelerator, step):
    if not accelerator.is_main_process or step % args.checkpointing_steps != 0:
        return
    os.makedirs(args.output_dir, exist_ok=True)
    accelerator.save_state(make_path(args, step))


def helper_save(accelerator, path):
    logging.info("saving %s", path)
    accelerator.save_state(path)


def helper(args, accelerator, step):
    if accelerator.is_main_process:
        if step % args.checkpointing_steps == 0:
            helper_save(accelerator, make_path(args, step))


def decorated(args, accelerator, step):
    @accelerator.on_main_process
    def save():
        accelerator.save_state(make_path(args, step))

    if step % args.checkpointing_steps == 0:
        save()


def alias(args, accelerator, step):
    is_master = accelerator.is_main_process
    if is_master and step % args.checkpointing_steps == 0:
        accelerator.save_state(make_path(args, step))


def plain_rank(args, accelerator, step):
    if dist.get_rank() == 0 and step % args.checkpointing_steps == 0:
        accelerator.save_state(make_path(args, step))


def behind_the_loop(args, accelerator, step):
    if accelerator.is_main_process and step % args.checkpointing_steps == 0:
        accelerator.save_state(make_path(args, step), blocking=False)


FORMS = (diffusers, diffusers_with_rotation, deepspeed_or_main, condition_in_one, local_main, process_index, guard_clause,
         helper, decorated, alias, plain_rank, behind_the_loop)  # fmt: skip


def check_form(root, save):
    """Train, save, continue, and load on all ranks. Return the results."""
    args = SimpleNamespace(output_dir=f"{root}/{save.__name__}", checkpointing_steps=2, checkpoints_total_limit=1)
    kept = {}

    def after_update(training, step):
        save(args, training.accelerator, step)
        kept[step] = training.weights()

    first = Training().train(5, after_update)
    first.accelerator.wait_for_save()
    path = Path(args.output_dir, "checkpoint-4")
    first.accelerator.wait_for_everyone()
    manifest = verify_checkpoint(path)
    again = Training()
    restored = again.accelerator.load_state(path)
    same_weights = torch.equal(again.weights(), kept[4])
    again.train(5)
    try:
        Training().accelerator.load_state(path, strict=True)
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    names = sorted(each.name for each in Path(args.output_dir).iterdir())
    return {
        "names": names, "saved_by": manifest.about["saved_by"], "same weights": same_weights, "refused": refused,
        "differences": restored.differences, "updates": restored.about["num_updates"],
        "next loss": (first.losses[-1], again.losses[-1]),
    }  # fmt: skip


def check_all_forms(root):
    return {save.__name__: check_form(root, save) for save in FORMS}


def load_on_one(root):
    training = Training()
    restored = training.accelerator.load_state(f"{root}/diffusers/checkpoint-4")
    training.train(6)
    return restored.differences, training.accelerator.num_updates, training.losses


def test_saving_code_of_public_scripts_saves_once_and_resumes_exactly(tmp_path):
    both = run_ranks(check_all_forms, 2, str(tmp_path), timeout=240)
    for name in both[0]:
        for rank, found in enumerate(each[name] for each in both):
            where = name, rank
            assert found["saved_by"] == [0], where
            assert found["same weights"], where
            assert found["updates"] == 4, where
            assert found["differences"] == [ALONE], where
            assert ALONE in found["refused"], where
            kept = (
                ["checkpoint-4", "latest"]
                if name == "diffusers_with_rotation"
                else ["checkpoint-2", "checkpoint-4", "latest"]
            )
            assert found["names"] == kept, where
        straight, resumed = both[0][name][
            "next loss"
        ]  # rank 0 has its own RNG state, so its dropout masks are the same
        assert straight == resumed, name
    differences, updates, losses = run_ranks(load_on_one, 1, str(tmp_path))[0]
    assert differences[0].startswith("world size 2 -> 1; RNG states are derived from")
    assert "accumulation 1 -> 2 to keep the global batch of 6" in differences
    assert updates == 6
    assert all(loss == loss for loss in losses)


# -------------------------------------------------------------------- numbers, rotation, hooks, later saves of all ranks


def save_numbered(root):
    results = {}
    training = Training(f"{root}/run", total_limit=2)
    accelerator, parent = training.accelerator, Path(root, "run", "checkpoints")
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: Path(folder, "mine").write_text("ema"))
    with_warnings = CapturedWarnings()
    sequence = accelerator.collectives.ledger.sequence
    for _ in range(2):
        if accelerator.is_main_process:
            accelerator.save_state()
    results["collectives"] = accelerator.collectives.ledger.sequence - sequence
    accelerator.wait_for_everyone()
    results["all ranks"] = accelerator.save_state().name
    training.train(2)
    all_behind = accelerator.save_state(blocking=False).name
    if accelerator.is_main_process:  # the save of all ranks is still being written
        accelerator.save_state(blocking=False)
    training.train(4)
    results["behind"] = all_behind, accelerator.save_state(blocking=False).name
    accelerator.wait_for_save()
    accelerator.wait_for_everyone()
    results["names"] = sorted(path.name for path in parent.iterdir())
    if accelerator.is_main_process:
        results["hook"] = (accelerator.save_state() / "mine").read_text()
    accelerator.wait_for_everyone()
    results["warnings"] = list(with_warnings.texts)

    again = Training(f"{root}/run", total_limit=2)
    restored = again.accelerator.resume("latest")
    results["resumed"] = restored.folder.name, restored.differences, again.accelerator.save_iteration
    if again.accelerator.is_main_process:
        again.accelerator.save_state()
    again.accelerator.wait_for_everyone()
    results["then"] = again.accelerator.save_state().name
    results["whole"] = read_manifest(parent / results["then"]).about.get("saved_by")
    return results


class CapturedWarnings(logging.Handler):
    """Collects warnings about saves."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("headway.core.checkpoint.resume.save_and_resume").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_numbers_rotation_and_hooks_of_saves_on_one_rank(tmp_path):
    first, second = run_ranks(save_numbered, 2, str(tmp_path))
    assert first["collectives"] == second["collectives"] == 0
    assert first["hook"] == "ema"
    for results in (first, second):
        assert results["all ranks"] == "checkpoint_2"
        assert results["behind"] == ("checkpoint_3", "checkpoint_5")
        assert results["names"] == ["checkpoint_4", "checkpoint_5", "latest"]
        assert results["resumed"] == ("checkpoint_6", [ALONE], 7)
        assert results["then"] == "checkpoint_8"
        assert results["whole"] is None
    (text,) = first["warnings"]
    assert second["warnings"] == []
    assert "is called at" in text
    assert "test_saves_of_one_rank.py:" in text.partition(" on rank 0 only: rank 1 has continued to ")[2]
    assert "RNG states of the other ranks" in text
    assert "call save_state on every rank" in text


def save_on_one_rank_then_on_two(root):
    accelerator = Training(f"{root}/run", total_limit=None).accelerator
    names = []
    for ranks in ((0,), (0, 1), (0, 1, 2)):
        if accelerator.process_index in ranks:
            names.append(accelerator.save_state().name)
        accelerator.wait_for_everyone()
    return names


def test_rank_that_does_not_write_returns_the_folder_of_the_writing_rank(tmp_path):
    first, second, third = run_ranks(save_on_one_rank_then_on_two, 3, str(tmp_path))
    assert first == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert second == first[1:]
    assert third == first[2:]


def save_on_all_ranks_then_on_the_last(root):
    accelerator = Training(f"{root}/run", total_limit=None).accelerator
    names = [accelerator.save_state().name]
    if accelerator.is_last_process:
        names.append(accelerator.save_state().name)
    accelerator.wait_for_everyone()
    return [*names, accelerator.save_state().name]


def test_rank_that_has_not_taken_the_lock_can_save_alone(tmp_path):
    first, last = run_ranks(save_on_all_ranks_then_on_the_last, 2, str(tmp_path))
    assert first == ["checkpoint_0", "checkpoint_2"]
    assert last == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def save_best(root):
    training = Training(f"{root}/best", total_limit=1, keep_best="max")
    for metric in (0.1, 0.9, 0.3):
        if training.accelerator.is_main_process:
            training.accelerator.save_state(metric=metric)
    training.accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(root, "best", "checkpoints").iterdir())


def fail_to_save(root):
    """Fail to save on rank 0. The save raises there, and the other rank continues."""
    training = Training()
    Path(root, "file").write_text("no folder")
    training.accelerator.wait_for_everyone()
    results = ""
    if training.accelerator.is_main_process:
        try:
            training.accelerator.save_state(f"{root}/file/checkpoint-1")
        except CheckpointError as error:
            results = str(error)
    training.train(3)
    return results, training.accelerator.num_updates


def save_on_last_rank(root):
    training = Training()
    training.train(2)
    drawn = None
    if training.accelerator.is_last_process:
        training.accelerator.save_state(f"{root}/last")
        drawn = random.random()
    training.accelerator.wait_for_everyone()
    again = Training()
    restored = again.accelerator.load_state(f"{root}/last")
    return restored.differences[0][:22], torch.equal(again.weights(), training.weights()), (drawn, random.random())


def run_several(root):
    return save_best(root), fail_to_save(root), save_on_last_rank(root)


def test_best_checkpoint_failure_and_save_on_the_last_rank(tmp_path):
    first, second = run_ranks(run_several, 2, str(tmp_path))
    assert first[0] == second[0] == ["checkpoint_1", "checkpoint_2", "latest"]
    assert "rank 0: FileExistsError" in first[1][0]
    assert (first[1][1], second[1]) == (3, ("", 3))
    for results in (first[2], second[2]):
        assert results[:2] == ("saved on rank 1 alone,", True)
    drawn, again = second[2][2]
    assert drawn == again


# -------------------------------------------------------------------- a kill after a save

KILLED = """
import os, signal, torch
from headway import Accelerator, ProjectConfiguration, set_seed
set_seed(1)
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
restored = accelerator.resume("latest")
for epoch in accelerator.epochs(1):
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process and accelerator.num_updates % 4 == 0:
            accelerator.save_state()
        if restored is None and accelerator.num_updates == 10 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
if accelerator.is_main_process:
    print("ended", restored.about["num_updates"], accelerator.num_updates, accelerator.save_iteration, flush=True)
"""


@pytest.mark.slow
def test_run_killed_after_a_save_on_one_rank_resumes(tmp_path):
    result = launch(tmp_path, KILLED, "-n", "2", "--cpu", "--max_restarts", "1")
    assert result.returncode == 0, result.stderr
    assert "ended 8 20 5" in result.stdout
    assert result.stderr.count("on rank 0 only: rank 1 has continued to train.py:") <= 2  # once per start


# -------------------------------------------------------------------- a different folder on each rank


def save_to_own_folder(folder, strategy):
    """Save as scripts do that make a temporary folder on each rank."""
    rank = process.start(cpu=True).rank
    own = Path(folder, f"own {rank}")
    own.mkdir()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("headway").addHandler(handler)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    saved = [accelerator.save_state(own), accelerator.save_state(Path(folder, "same"), blocking=False)]
    accelerator.wait_for_save()
    accelerator.load_state(saved[0])
    whole = accelerator.get_state_dict(model)
    return (
        [path.name for path in saved],
        sorted(os.listdir(own)),
        messages,
        {name: tuple(t.shape) for name, t in whole.items()},
    )


def test_ranks_with_different_folders_write_to_that_of_rank_0(tmp_path):
    for strategy in ("ddp", "fsdp"):
        (tmp_path / strategy).mkdir()
        first, second = run_ranks(save_to_own_folder, 2, str(tmp_path / strategy), strategy)
        assert first[0] == second[0] == ["own 0", "same"]
        verify_checkpoint(tmp_path / strategy / "own 0")
        assert "manifest.json" in first[1]
        assert second[1] == []
        expected = "own 1 on rank 1 and"
        assert [sum(expected in message for message in each[2]) for each in (first, second)] == [0, 1], (first, second)
        assert first[3] == {"weight": (4, 4), "bias": (4,)}


def call_forty_times():
    accelerator = Accelerator(cpu=True)
    attendance = process.current().scope.get_or_create(Attendance)
    found = []
    for _ in range(40):
        assert attendance.find_participants("a call").ranks == (0, 1)
        found.append(attendance._make_key(str(attendance._progress)))
    accelerator.wait_for_everyone()
    names = (str(accelerator.process_index), "count", "gone")
    kept = [any(current().has_key(f"{key}/{name}") for name in names) for key in found]
    accelerator.wait_for_everyone()  # rank 0 hosts the store, so it must not end before rank 1 has looked
    return kept


def test_old_calls_leave_no_keys_in_the_store():
    for kept in run_ranks(call_forty_times, 2):
        assert kept == [False] * 24 + [True] * 16
