"""Train in a process that lacks what other operating systems lack. This is a stand-in: no test runs on Windows or macOS."""

import subprocess
import sys

# Imported first, because on Linux these libraries need the parts that are removed below.
IMPORTS = """
import multiprocessing.connection, multiprocessing.resource_tracker, os, signal, subprocess, sys
import psutil, torch, torch._dynamo
"""

WINDOWS = """
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises an error
for name in (
    "fork", "getloadavg", "getpgid", "getuid", "killpg", "posix_fadvise", "pread", "preadv", "pwrite", "register_at_fork",
    "sched_getaffinity", "setsid", "statvfs", "sysconf", "uname",
):
    delattr(os, name)
for name in (
    "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2", "pthread_kill", "pthread_sigmask",
):
    delattr(signal, name)
"""

MACOS = """
import builtins, io
for name in ("O_DIRECT", "memfd_create", "posix_fadvise", "posix_fallocate", "sched_getaffinity"):
    delattr(os, name)

def hide_system_files(function):
    def call(path, *args, **kwargs):
        frame, files = sys._getframe(1), []
        while frame is not None and len(files) < 6:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        is_hidden = not isinstance(path, int) and os.fspath(path).startswith(("/proc", "/sys"))
        if is_hidden and not any("psutil" in file for file in files):  # psutil has other code on macOS
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)
    return call

builtins.open = io.open = hide_system_files(open)
os.open, os.stat = hide_system_files(os.open), hide_system_files(os.stat)
"""

TRAINING = """
from headway import Accelerator, ProjectConfiguration

folder, num_epochs, saves = sys.argv[1:]
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=project)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.init_trackers("run")
accelerator.resume()
for epoch in accelerator.epochs(int(num_epochs)):
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss})
    if saves == "saves":
        accelerator.save_state()
accelerator.end_training()
print(accelerator.num_updates, loss.item().hex())
"""


def train(system: str, folder, num_epochs: int, saves: str) -> str:
    """Run the training in a new process, from which `system` removes names. Return its output."""
    command = [sys.executable, "-c", IMPORTS + system + TRAINING, str(folder), str(num_epochs), saves]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_training_without_parts_that_windows_lacks_is_unchanged(tmp_path):
    expected = train("", tmp_path / "linux", 2, "saves nothing")
    assert expected.startswith("8 ")
    assert train(WINDOWS, tmp_path / "windows", 2, "saves nothing") == expected


def test_resumed_run_without_parts_that_macos_lacks_is_unchanged(tmp_path):
    expected = train("", tmp_path / "linux", 2, "saves")
    train(MACOS, tmp_path / "macos", 1, "saves")
    assert train(MACOS, tmp_path / "macos", 2, "saves") == expected
