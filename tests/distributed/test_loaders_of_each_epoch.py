"""Resuming loops that prepare a new loader in each epoch, such as those that sample new negatives or grow the batch size."""

import gc
import logging
import runpy
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from tests.distributed.ranks import run_ranks

NUM_ROWS, NUM_EPOCHS = 24, 4
STAGES = [(8, 2), (16, 2), (24, 4), (24, 2)]  # rows and batch size of each epoch


class Stopped(Exception):
    """Ends a run, as a kill would."""


def train(folder, kind, data_seed, stop_after):
    """Save after every second update. Return the rows of each update, until the run is stopped or ends."""
    torch.manual_seed(0)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(data_seed=data_seed)
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.resume("latest")
    seen, loader = [], None
    try:
        for epoch in accelerator.epochs(NUM_EPOCHS):
            num_rows, batch_size = STAGES[epoch] if kind == "curriculum" else (NUM_ROWS, 2)
            if (
                loader is None
                or kind not in ("first epoch", "second epochs")
                or (kind == "second epochs" and epoch % 2 == 0)
            ):
                is_constant = kind in ("first epoch", "second epochs")
                data = TensorDataset(torch.arange(float(num_rows))[:, None] + 100 * epoch * (not is_constant))
                loader = accelerator.prepare(DataLoader(data, batch_size=batch_size, shuffle=True))
            for (rows,) in loader:
                accelerator.backward(model(rows / 1000).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                seen.append(sorted(accelerator.gather(rows).flatten().tolist()))
                if accelerator.num_updates % 2 == 0:
                    accelerator.save_state()
                if accelerator.num_updates == stop_after:
                    raise Stopped
            if kind == "evaluation" or (
                kind == "rare evaluation" and epoch % 2
            ):  # a second loader in each epoch, which only reads
                data = TensorDataset(torch.arange(4.0)[:, None])
                seen.append([len(accelerator.gather(rows)) for (rows,) in accelerator.prepare(DataLoader(data))])
    except Stopped:
        pass
    accelerator.end_training()
    return seen, accelerator.num_updates, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def check_killed_run(run, folder, first, second):
    """Kill a run twice, after `first` and `second` sixths of its updates. Compare the rest with an uninterrupted run."""
    whole, num_updates, weights = run(f"{folder}/whole", None)
    for sixths in (first, second):
        run(f"{folder}/killed", num_updates * sixths // 6)
    rest, _, resumed_weights = run(f"{folder}/killed", None)
    assert rest == whole[-len(rest) :]
    assert resumed_weights == weights


@pytest.mark.parametrize("data_seed", [None, 5])
@pytest.mark.parametrize(
    "kind", ["negatives", "curriculum", "evaluation", "rare evaluation", "first epoch", "second epochs"]
)
def test_a_run_that_is_killed_twice_reads_the_same_rows(kind, data_seed, tmp_path):
    for first, second in ((1, 2), (3, 5)):
        check_killed_run(
            lambda folder, stop: train(folder, kind, data_seed, stop), tmp_path / f"{first}", first, second
        )


def test_two_ranks_that_are_killed_twice_read_the_same_rows(tmp_path):
    def run(folder, stop):
        return run_ranks(train, 2, folder, "negatives", None, stop)[0]

    check_killed_run(run, tmp_path, 1, 3)


def count_living_datasets(keeping_rank: int | None, uses_views: bool) -> int:
    """Prepare a training and an evaluation loader in each of six epochs, and return how many of their datasets are alive.

    Args:
        keeping_rank: Rank whose script keeps all loaders.
        uses_views: Whether the script keeps only views of the loaders, which skip a batch.
    """
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    datasets, kept, seeds = [], [], []
    for _ in accelerator.epochs(6):
        data, evaluated = (TensorDataset(torch.randn(8, 1)) for _ in range(2))
        datasets += [weakref.ref(data), weakref.ref(evaluated)]
        loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
        seeds.append(loader.seed)
        if uses_views:
            kept.append(accelerator.skip_first_batches(loader, 1))
        elif keeping_rank == accelerator.process_index:
            kept.append(loader)
        for (rows,) in loader:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for (rows,) in accelerator.prepare(DataLoader(evaluated)):
            model(rows)
        del data, evaluated
    assert len(set(seeds)) == 6  # loaders are numbered as if all of them were still there
    assert accelerator.num_updates == 6 * 4 // accelerator.num_processes
    gc.collect()
    return sum(each() is not None for each in datasets)


def test_dropped_loaders_are_released() -> None:
    """The registry keeps the loaders of the last epoch, and the training loader that the script still held before it."""
    assert count_living_datasets(None, uses_views=False) <= 4
    assert count_living_datasets(None, uses_views=True) >= 6
    assert count_living_datasets(0, uses_views=False) >= 6


def test_loaders_that_one_rank_keeps_stay_on_all_ranks() -> None:
    living = run_ranks(count_living_datasets, 2, 1, False)
    assert min(living) >= 6
    assert max(run_ranks(count_living_datasets, 2, None, False)) <= 4


def train_beside_evaluation_of_rank_0() -> int:
    """Prepare a loader in each epoch, while rank 0 alone is in the middle of a pass over an evaluation loader."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.arange(8.0)[:, None] / 8)
    evaluated = accelerator.prepare(DataLoader(data, batch_size=2))
    unfinished_passes = []
    for _ in accelerator.epochs(3):
        for (rows,) in accelerator.prepare(DataLoader(data, batch_size=2)):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            unfinished_passes.append(iter(evaluated))
            next(unfinished_passes[-1])
    return accelerator.num_updates


def test_one_rank_can_be_in_the_middle_of_an_evaluation_when_an_epoch_begins() -> None:
    assert run_ranks(train_beside_evaluation_of_rank_0, 2) == [6, 6]


NUM_PATTERN_EPOCHS = 4
TRAINING_EPOCHS = {"first": lambda epoch: False, "each": lambda epoch: True, "second": lambda epoch: epoch % 2 == 0}
EVALUATIONS = {
    "none": lambda epoch: None,
    "new": lambda epoch: "new" if epoch % 2 else None,
    "kept": lambda epoch: "kept",
}


def train_pattern(training, evaluation, data_seed, resumed=None, folder=None, is_evaluation_shuffled=True):
    """Prepare loaders in the epochs of a pattern. Return the rows read, and the number of reads before each save.

    Args:
        training: Key of `TRAINING_EPOCHS`: epochs in which a new training loader replaces the last one.
        evaluation: Key of `EVALUATIONS`: epochs with an evaluation, by a new loader or by one that is kept.
        data_seed: Seed of the orders, or None.
        resumed: Checkpoint to load, or None.
        folder: Folder for a checkpoint after each update and each epoch. None: nothing is saved.
        is_evaluation_shuffled: Whether the evaluation loaders shuffle.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=data_seed))
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    if resumed is not None:
        accelerator.load_state(resumed)
    loader = evaluated = None
    reads, saves = [], {}

    def save(name):
        if folder is not None:
            accelerator.save_state(f"{folder}/{name}")
            saves[f"{folder}/{name}"] = len(reads)

    rows_of = lambda first: TensorDataset(torch.arange(8.0)[:, None] + first)  # noqa: E731
    for epoch in accelerator.epochs(NUM_PATTERN_EPOCHS):
        if loader is None or TRAINING_EPOCHS[training](epoch):
            loader = accelerator.prepare(DataLoader(rows_of(0), batch_size=4, shuffle=True))
        for (rows,) in loader:
            accelerator.backward(model(rows / 1000).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            reads.append((epoch, "training", rows.flatten().tolist()))
            save(f"update{accelerator.num_updates}")
        kind = EVALUATIONS[evaluation](epoch)
        if kind is not None:
            if kind == "new" or evaluated is None:
                evaluated = accelerator.prepare(DataLoader(rows_of(500), batch_size=4, shuffle=is_evaluation_shuffled))
            for (rows,) in evaluated:
                reads.append((epoch, "evaluation", rows.flatten().tolist()))
            if kind == "new":
                evaluated = None
        save(f"epoch{epoch}")
    accelerator.end_training()
    return reads, saves


class Warnings(logging.Handler):
    """Handler that keeps the messages about loaders of earlier epochs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        if "resumed run prepared" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture
def warned():
    handler = Warnings()
    logging.getLogger("headway").addHandler(handler)
    yield handler.messages
    logging.getLogger("headway").removeHandler(handler)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("training", TRAINING_EPOCHS)
def test_each_save_resumes_with_the_same_rows_or_a_warning(training, evaluation, tmp_path, warned):
    """Resume from each update and each epoch, with loaders that are prepared in some epochs only."""
    for data_seed in (None, 5) if training == "second" else (5,):
        whole, saves = train_pattern(training, evaluation, data_seed, folder=tmp_path / str(data_seed))
        assert len(saves) == 3 * NUM_PATTERN_EPOCHS
        wrong, silent = [], []
        for save, num_reads in saves.items():
            warned.clear()
            rest, _ = train_pattern(training, evaluation, data_seed, resumed=save)
            if rest != whole[num_reads:]:
                wrong.append(save)
            if not warned:
                silent.append(save)
        assert not set(wrong) & set(silent)
        if data_seed is None:  # the orders come from torch's generator, which does not know loaders
            assert not wrong
            assert len(silent) == len(saves)
        if training == "each" and evaluation != "kept":  # new loaders in each epoch: certain after two epochs
            assert not wrong
            assert len(silent) >= len(saves) - 1
        if evaluation != "kept":  # training loaders that were read in the epoch are known
            assert {each for each in saves if "update" in each} <= set(silent) - set(wrong)


def test_a_wrong_guess_about_an_unshuffled_loader_is_reported_because_it_moves_later_seeds(tmp_path, warned):
    whole, saves = train_pattern("each", "kept", 5, folder=tmp_path, is_evaluation_shuffled=False)
    rest, _ = train_pattern("each", "kept", 5, resumed=f"{tmp_path}/update3", is_evaluation_shuffled=False)
    assert rest == whole[saves[f"{tmp_path}/update3"] :] or warned


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
if resumed:
    accelerator.load_state(resumed)
reads, loader = [], None
for epoch in accelerator.epochs(2):
    if epoch == 1 and evaluates_first:
        list(accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)[:, None]))))
    if PREPARES:
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2, shuffle=True))
    for (rows,) in loader or ():
        accelerator.backward(model(rows / 8).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        reads.append(rows.flatten().tolist())
        if not resumed:
            accelerator.save_state(f"{folder}/{accelerator.num_updates}")
accelerator.end_training()
"""


def run_script(folder, name, text, resumed, evaluates_first=False):
    """Write a script and run it. Return the rows of its updates."""
    (folder / name).write_text(text)
    names = {"folder": str(folder), "resumed": resumed, "evaluates_first": evaluates_first}
    return runpy.run_path(str(folder / name), names)["reads"]


def test_an_edited_line_still_finds_the_loader_in_mid_pass(tmp_path):
    script = SCRIPT.replace("PREPARES", "loader is None")
    whole = run_script(tmp_path, "train.py", script, None)
    edited = script.replace("batch_size=2, shuffle", "batch_size=2, drop_last=True, shuffle")
    assert edited != script
    for name, text in (("train.py", script), ("edited.py", edited)):
        assert run_script(tmp_path, name, text, f"{tmp_path}/6") == whole[6:]


def test_a_loader_of_other_lines_does_not_take_the_position_of_one_in_mid_pass(tmp_path):
    script = SCRIPT.replace("PREPARES", "loader is None")
    whole = run_script(tmp_path, "train.py", script, None)
    assert run_script(tmp_path, "train.py", script, f"{tmp_path}/6", evaluates_first=True) == whole[6:]


def test_a_position_that_no_loader_continues_is_reported(tmp_path, caplog):
    run_script(tmp_path, "train.py", SCRIPT.replace("PREPARES", "epoch == 0"), None)
    with caplog.at_level(logging.WARNING, "headway"):
        rest = run_script(tmp_path, "train.py", SCRIPT.replace("PREPARES", "epoch == 0"), f"{tmp_path}/6")
    assert rest == []
    assert "prepared no such loader in epoch 1" in caplog.text
