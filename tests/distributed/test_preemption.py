"""Asked to end by a signal to any rank or to the launcher: all ranks save at one point, and a resumed run is the undisturbed one."""

import json
import os
import signal
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, Preemption, ProjectConfiguration, set_seed
from headway.core.runtime import process
from headway.core.runtime.control_plane import stopping
from headway.core.runtime.resume_advice import NO_CHECKPOINT
from headway.errors import PREEMPTED, Preempted
from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import begin
from tests.distributed.test_resume import Net, Noisy

NUM_EPOCHS = 2


class Striker:
    """Sends this process a signal at a certain moment, and waits until it is heard."""

    def __init__(self, phase=None, who=(), count=0, number=signal.SIGTERM):
        self.phase, self.who, self.left, self.number = phase, who, count, number

    def __call__(self, phase, accelerator):
        if phase != self.phase:
            return
        self.left -= 1
        if self.left == 0 and accelerator.process_index in self.who:
            os.kill(os.getpid(), self.number)
            deadline = time.monotonic() + 60
            while not accelerator._checkpoints.guard._stopping.reason and time.monotonic() < deadline:
                time.sleep(0.005)


class Run:
    """One process's life: what it saw until it was asked to end, or until training was over."""

    def __init__(self, folder, strike, blocking=True, steps=2):
        self.losses, self.evaluations, self.weights, self.stopped, self.phase = {}, {}, None, None, "start"
        set_seed(7)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=steps, project_config=project
        )
        train, evaluation = DataLoader(Noisy(), batch_size=3, shuffle=True), DataLoader(Noisy(), batch_size=3)
        prepared = accelerator.prepare(model, optimizer, train, evaluation)
        set_seed(11, device_specific=True)
        accelerator.resume("latest")
        accelerator.register_save_state_pre_hook(lambda *_: strike("save", accelerator))
        try:
            self.train(strike, blocking, *prepared)
        except Preempted as told:
            self.stopped = told

    def train(self, strike, blocking, model, optimizer, train, evaluation):
        accelerator = self.accelerator
        for epoch in accelerator.epochs(NUM_EPOCHS):
            self.phase = "training"
            model.train()
            for _, x, y in train:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    strike("training", accelerator)
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses[epoch, train.num_consumed] = loss.item()
                if accelerator.sync_gradients and accelerator.num_updates % 2 == 1:
                    accelerator.save_state(blocking=blocking)
                    strike("written behind", accelerator)
            self.phase = "evaluation"
            self.evaluations[epoch] = self.evaluate(strike, model, evaluation)
        accelerator.wait_for_save()
        self.weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    def evaluate(self, strike, model, evaluation):
        model.eval()
        total = 0.0
        for _, x, y in evaluation:
            strike("evaluation", self.accelerator)
            with torch.no_grad():
                wrong = (model(x) - y).abs()
            total += self.accelerator.gather_for_metrics(wrong).sum().item()
        return total


def disturbed(root, phase, who, blocking, whole):
    """A run that is asked to end, and the one that goes on from there; both together must be the undisturbed one."""
    folder = f"{root}/{phase}-{who}-{blocking}"
    first = Run(folder, Striker(phase, who, 3), blocking)
    assert first.stopped is not None
    assert first.stopped.code == PREEMPTED
    assert first.weights is None
    rest = Run(folder, Striker())
    assert rest.stopped is None
    assert {**first.losses, **rest.losses} == whole.losses
    assert {**first.evaluations, **rest.evaluations} == whole.evaluations
    assert rest.weights == whole.weights
    return (
        first.phase,
        len(first.losses),
        len(rest.losses),
        len(first.evaluations),
        len(rest.evaluations),
        str(first.stopped),
    )


