"""Test that forecasts of a user's script equal those of its model, and name operations that prevent them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import headway
from headway.forecasting.device.devices import find_device
from headway.forecasting.tracing.storage_tracker import StorageTracker
from headway.planning._torch import FakeTensorMode
from headway.planning.dry_run.script_trace import ScriptTracker

pytestmark = pytest.mark.slow

SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator

accelerator = Accelerator({options})
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 256), torch.randn(4096, 256))
loader = DataLoader(data, batch_size=int(sys.argv[1]) if len(sys.argv) > 1 else 512, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (inputs, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        outputs = model(inputs)
        {line}
        with accelerator.autocast():
            loss = nn.functional.mse_loss(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    {after}
    assert step < 8, "the script went on"
raise SystemExit("the script was not left")
"""


@pytest.mark.parametrize("tracker_class", [StorageTracker, ScriptTracker])
def test_gradients_of_a_reused_tensor_are_summed_in_place(tracker_class):
    """On plain tensors, autograd adds the second gradient to the first, so a trace has no allocation for their sum."""
    with FakeTensorMode():
        weight, inputs = nn.Parameter(torch.empty(256, 256)), torch.empty(256, 256)
        with tracker_class(find_device("a100-40gb")) as tracker:
            hidden = inputs @ weight
            loss = (hidden * 2 + torch.tanh(hidden)).sum()
            tracker.enter_phase("step 1 backward")
            loss.backward()
    events = tracker.build_trace().events
    added = [event for event in events if event.operation == "aten::add" and event.num_bytes > 0]
    assert len(added) == 1, "only the sum in forward"


def build_net():
    return nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))


def make_batch(size):
    return torch.zeros(size, 256), torch.zeros(size, 256)


def run_estimate(folder: Path, text: str, *more: str, device="a100-40gb"):
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "headway", "estimate", "--script", str(script), "--device", device, *more]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=300, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )


def forecast_script(folder, text, *more, device="a100-40gb"):
    ended = run_estimate(folder, text, "--json", *more, device=device)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def make_script(options="", line="pass", after="pass"):
    return SCRIPT.format(options=options, line=line, after=after)


@pytest.mark.parametrize(
    ("options", "same", "device"),
    [
        ("", {}, "cpu"),
        ("mixed_precision='bf16'", {"precision": "bf16"}, "a100-40gb"),
        ("mixed_precision='fp16'", {"precision": "fp16"}, "a100-40gb"),
        ("gradient_accumulation_steps=2", {"accumulation": 2}, "a100-40gb"),
    ],
    ids=["plain", "bf16", "fp16", "accumulated"],
)
def test_forecast_of_a_script_equals_that_of_its_model(tmp_path, options, same, device):
    found = forecast_script(tmp_path, make_script(options), device=device)
    own = headway.forecast(
        build_net,
        make_batch,
        loss=nn.functional.mse_loss,
        batch_size=512,
        device=device,
        largest=False,
        optimizer="adamw",
        **same,
    )
    assert found["batch_size"] == 512
    assert found["allocated"] == pytest.approx(own.allocated, rel=0.01)
    assert found["reserved"] == pytest.approx(own.reserved, rel=0.01)
    for kind in ("weights", "optimizer state", "activations"):
        assert found["split"].get(kind, 0) == pytest.approx(own.split.get(kind, 0), rel=0.01, abs=1024)


def test_script_gets_its_arguments_and_its_output_is_not_in_the_json(tmp_path):
    found = forecast_script(tmp_path, make_script(after="print('working')"), "--", "64")
    assert found["batch_size"] == 64
    assert "train.py" in found["peak_line"] or found["peak_line"] == ""


