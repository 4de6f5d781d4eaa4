"""After a signal to any rank or to the launcher, all ranks save at one point, and the resumed run matches an uninterrupted one."""

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
from tests.distributed.test_launch import start_launch
from tests.distributed.test_resume import Net, NoisyRows

NUM_EPOCHS = 2


class SignalSender:
    """Sends a signal to this process at a certain moment, and waits until Headway has noticed it."""

    def __init__(self, phase=None, who=(), count=0, number=signal.SIGTERM):
        self.phase, self.who, self.left, self.number = phase, who, count, number

    def __call__(self, phase, accelerator):
        if phase != self.phase:
            return
        self.left -= 1
        if self.left == 0 and accelerator.process_index in self.who:
            os.kill(os.getpid(), self.number)
            deadline = time.monotonic() + 60
            while not accelerator._checkpoints.preemption_guard._stopping.reason and time.monotonic() < deadline:
                time.sleep(0.005)


class Run:
    """One process's training, until it is asked to end or is finished, with all values that it computed."""

    def __init__(self, folder, send_signal, blocking=True, steps=2):
        self.losses, self.evaluations, self.weights, self.stopped, self.phase = {}, {}, None, None, "start"
        set_seed(7)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=steps, project_config=project
        )
        train, evaluation = DataLoader(NoisyRows(), batch_size=3, shuffle=True), DataLoader(NoisyRows(), batch_size=3)
        prepared = accelerator.prepare(model, optimizer, train, evaluation)
        set_seed(11, device_specific=True)
        accelerator.resume("latest")
        accelerator.register_save_state_pre_hook(lambda *_: send_signal("save", accelerator))
        try:
            self.train(send_signal, blocking, *prepared)
        except Preempted as error:
            self.stopped = error

    def train(self, send_signal, blocking, model, optimizer, train, evaluation):
        accelerator = self.accelerator
        for epoch in accelerator.epochs(NUM_EPOCHS):
            self.phase = "training"
            model.train()
            for _, x, y in train:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    send_signal("training", accelerator)
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses[epoch, train.num_consumed] = loss.item()
                if accelerator.sync_gradients and accelerator.num_updates % 2 == 1:
                    accelerator.save_state(blocking=blocking)
                    send_signal("written behind", accelerator)
            self.phase = "evaluation"
            self.evaluations[epoch] = self.evaluate(send_signal, model, evaluation)
        accelerator.wait_for_save()
        self.weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    def evaluate(self, send_signal, model, evaluation):
        model.eval()
        total = 0.0
        for _, x, y in evaluation:
            send_signal("evaluation", self.accelerator)
            with torch.no_grad():
                wrong = (model(x) - y).abs()
            total += self.accelerator.gather_for_metrics(wrong).sum().item()
        return total


def compare_interrupted_run(root, phase, who, blocking, whole):
    """Interrupt a run and resume it. Both parts together must equal the undisturbed run `whole`."""
    folder = f"{root}/{phase}-{who}-{blocking}"
    first = Run(folder, SignalSender(phase, who, 3), blocking)
    assert first.stopped is not None
    assert first.stopped.code == PREEMPTED
    assert first.weights is None
    rest = Run(folder, SignalSender())
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


def compare_all_phases(root):
    whole = Run(f"{root}/whole", SignalSender())
    phases = ("training", "evaluation", "save", "written behind")
    ranks = [(rank,) for rank in range(whole.accelerator.num_processes)]
    outcomes = {}
    for phase, who in product(phases, [*ranks, (0, 1)] if len(ranks) > 1 else ranks):
        outcomes[phase, who] = compare_interrupted_run(root, phase, who, phase != "written behind", whole)
    return len(whole.losses), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_to_any_rank_in_any_phase_stops_all_ranks_at_one_point(world_size, tmp_path):
    (num_losses, outcomes), *others = run_ranks(compare_all_phases, world_size, str(tmp_path))
    # All ranks stop at the same point with the same message.
    assert [each for _, each in others] == [outcomes] * (world_size - 1)
    for (phase, who), (where, num_first, num_rest, evaluated, evaluated_again, text) in outcomes.items():
        assert where == ("evaluation" if phase == "evaluation" else "training"), (phase, who)
        assert num_first + num_rest == num_losses, (phase, who)  # no micro-batch is computed twice
        assert evaluated + evaluated_again == NUM_EPOCHS
        assert "preempted by SIGTERM" in text
        if world_size > 1 and len(who) == 1:
            assert f"on rank {who[0]}" in text


