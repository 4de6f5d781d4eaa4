"""Every recipe of the cookbook runs on two processes and learns what it describes."""

import json
import os
import runpy
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from headway import Accelerator, set_seed
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / "examples" / "cookbook"
RECIPES = sorted(path.stem for path in COOKBOOK.glob("*.py"))


def test_every_recipe_is_listed():
    assert len(RECIPES) == 10
    page = (ROOT / "docs" / "cookbook.md").read_text()
    table = (ROOT / "examples" / "README.md").read_text()
    for name in RECIPES:
        assert f"(../examples/cookbook/{name}.py)" in page
        assert f"cookbook/{name}.py" in table
        assert f"examples/cookbook/{name}.py" in (COOKBOOK / f"{name}.py").read_text().split('"""')[1]


def run_recipes(folder, recipes):
    """Run `main` of each recipe in the folder, and return the results. Each item of `recipes` is (name, *arguments)."""
    os.chdir(folder)
    return [runpy.run_path(str(COOKBOOK / f"{name}.py"))["main"](arguments) for name, *arguments in recipes]


def run_light_recipes(num_processes, folder):
    names = ("early_stopping", "ema", "distillation", "multi_task")
    return run_ranks(run_recipes, num_processes, folder, [(name,) for name in names])[0]


@pytest.mark.slow
def test_recipes_match_one_process(tmp_path_factory):
    alone = run_light_recipes(1, str(tmp_path_factory.mktemp("alone")))
    stopped, averaged, distilled, tasks = run_light_recipes(2, str(tmp_path_factory.mktemp("both")))
    assert stopped == {name: pytest.approx(value, rel=1e-4) for name, value in alone[0].items()}
    assert stopped["loss"] == stopped["best"]  # the best weights are restored
    assert stopped["epochs"] < 100
    torch.testing.assert_close(averaged["weight"], alone[1]["weight"], rtol=1e-3, atol=1e-4)
    assert averaged["accuracy"] > 0.8
    torch.testing.assert_close(distilled["weight"], alone[2]["weight"], rtol=1e-3, atol=1e-4)
    assert distilled["agreement"] > 0.85
    assert tasks == {name: pytest.approx(value, rel=1e-3) for name, value in alone[3].items()}
    assert tasks["classes"] < 0.2
    assert tasks["size"] < 0.02


@pytest.mark.slow
def test_gan_learns_the_ring_and_resumes(tmp_path):
    first, second, third = run_ranks(
        run_recipes, 2, str(tmp_path), [("gan", "--epochs", "20"), ("gan", "--epochs", "30"), ("gan", "--epochs", "30")]
    )[0]
    assert first["radius"] > 0.3
    assert 0.8 < second["radius"] < 1.2
    assert third["radius"] == 0.0  # no epoch was left to train


def train_contrastive():
    torch.set_default_dtype(torch.float64)
    return runpy.run_path(str(COOKBOOK / "contrastive.py"))["main"](["--epochs", "1"])["weights"]


def train_contrastive_by_hand():
    """Train one epoch with whole batches on one process in plain PyTorch. Only the data order comes from Headway."""
    torch.set_default_dtype(torch.float64)
    towers = runpy.run_path(str(COOKBOOK / "contrastive.py"))["TwoTowers"]
    set_seed(0)
    causes = torch.randn(512, 4)
    rows = torch.utils.data.TensorDataset(causes @ torch.randn(4, 12), causes @ torch.randn(4, 6))
    loader = torch.utils.data.DataLoader(rows, batch_size=64, shuffle=True, drop_last=True)
    model = towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in Accelerator(cpu=True).prepare(loader):
        left, right, scale = model(x, y)
        similarities = scale * left @ right.T
        chances = similarities.log_softmax(0).diagonal() + similarities.log_softmax(1).diagonal()
        optimizer.zero_grad()
        (-chances.mean() / 2).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def test_contrastive_recipe_matches_whole_batches():
    (expected,) = run_ranks(train_contrastive_by_hand, 1)
    for weights in run_ranks(train_contrastive, 2):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


def test_server_answers_with_the_trained_model(tmp_path):
    run_ranks(run_recipes, 2, str(tmp_path), [("serve",)])
    recipe = runpy.run_path(str(COOKBOOK / "serve.py"))
    with recipe["ModelServer"](tmp_path / "runs" / "served", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(content):
            address = f"http://127.0.0.1:{server.server_port}/"
            with urllib.request.urlopen(address, json.dumps(content).encode(), timeout=30) as answer:
                return json.load(answer)

        inputs = [[0.5, 0.25, -0.5, 1.0], [0.0, 1.0, 1.0, -1.0]]
        outputs = torch.tensor(ask({"inputs": inputs})["outputs"])
        torch.testing.assert_close(outputs, torch.tensor(inputs).sum(1, keepdim=True), rtol=0, atol=0.4)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask({"inputs": [[1.0]]})
        server.shutdown()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_recipes_for_language_models_learn(tmp_path, layout):
    for package in ("peft", "bitsandbytes"):
        pytest.importorskip(package)
    recipes = [("lora", "--layout", layout), ("qlora", "--layout", layout), ("grpo",)]
    adapted, packed, policy = run_ranks(run_recipes, 2, str(tmp_path), recipes, timeout=240)[0]
    assert adapted["following"] == 13
    assert adapted["loss"] < 3.0
    assert packed["loss"] < 2.6
    assert packed["packed"] == (
        14 if layout == "ddp" else 0
    )  # sharded values are DTensors, which the recipe does not count
    assert policy["reward"] > 0.9