def test_module_is_forecast_like_its_script(tmp_path):
    """The module imports another one of its package, and gets its arguments."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "nets.py").write_text("from torch import nn\nmake_activation = nn.Tanh\n")
    text = make_script().replace("import sys", "import sys\nfrom package.nets import make_activation")
    (package / "train.py").write_text(text.replace("nn.Tanh()", "make_activation()"))
    command = [
        sys.executable,
        "-m",
        "headway",
        "estimate",
        "-m",
        "package.train",
        "--device",
        "cpu",
        "--json",
        "--",
        "64",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    own = forecast_script(tmp_path, make_script(), "--", "64", device="cpu")
    assert (found["batch_size"], found["allocated"]) == (64, own["allocated"])
    ended = subprocess.run([*command[:5], "package.other", *command[6:]], capture_output=True, text=True, cwd=tmp_path)
    assert "there is no module package.other" in ended.stderr


def test_output_of_exit_functions_and_of_child_processes_is_not_in_the_json(tmp_path):
    prints = (
        "import atexit, subprocess\natexit.register(print, 'at the end')\n"
        "subprocess.run([sys.executable, '-c', 'print(1)'], check=True)\naccelerator ="
    )
    ended = run_estimate(tmp_path, make_script().replace("accelerator =", prints, 1), "--json", device="cpu")
    assert json.loads(ended.stdout)["batch_size"] == 512
    assert {"at the end", "1"} <= set(ended.stderr.splitlines())


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_that_is_not_prepared_is_forecast_like_a_prepared_one(tmp_path, workers):
    """The script also reads its data before it prepares the model, where the batches have values, as in a real run."""
    text = make_script().replace("optimizer, loader =", "optimizer =").replace("optimizer, loader)", "optimizer)")
    mean = "mean = sum(inputs.abs().mean().item() for inputs, _ in loader) / len(loader)\nassert 0.7 < mean < 0.9\nmodel, opt"
    text = text.replace("model, opt", mean, 1).replace("shuffle=True", f"shuffle=True, num_workers={workers}")
    found = forecast_script(tmp_path, text, device="cpu")
    own = forecast_script(tmp_path, make_script(), device="cpu")
    assert (found["batch_size"], found["allocated"], found["split"]) == (512, own["allocated"], own["split"])


@pytest.mark.parametrize(
    "batch", ["Graph(inputs, targets)", "Data(inputs, targets)", "UserDict(batch=Graph(inputs, targets))"]
)
def test_batches_of_other_types_count_like_tuples(tmp_path, batch):
    """A dataclass, an object with attributes, and a mapping such as a BatchEncoding hold the tensors of the batches."""
    types = """
from collections import UserDict
from dataclasses import dataclass

@dataclass
class Graph:
    inputs: torch.Tensor
    targets: torch.Tensor

class Data:
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

def collate(rows):
    inputs, targets = torch.utils.data.default_collate(rows)
    return BATCH

accelerator =""".replace("BATCH", batch)
    text = make_script().replace("accelerator =", types, 1).replace("shuffle=True", "collate_fn=collate")
    text = text.replace("step, (inputs, targets) in", "step, batch in").replace(
        "    with accelerator.accumulate(model):", "    batch = getattr(batch, 'data', {}).get('batch', batch)\n"
        "    inputs, targets = batch.inputs, batch.targets\n    with accelerator.accumulate(model):",
    )  # fmt: skip
    found = forecast_script(tmp_path, text, device="cpu")
    own = forecast_script(tmp_path, make_script(), device="cpu")
    assert (found["batch_size"], found["allocated"], found["split"]) == (512, own["allocated"], own["split"])


def test_neighboring_file_named_like_a_standard_module_is_ignored(tmp_path):
    beside, page = tmp_path / "beside", tmp_path / "page.html"
    beside.mkdir()
    (beside / "html.py").write_text("raise AssertionError('of the user')")
    (beside / "train.py").write_text(make_script())
    more = ["--script", "beside/train.py", "--device", "t4", "--page", str(page)]
    command = [sys.executable, "-m", "headway", "estimate", *more]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (result.returncode, page.exists()) == (0, True), result.stderr[-3000:]


def test_line_that_reads_a_value_is_named(tmp_path):
    found = forecast_script(tmp_path, make_script(after="total = loss.item()"))
    assert any("train.py:25" in each and "taken as 1" in each for each in found["caveats"])


def test_optimizer_without_steps_makes_the_forecast_a_lower_bound(tmp_path):
    rare = "rare = accelerator.prepare(torch.optim.AdamW(nn.Linear(4, 4).parameters()))\n"
    text = make_script().replace("for step,", f"{rare}for step,").replace("assert step < 8", "assert step < 60")
    endless = text.replace("in enumerate(loader)", "in enumerate(each for _ in range(20) for each in loader)")
    for loop, updates in ((endless, 50), (text.replace("raise SystemExit", "str"), 8)):
        found = forecast_script(tmp_path, loop)
        said = (
            f"a lower bound: 1 of 2 optimizers had stepped fewer than 2 times when another had made {updates} updates"
        )
        assert any(said in each for each in found["caveats"])


def test_forecast_waits_for_every_optimizer(tmp_path):
    """The second of two models is trained in every third batch only, and its Adam keeps twice its weights."""
    second = (
        "other = nn.Linear(256, 2048)\nrare = torch.optim.AdamW(other.parameters())\n"
        "other, rare = accelerator.prepare(other, rare)\n"
    )
    learns = "if step % 3 == 2: accelerator.backward(other(inputs).square().mean()); rare.step(); rare.zero_grad()"
    found = forecast_script(tmp_path, make_script(after=learns).replace("for step,", f"{second}for step,"))
    assert not any("lower bound" in each for each in found["caveats"])
    weights = sum(each.numel() for each in build_net().parameters()) + 257 * 2048
    assert found["split"]["weights"] == pytest.approx(4 * weights, rel=0.01)
    assert found["split"]["optimizer state"] == pytest.approx(8 * weights, rel=0.01)


TRAINED = """
import torch
from torch import nn