def all_disturbed(root):
    whole = Run(f"{root}/whole", Striker())
    phases = ("training", "evaluation", "save", "written behind")
    ranks = [(rank,) for rank in range(whole.accelerator.num_processes)]
    told = {}
    for phase, who in product(phases, [*ranks, (0, 1)] if len(ranks) > 1 else ranks):
        told[phase, who] = disturbed(root, phase, who, phase != "written behind", whole)
    return len(whole.losses), told


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_to_any_rank_at_any_time(world_size, tmp_path):
    (num_losses, told), *others = run_ranks(all_disturbed, world_size, str(tmp_path))
    # Every rank stops at the same place, and says the same.
    assert [each for _, each in others] == [told] * (world_size - 1)
    for (phase, who), (where, num_first, num_rest, evaluated, evaluated_again, text) in told.items():
        assert where == ("evaluation" if phase == "evaluation" else "training"), (phase, who)
        assert num_first + num_rest == num_losses, (phase, who)  # nothing is computed twice
        assert evaluated + evaluated_again == NUM_EPOCHS
        assert "preempted by SIGTERM" in text
        if world_size > 1 and len(who) == 1:
            assert f"on rank {who[0]}" in text


def disturbed_twice(root):
    """Asked to end at an epoch's last batch, and again in the evaluation that the resumed run owes."""
    whole = Run(f"{root}/whole", Striker())
    num_batches = len(whole.losses) // NUM_EPOCHS
    first = Run(f"{root}/twice", Striker("training", (0,), num_batches))
    assert (first.stopped is not None, first.evaluations, len(first.losses)) == (True, {}, num_batches)
    second = Run(f"{root}/twice", Striker("evaluation", (0,), 2))
    assert (second.stopped is not None, second.evaluations, second.losses) == (True, {}, {})
    rest = Run(f"{root}/twice", Striker())
    assert rest.evaluations == whole.evaluations
    assert {**first.losses, **rest.losses} == whole.losses
    assert rest.weights == whole.weights


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_is_owed_until_it_was_made(world_size, tmp_path):
    run_ranks(disturbed_twice, world_size, str(tmp_path))


# ---------------------------------------------------------------- other loops


def made(folder, **settings):
    set_seed(7)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, **settings)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(Noisy(), batch_size=3, shuffle=True))