def interrupt_twice(root):
    """Interrupt a run at an epoch's last batch, and again in the evaluation that the resumed run has to make up for."""
    whole = Run(f"{root}/whole", SignalSender())
    num_batches = len(whole.losses) // NUM_EPOCHS
    first = Run(f"{root}/twice", SignalSender("training", (0,), num_batches))
    assert (first.stopped is not None, first.evaluations, len(first.losses)) == (True, {}, num_batches)
    second = Run(f"{root}/twice", SignalSender("evaluation", (0,), 2))
    assert (second.stopped is not None, second.evaluations, second.losses) == (True, {}, {})
    rest = Run(f"{root}/twice", SignalSender())
    assert rest.evaluations == whole.evaluations
    assert {**first.losses, **rest.losses} == whole.losses
    assert rest.weights == whole.weights


@pytest.mark.parametrize("world_size", [1, 2])
def test_interrupted_evaluation_is_made_up_for(world_size, tmp_path):
    run_ranks(interrupt_twice, world_size, str(tmp_path))


# ---------------------------------------------------------------- other loops


def prepare_training(folder, **settings):
    set_seed(7)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, **settings)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(NoisyRows(), batch_size=3, shuffle=True))


def make_update(accelerator, model, optimizer, x, y):
    with accelerator.accumulate(model):
        accelerator.backward((model(x).squeeze(1) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def check_flag(folder):
    """Return the flag at each batch with Preemption(exits=False): all ranks see it at the same batch, and training continues."""
    accelerator, model, optimizer, loader = prepare_training(folder, preemption=Preemption(("SIGUSR1",), exits=False))
    send_signal, seen = SignalSender("training", (0,), 2, signal.SIGUSR1), []
    for _, x, y in loader:
        seen.append(accelerator.preempted)
        send_signal("training", accelerator)
        make_update(accelerator, model, optimizer, x, y)
    return seen


def reach_time_limit(folder):
    """Train until the time limit, which interrupts like a signal."""
    limit = Preemption(time_limit=timedelta(seconds=1), reserve=timedelta(0))
    accelerator, model, optimizer, loader = prepare_training(folder, preemption=limit)
    try:
        while True:
            for _, x, y in loader:
                make_update(accelerator, model, optimizer, x, y)
    except Preempted as error:
        return str(error)


def train_without_loader(folder):
    """Train without a prepared loader, so that ranks check for preemption at each window."""
    accelerator, model, optimizer, _ = prepare_training(folder)
    send_signal = SignalSender("training", (0,), 2)
    try:
        for number in range(1000):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
            send_signal("training", accelerator)
            make_update(accelerator, model, optimizer, x, x.sum(1))
    except Preempted:
        return accelerator.num_updates, accelerator.check_preemption()


def signal_in_pass_of_one_rank(folder):
    """Send a signal in a pass that only rank 0 makes. The stop moves to the next window, which all ranks reach."""
    stopping.ARRIVAL_TIMEOUT = 0.5
    accelerator, model, optimizer, loader = prepare_training(folder)
    other = accelerator.prepare(DataLoader(NoisyRows(), batch_size=3))
    alone = 0
    send_signal = SignalSender("training", (0,), 2)
    try:
        for _, x, y in loader:
            make_update(accelerator, model, optimizer, x, y)
            if accelerator.num_updates == 2:
                for _ in other if accelerator.is_main_process else ():
                    send_signal("training", accelerator)
                    alone += 1
                accelerator.wait_for_everyone()
    except Preempted:
        return accelerator.num_updates, alone
    finally:
        stopping.ARRIVAL_TIMEOUT = 20.0


def abandon_long_window(folder):
    """Stop in a window that is expected to take long. It is abandoned, and the resumed run repeats it."""
    stopping.MAX_FINISHED_SECONDS = -1.0
    try:
        first = Run(folder, SignalSender("training", (0, 1), 3))
    finally:
        stopping.MAX_FINISHED_SECONDS = 5.0
    rest = Run(folder, SignalSender())
    return first.losses, rest.losses


def abandon_slow_window(folder):
    """Stop in a window that becomes slow. It is abandoned, too, although its duration was unknown when the signal came."""
    stopping.MAX_FINISHED_SECONDS = 0.5
    accelerator, model, optimizer, loader = prepare_training(folder, gradient_accumulation_steps=3)
    send_signal, has_struck = SignalSender("training", (0,), 1), False
    try:
        for _ in range(3):
            for _, x, y in loader:
                make_update(accelerator, model, optimizer, x, y)
                if accelerator.num_updates == 1:  # the previous window was fast, this one is slow
                    send_signal("training", accelerator)
                    time.sleep(0.7 if has_struck else 0.0)
                    has_struck = True
    except Preempted:
        return accelerator.num_updates, accelerator._checkpoint_state.run.windows.is_unfinished
    finally:
        stopping.MAX_FINISHED_SECONDS = 5.0


def repeat_failed_save(folder):
    """Stop after a failed background save. It is repeated before the process ends."""
    accelerator, model, optimizer, loader = prepare_training(folder)
    send_signal = SignalSender("training", (1,), 3)
    try:
        for _, x, y in loader:
            make_update(accelerator, model, optimizer, x, y)
            if accelerator.num_updates == 1:
                accelerator.save_state(blocking=False)
            if accelerator.num_updates == 3:
                accelerator._checkpoint_state.saver.wait()
                accelerator._checkpoint_state.saver.wait = fail_once(accelerator._checkpoint_state.saver)
            send_signal("training", accelerator)
    except Preempted as error:
        return accelerator.num_updates, error.checkpoint


def fail_once(saver):
    from headway.errors import CheckpointError

    def wait():
        del saver.wait
        raise CheckpointError("the disk was full")

    return wait


def run_other_loops(root):
    outcomes = {
        loop.__name__: loop(f"{root}/{loop.__name__}")
        for loop in (
            check_flag,
            reach_time_limit,
            train_without_loader,
            signal_in_pass_of_one_rank,
            abandon_long_window,
            abandon_slow_window,
            repeat_failed_save,
        )
    }
    process.reset()
    outcomes["after"] = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    return outcomes


def test_other_loops_and_time_limits_stop_all_ranks_alike(tmp_path):
    first, second = run_ranks(run_other_loops, 2, str(tmp_path))
    assert first["check_flag"] == second["check_flag"]
    assert first["check_flag"].index(True) in (2, 3, 4)
    assert "preempted by the end of the allotted time after update" in first["reach_time_limit"]
    assert first["reach_time_limit"] == second["reach_time_limit"]
    assert first["train_without_loader"] == second["train_without_loader"]
    assert first["train_without_loader"][0] in (1, 2, 3)
    assert first["train_without_loader"][1] is True
    # Rank 0 completed its own pass, and then both ranks made the third update.
    assert (first["signal_in_pass_of_one_rank"], second["signal_in_pass_of_one_rank"]) == ((3, 6), (3, 0))
    assert first["abandon_slow_window"] == second["abandon_slow_window"] == (1, True)
    losses, rest = first["abandon_long_window"]
    assert set(losses) & set(rest)
    assert all(rest[key] == losses[key] for key in set(losses) & set(rest))
    assert first["repeat_failed_save"] == second["repeat_failed_save"]
    assert Path(first["repeat_failed_save"][1], "manifest.json").exists()
    assert first["after"] == [signal.SIG_IGN, signal.SIG_IGN]  # the run has agreed to end


# ---------------------------------------------------------------- with the launcher

LAUNCHED = """
import json, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed

def print_json(**values):
    sys.stdout.write(json.dumps(values) + "\\n")
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
            time.sleep(0.05)  # so that the signal arrives before the end
        accelerator.wait_for_everyone()
        loss = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            print_json(update=accelerator.num_updates, loss=loss.item().hex())
"""


def launch_and_read(folder: Path, how: str, *flags: str) -> tuple[int, dict[int, str], str]:
    process = start_launch(folder, LAUNCHED, "--cpu", "-n", "2", *flags, args=(how,))
    out, err = process.communicate(timeout=120)
    outcomes = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return process.returncode, {each["update"]: each["loss"] for each in outcomes}, err


@pytest.mark.slow
def test_launcher_forwards_the_signal_in_both_directions(tmp_path):
    curve: dict[int, str] = {}
    for how in ("rank 1", "SIGTERM"):
        code, losses, err = launch_and_read(tmp_path, how, "--max_restarts", "2")
        assert code == PREEMPTED, err
        assert losses
        assert not set(curve) & set(losses)
        curve |= losses
        assert (
            "headway: preempted by SIGTERM on rank 1" if how == "rank 1" else "headway: preempted by SIGTERM"
        ) in err
        assert f"after update {max(curve)}; checkpoint {tmp_path}/run/checkpoints/checkpoint_" in err
        assert ("headway: SIGTERM: the ranks save and end" in err) == (how == "SIGTERM")
        assert "restarting all processes" not in err
        assert "Traceback" not in err
    code, losses, err = launch_and_read(tmp_path, "ends")
    assert code == 0, err
    assert sorted([*curve, *losses]) == list(range(1, 17))


@pytest.mark.slow
def test_failure_is_not_reported_as_preemption(tmp_path):
    """The launcher ends the other ranks by a signal, which must not count as a request to save."""
    code, _, err = launch_and_read(tmp_path, "fails")
    assert code == 1
    assert "headway: rank 1 of 2 failed first" in err
    assert "preempted" not in err
    assert not (tmp_path / "run").exists()


def test_script_without_headway_ends_at_the_signal(tmp_path):
    body = "import json, os, sys, time\nsys.stdout.write(json.dumps({'pid': os.getpid()}) + '\\n')\n"
    process = start_launch(tmp_path, body + "sys.stdout.flush()\ntime.sleep(300)\n", "--cpu", "-n", "2")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1" in err


def test_ranks_are_killed_after_the_grace_period(tmp_path):
    """Ranks that reach no check for preemption are killed after the grace period."""
    body = "from headway import Accelerator, ProjectConfiguration\nimport time\n"
    body += "Accelerator(cpu=True, project_config=ProjectConfiguration('run', automatic_checkpoint_naming=True))\n"
    body += "print('ready', flush=True)\ntime.sleep(300)\n"
    process = start_launch(tmp_path, body, "--cpu", "-n", "2", "--grace", "1")
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


def test_repeated_signal_ends_a_process_that_reaches_no_check(tmp_path):
    body = "from headway import Accelerator, ProjectConfiguration\nimport time\n"
    body += "from headway.core.runtime.control_plane import stopping\n"
    body += "stopping.MIN_REPEAT_SECONDS = 0.2\n"
    body += "Accelerator(cpu=True, project_config=ProjectConfiguration('run', automatic_checkpoint_naming=True))\n"
    body += "print('ready', flush=True)\ntime.sleep(300)\n"
    process = start_launch(tmp_path, body, "--cpu")
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