from headway import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))

    def forward(self, x, labels=None):
        outputs = self.layers(x)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def metrics(found):
    assert found.predictions.any(), "no values"
    return {"error": float(abs(found.predictions - found.label_ids).mean())}


rows = [{"x": torch.randn(256), "labels": torch.randn(256)} for _ in range(256)]
arguments = TrainingArguments("out", per_device_train_batch_size=64, eval_strategy="epoch", report_to="none", max_steps=4)
Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics).train()
"""


def test_trainer_with_metrics_needs_no_option(tmp_path):
    found = forecast_script(tmp_path, TRAINED)
    assert found["batch_size"] == 64
    assert found["split"]["weights"] == pytest.approx(
        4 * sum(each.numel() for each in build_net().parameters()), rel=0.01
    )


def test_script_that_gathers_metrics_and_leaves_its_loop_is_reported_as_ended(tmp_path):
    text = make_script(after="seen = accelerator.gather_for_metrics(outputs).numpy(); break")
    text = text.replace("raise SystemExit", "str")  # the script then ends without an exception
    found = forecast_script(tmp_path, text)
    assert any("ended after its first update" in each for each in found["caveats"])


KEEPING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ExponentialMovingAverage, PowerDecay, ProjectConfiguration

project = ProjectConfiguration("runs", automatic_checkpoint_naming=True)
accelerator = Accelerator(log_with="tensorboard", project_config=project)
accelerator.init_trackers("kept", {"rows": 4})
model = nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
average = ExponentialMovingAverage(model, decay=PowerDecay(0.1))
accelerator.resume()
for _ in accelerator.epochs(1):
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss})
        accelerator.get_tracker("tensorboard").log({"own": 1.0})
        accelerator.save_state()
        accelerator.save_model(model, "weights")
        accelerator.save(model.state_dict(), "plain.pt")
        average.save_snapshot("snapshots")
accelerator.end_training()
"""


def test_dry_run_saves_loads_and_tracks_nothing(tmp_path):
    def list_files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    found = forecast_script(tmp_path, KEEPING)
    assert [path.name for path in list_files()] == ["train.py"]
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=300)
    written = list_files()
    assert {"manifest.json", "model.safetensors", "plain.pt", "log.jsonl"} <= {path.name for path in written}
    # The checkpoint of the finished run is not loaded, because no update would remain.
    again = forecast_script(tmp_path, KEEPING)
    assert again["split"] == found["split"]
    (tmp_path / "train.py").touch()
    assert {path for path, time in list_files().items() if written.get(path) != time} == {tmp_path / "train.py"}


@pytest.mark.parametrize(
    "text",
    [
        make_script().replace("optimizer = ", "model = torch.compile(model)\noptimizer = ", 1),
        make_script().replace("optimizer = ", "model.compile()\noptimizer = ", 1),
        make_script("dynamo_backend='inductor'"),
        make_script(line="outputs = torch.compile(torch.nn.functional.relu)(outputs)"),
    ],
    ids=["wrapped", "in place", "by Headway", "function"],
)
def test_compiled_code_is_forecast_as_uncompiled(tmp_path, text):
    found = forecast_script(tmp_path, text)
    assert sum("assumes that nothing is compiled" in each for each in found["caveats"]) == 1
    if "relu" not in text:
        plain = forecast_script(tmp_path, make_script())
        assert found["allocated"] == plain["allocated"]
        assert not any("compiled" in each for each in plain["caveats"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (make_script(line="outputs = outputs.repeat_interleave(outputs.argmax(1), 0)"), "depends on values"),
        (make_script().replace("for step,", "model(data.tensors[0]).sum().item()\nfor step,"), "train.py:16: it reads a value"),
        ("print('no training')", "made no update"),
        ("raise SystemExit(3)", "ended with 3"),
    ],
    ids=["data-dependent", "before the first batch", "no-training", "exit"],
)  # fmt: skip
def test_operations_that_prevent_a_forecast_are_reported(tmp_path, text, said):
    ended = run_estimate(tmp_path, text)
    assert ended.returncode != 0
    assert said in ended.stderr


def test_error_of_the_script_is_reported_unchanged(tmp_path):
    ended = run_estimate(tmp_path, "int('x')")
    assert ended.returncode != 0
    assert "invalid literal for int()" in ended.stderr


def test_invalid_use_is_refused(tmp_path):
    command = [sys.executable, "-m", "headway", "estimate"]
    for flags, said in ((["--script", "no.py", "--device", "t4"], "there is no script no.py"),
                        (["--script", "no.py"], "--script needs --device"),
                        (["--script", "no.py", "--device", "t4", "--recompute"], "--activation_checkpointing is decided by"),
                        (["llama", "--", "3"], "only a script takes arguments")):  # fmt: skip
        result = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert result.returncode == 2
        assert said in result.stderr