def step(accelerator, model, optimizer, x, y):
    with accelerator.accumulate(model):
        accelerator.backward((model(x).squeeze(1) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def flagged(folder):
    """Preemption(exits=False): every rank sees the flag at the same batch, and goes on as it likes."""
    accelerator, model, optimizer, loader = made(folder, preemption=Preemption(("SIGUSR1",), exits=False))
    strike, seen = Striker("training", (0,), 2, signal.SIGUSR1), []
    for _, x, y in loader:
        seen.append(accelerator.preempted)
        strike("training", accelerator)
        step(accelerator, model, optimizer, x, y)
    return seen


def timed(folder):
    """A deadline asks like a signal."""
    limit = Preemption(time_limit=timedelta(seconds=1), reserve=timedelta(0))
    accelerator, model, optimizer, loader = made(folder, preemption=limit)
    try:
        while True:
            for _, x, y in loader:
                step(accelerator, model, optimizer, x, y)
    except Preempted as told:
        return str(told)


def without_loader(folder):
    """A loop of its own: its windows are checks."""
    accelerator, model, optimizer, _ = made(folder)
    strike = Striker("training", (0,), 2)
    try:
        for number in range(1000):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
            strike("training", accelerator)
            step(accelerator, model, optimizer, x, x.sum(1))
    except Preempted:
        return accelerator.num_updates, accelerator.check_preemption()


def astray(folder):
    """Rank 0 is asked in a pass that only it makes: the stop moves to the next window, which all ranks reach."""
    stopping.LATE = 0.5
    accelerator, model, optimizer, loader = made(folder)
    other = accelerator.prepare(DataLoader(Noisy(), batch_size=3))
    alone = 0
    strike = Striker("training", (0,), 2)
    try:
        for _, x, y in loader:
            step(accelerator, model, optimizer, x, y)
            if accelerator.num_updates == 2:
                for _ in other if accelerator.is_main_process else ():
                    strike("training", accelerator)
                    alone += 1
                accelerator.wait_for_everyone()
    except Preempted:
        return accelerator.num_updates, alone
    finally:
        stopping.LATE = 20.0


def hurried(folder):
    """A window that takes long is not waited for: the resumed run begins it anew."""
    stopping.SOON = -1.0
    try:
        first = Run(folder, Striker("training", (0, 1), 3))
    finally:
        stopping.SOON = 5.0
    rest = Run(folder, Striker())
    return first.losses, rest.losses


def slowed(folder):
    """A window that becomes slow is broken off too: nobody knew it when the signal came."""
    stopping.SOON = 0.5
    accelerator, model, optimizer, loader = made(folder, gradient_accumulation_steps=3)
    strike, has_struck = Striker("training", (0,), 1), False
    try:
        for _ in range(3):
            for _, x, y in loader:
                step(accelerator, model, optimizer, x, y)
                if accelerator.num_updates == 1:  # its window was quick, this one is not
                    strike("training", accelerator)
                    time.sleep(0.7 if has_struck else 0.0)
                    has_struck = True
    except Preempted:
        return accelerator.num_updates, accelerator._checkpoint_state.run.windows.is_unfinished
    finally:
        stopping.SOON = 5.0


def damaged(folder):
    """A save behind the loop that failed is made up for."""
    accelerator, model, optimizer, loader = made(folder)
    strike = Striker("training", (1,), 3)
    try:
        for _, x, y in loader:
            step(accelerator, model, optimizer, x, y)
            if accelerator.num_updates == 1:
                accelerator.save_state(blocking=False)
            if accelerator.num_updates == 3:
                accelerator._checkpoint_state.saver.wait()
                accelerator._checkpoint_state.saver.wait = fail_once(accelerator._checkpoint_state.saver)
            strike("training", accelerator)
    except Preempted as told:
        return accelerator.num_updates, told.checkpoint


def fail_once(saver):
    from headway.errors import CheckpointError

    def wait():
        del saver.wait
        raise CheckpointError("the disk was full")

    return wait


def others(root):
    told = {
        loop.__name__: loop(f"{root}/{loop.__name__}")
        for loop in (flagged, timed, without_loader, astray, hurried, slowed, damaged)
    }
    process.reset()
    told["after"] = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    return told


def test_other_loops(tmp_path):
    first, second = run_ranks(others, 2, str(tmp_path))
    assert first["flagged"] == second["flagged"]
    assert first["flagged"].index(True) in (3, 4)
    assert "preempted by the end of the allotted time after update" in first["timed"]
    assert first["timed"] == second["timed"]
    assert first["without_loader"] == second["without_loader"]
    assert first["without_loader"][0] in (1, 2, 3)
    assert first["without_loader"][1] is True
    # Rank 0 made its whole pass alone, one batch after the other, and then both made the third update.
    assert (first["astray"], second["astray"]) == ((3, 6), (3, 0))
    assert first["slowed"] == second["slowed"] == (1, True)
    losses, rest = first["hurried"]
    assert set(losses) & set(rest)
    assert all(rest[key] == losses[key] for key in set(losses) & set(rest))
    assert first["damaged"] == second["damaged"]
    assert Path(first["damaged"][1], "manifest.json").exists()
    assert first["after"] == [signal.SIG_IGN, signal.SIG_IGN]  # it has been agreed to end


# ---------------------------------------------------------------- with the launcher

LAUNCHED = """
import json, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed

def tell(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()

set_seed(0)
project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(32, 4)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True))
accelerator.resume("latest")
begun = accelerator.num_updates
sends = {"rank 1": 1, "SIGTERM": 0, "SIGUSR1": 0}.get(sys.argv[1])
for epoch in accelerator.epochs(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates == begun + 5:
            if sends == accelerator.process_index:
                pid = os.getpid() if sys.argv[1] == "rank 1" else os.getppid()
                os.kill(pid, getattr(signal, sys.argv[1], signal.SIGTERM))
            if sys.argv[1] == "fails" and accelerator.process_index == 1:
                raise ValueError("bad luck")
        if sys.argv[1] != "ends" and accelerator.num_updates >= begun + 5:
            time.sleep(0.05)  # so that the signal comes while there is something left
        accelerator.wait_for_everyone()
        loss = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            tell(update=accelerator.num_updates, loss=loss.item().hex())
"""


def launched(folder: Path, how: str, *flags: str) -> tuple[int, dict[int, str], str]:
    process = begin(folder, LAUNCHED, "--cpu", "-n", "2", *flags, args=(how,))
    out, err = process.communicate(timeout=120)
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return process.returncode, {each["update"]: each["loss"] for each in told}, err


@pytest.mark.slow
def test_the_launcher_passes_it_on_both_ways(tmp_path):
    curve: dict[int, str] = {}
    for how in ("rank 1", "SIGTERM"):
        code, losses, err = launched(tmp_path, how, "--max_restarts", "2")
        assert code == PREEMPTED, err
        assert losses
        assert not set(curve) & set(losses)
        curve |= losses
        assert (
            "headway: preempted by SIGTERM on rank 1" if how == "rank 1" else "headway: preempted by SIGTERM"
        ) in err
        assert f"after update {max(curve)}; checkpoint {tmp_path}/run/checkpoints/checkpoint_" in err
        assert ("headway: SIGTERM: the ranks save and end" in err) == (how == "SIGTERM")
        assert "starting all processes again" not in err
        assert "Traceback" not in err
    code, losses, err = launched(tmp_path, "ends")
    assert code == 0, err
    assert sorted([*curve, *losses]) == list(range(1, 17))


@pytest.mark.slow
def test_a_failure_stays_one(tmp_path):
    """The launcher ends the other ranks by a signal, which is not a request to save."""
    code, _, err = launched(tmp_path, "fails")
    assert code == 1
    assert "headway: rank 1 of 2 failed first" in err
    assert "preempted" not in err
    assert not (tmp_path / "run").exists()


def test_a_script_that_does_not_listen_ends_as_ever(tmp_path):
    body = "import json, os, sys, time\nsys.stdout.write(json.dumps({'pid': os.getpid()}) + '\\n')\n"
    process = begin(tmp_path, body + "sys.stdout.flush()\ntime.sleep(300)\n", "--cpu", "-n", "2")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1" in err


def test_the_grace_ends(tmp_path):
    """Ranks that do not come to a check are killed when the grace is over."""
    body = "from headway import Accelerator, ProjectConfiguration\nimport time\n"
    body += "Accelerator(cpu=True, project_config=ProjectConfiguration('run', automatic_checkpoint_naming=True))\n"
    body += "print('ready', flush=True)\ntime.sleep(300)\n"
    process = begin(tmp_path, body, "--cpu", "-n", "2", "--grace", "1")
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "headway: SIGUSR1: the ranks save and end, within 1 s" in err
    assert err.splitlines()[-2:] == [
        "headway: the ranks have not saved within 1 s of SIGUSR1, and are killed",
        NO_CHECKPOINT,
    ]


def test_a_signal_that_comes_again_ends_who_comes_to_no_check(tmp_path):
    body = "from headway import Accelerator, ProjectConfiguration\nimport time\n"
    body += "from headway.core.runtime.control_plane import stopping\n"
    body += "stopping.AGAIN = 0.2\n"
    body += "Accelerator(cpu=True, project_config=ProjectConfiguration('run', automatic_checkpoint_naming=True))\n"
    body += "print('ready', flush=True)\ntime.sleep(300)\n"
    process = begin(tmp_path, body, "--cpu")
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
