"""Models with parameters without dimensions (such as CLIP's `logit_scale`) match plain PyTorch on one process if they are sharded."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from headway import Accelerator, ActivationCheckpointing, ExponentialMovingAverage, ShardingOptions
from headway.errors import LossError, StateError
from tests.distributed import cut_models, layouts, test_pipeline
from tests.distributed.layouts import (
    Curve,
    Task,
    build_seeded,
    measure_differences,
    run_each,
    start_fsdp,
    train_by_hand,
    train_prepared,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pipeline_axes import GPT_PLAN_OPTIONS

TOLERANCE = 3e-6
"""As in `test_layouts`: float32 sums in another order differ by up to this value."""


# ---------------------------------------------------------------- layouts


def build_cut_gpt() -> nn.Module:
    """Return a GPT that a plan can split. Its only scalar acts on activations that tensor parallelism does not split."""
    return layouts.scale_norm(cut_models.GPT(layouts.VOCABULARY))


layouts.MODELS["cut gpt, scaled"] = build_cut_gpt
GPT = "gpt, scaled"
TABLE: dict[str, tuple[int, str, dict[str, Task]]] = {
    "fsdp": (2, "fsdp", {
        "adamw": Task(GPT),
        "ranks' own seeds, fused": Task(GPT, optimizer="fused", updates=4, seed_by_rank=True),
        "host memory": Task(GPT, handlers=(ShardingOptions(cpu_offload=True),), optimizer="sgd", updates=4),
        "recomputed": Task(GPT, handlers=(ActivationCheckpointing(),), updates=4),
        "compiled": Task(GPT, updates=3, options={"dynamo_backend": "aot_eager"}),
    }),
    "hsdp": (4, "hsdp=2", {"adamw": Task(GPT)}),
    "uneven": (3, "fsdp", {"adamw": Task(GPT, window=6)}),
    "tp": (4, "fsdp=2+tp=2", {"adamw": Task("cut gpt, scaled", handlers=GPT_PLAN_OPTIONS, updates=4)}),
    "cp": (4, "fsdp=2+cp=2", {"adamw": Task(GPT, updates=4)}),
}  # fmt: skip


def train_tasks(tasks: list[Task], layout: str) -> list[Curve]:
    return [train_prepared(task, layout) for task in tasks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["fsdp", *(pytest.param(row, marks=pytest.mark.matrix) for row in TABLE if row != "fsdp")]
)
def test_training_matches_the_hand_written_loop(row):
    num_ranks, layout, tasks = TABLE[row]
    per_rank = run_ranks(train_tasks, num_ranks, list(tasks.values()), layout, timeout=300)
    for number, (name, task) in enumerate(tasks.items()):
        expected = train_by_hand(task)
        for rank, curves in enumerate(per_rank):
            found = measure_differences(expected, curves[number])
            assert max(found["losses"], found["norms"]) < TOLERANCE, (name, rank, found)
            assert found["weights"] < (1e-5 if task.optimizer == "sgd" else 2e-3), (name, rank, found)
            temperature = curves[number]["weights"]["norm.temperature"]
            assert temperature.shape == ()
            assert abs(float(temperature) - 0.3) > 1e-3  # it learns


STAGES = {"scaled": Task(GPT, window=16, updates=4)}


def train_stages(layout: str) -> dict[str, Curve]:
    return test_pipeline.train(STAGES, {}, layout)


@pytest.mark.matrix
def test_sharded_stages_match_the_hand_written_loop(monkeypatch):
    test_pipeline.compare(run_ranks(train_stages, 4, "pp=2+fsdp=2", timeout=200), STAGES, monkeypatch)


# ---------------------------------------------------------------- transformers' CLIP


UPDATES, STOP, LARGEST_SCALE = 6, 3, 2.658


def build_clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 39,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    }  # fmt: skip
    return build_seeded(0, lambda: CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)))


def make_pairs(update: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(update)
    ids, pixels = torch.randint(2, 39, (8, 6), generator=draws), torch.randn(8, 3, 8, 8, generator=draws)
    return {"input_ids": ids, "pixel_values": pixels}


def compute_pair_loss(model: Any, pairs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss of matching pairs alone, which is a mean over rows."""
    return functional.softplus(5 - model(**pairs).logits_per_image.diagonal()).mean()


def train_clip_by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in plain PyTorch, with the clamp of the scale after each update that CLIP's authors use."""
    model, norms = build_clip(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for update in range(UPDATES):
        compute_pair_loss(model, make_pairs(update)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, LARGEST_SCALE)
    return norms, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train_clip(layout: str, begin: int, end: int, load: Path | None, save: Path | None) -> tuple[list[float], Any]:
    accelerator = Accelerator(cpu=True, strategy=layout, gradient_accumulation_steps=2)
    model, norms = build_clip(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    if load is not None:
        accelerator.resume(load)
    shard = accelerator.strategy.data_shard
    for update in range(begin, end):
        for half in (0, 1):
            pairs = {
                name: each.chunk(2)[half].chunk(shard.count)[shard.index] for name, each in make_pairs(update).items()
            }
            with accelerator.accumulate(model):
                accelerator.backward(compute_pair_loss(model, pairs))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, LARGEST_SCALE)
    if save is not None:
        accelerator.save_state(save)
        accelerator.save_model(model, save / "weights")
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return norms, weights


def train_clip_in_turn(sharded: Path, whole: Path) -> list[tuple[list[float], Any]]:
    """Train under FSDP to the end, then to the middle, where it is saved, and from a one-process run's checkpoint to the end."""
    uninterrupted = train_clip("fsdp", 0, UPDATES, None, None)
    train_clip("fsdp", 0, STOP, None, sharded)
    return [uninterrupted, train_clip("fsdp", STOP, UPDATES, whole, None)]


@pytest.mark.slow
def test_clip_trains_and_continues_in_another_layout(tmp_path):
    norms, weights = train_clip_by_hand()
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    train_clip("ddp", 0, STOP, None, whole)
    on_two_ranks = run_ranks(train_clip_in_turn, 2, sharded, whole, timeout=240)[0]
    runs = [(on_two_ranks[0], 0), (on_two_ranks[1], STOP), (train_clip("ddp", STOP, UPDATES, sharded, None), STOP)]
    for (found_norms, found), begin in runs:
        assert max(abs(one - other) for one, other in zip(found_norms, norms[begin:], strict=True)) < 1e-4
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    assert weights["logit_scale"].shape == ()
    assert abs(float(weights["logit_scale"]) - 2.6592) > 1e-3
    from safetensors.torch import load_file

    saved, expected = (
        load_file(folder / "weights" / "model.safetensors")["logit_scale"] for folder in (sharded, whole)
    )
    torch.testing.assert_close(saved, expected, rtol=1e-5, atol=0)


# ---------------------------------------------------------------- loops on two ranks


class Gain(nn.Module):
    """Multiplies by a learned scalar and adds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias, self.never = (nn.Parameter(torch.tensor(each)) for each in (1.5, -0.5, 0.7))

    def reset_parameters(self) -> None:
        for parameter, value in ((self.scale, 1.5), (self.bias, -0.5), (self.never, 0.7)):
            nn.init.constant_(parameter, value)

    def forward(self, x: torch.Tensor, adds_bias: bool = True) -> torch.Tensor:
        return x * self.scale.exp() + self.bias if adds_bias else x * self.scale.exp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(5, 6), Gain()
        self.adds_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gain(self.first(x), self.adds_bias)
        return out


def make_inputs(seed: int) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))


def start(**options: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an Accelerator, its model and optimizer, and a model and optimizer for the same run in plain PyTorch."""
    accelerator = start_fsdp(**options)
    model, plain = build_seeded(0, Net), build_seeded(0, Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, plain, torch.optim.AdamW(plain.parameters(), lr=0.01)


def get_own_rows(accelerator: Accelerator, inputs: torch.Tensor) -> torch.Tensor:
    return inputs.chunk(accelerator.num_processes)[accelerator.process_index]


def mean_of_squares(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()  # type: ignore[no-any-return]


def compare_weights(model: Any, plain: nn.Module) -> None:
    found = layouts.gather_weights(model)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


def parameters_that_some_ranks_use() -> None:
    """A scalar that one rank uses gets the whole gradient, and one that no rank uses gets none."""
    accelerator, model, optimizer, plain, plain_optimizer = start(
        kwargs_handlers=[ShardingOptions(find_unused_parameters=True)]
    )
    for update in range(3):
        with accelerator.accumulate(model):
            model.adds_bias = accelerator.process_index == 0
            accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(update))))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            assert model.gain.bias.grad is not None
            assert model.gain.never.grad is None
            optimizer.step()
            optimizer.zero_grad()
        for adds_bias, rows in zip((True, False), make_inputs(update).chunk(2)):
            plain.adds_bias = adds_bias
            (mean_of_squares(plain, rows) / 2).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0), rtol=1e-5, atol=0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    compare_weights(model, plain)
    accelerator.free_memory()


def losses_of_several_weights() -> None:
    """Micro-batches weigh 1, 2, 3 and 0. The last one's loss is 0/0."""
    accelerator, model, optimizer, plain, plain_optimizer = start(gradient_accumulation_steps=2)
    for update in range(2):
        for step in (0, 1):
            weight = float(1 + accelerator.process_index) if step == 0 else 3.0 * (accelerator.process_index == 0)
            with accelerator.accumulate(model):
                rows = make_inputs(update).chunk(4)[2 * step + accelerator.process_index]
                loss = mean_of_squares(model, rows) * (weight / weight if weight else float("nan"))
                accelerator.backward(loss, weight=weight)
                optimizer.step()
                optimizer.zero_grad()
        terms = [mean_of_squares(plain, rows) * weight for rows, weight in zip(make_inputs(update).chunk(4), (1, 2, 3))]
        (sum(terms) / 6).backward()  # type: ignore[union-attr]
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    compare_weights(model, plain)
    accelerator.free_memory()


def values_that_are_not_finite() -> None:
    """A non-finite gradient of a scalar on one rank skips the update on both ranks."""
    accelerator, model, optimizer, _, _ = start(on_non_finite="skip")
    for bad in (float("inf"), float("nan")):
        accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(0))))
        if accelerator.process_index == 1:
            model.gain.scale.grad.fill_(bad)
        assert not torch.isfinite(accelerator.strategy.compute_total_norm(list(model.parameters()), 2.0))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert model.gain.scale.item() == 1.5
        optimizer.zero_grad()
    accelerator.free_memory()


def failed_window() -> None:
    """Gradients of a failed window do not enter the next window."""
    found = []
    for fails in (False, True):
        accelerator, model, _, _, _ = start(gradient_accumulation_steps=2)
        if fails:
            with accelerator.accumulate(model):
                accelerator.backward(mean_of_squares(model, make_inputs(5)))
            with contextlib.suppress(KeyError), accelerator.accumulate(model):
                mean_of_squares(model, make_inputs(6))
                raise KeyError
        for seed in (1, 2):
            with accelerator.accumulate(model):
                accelerator.backward(mean_of_squares(model, make_inputs(seed)))
        found.append((layouts.measure_norm(accelerator, model), float(model.gain.scale.grad)))
        accelerator.free_memory()
    assert found[0] == found[1]


def penalties() -> None:
    """A penalty on a scalar is added to the loss. One on all parameters names the scalars as the obstacle."""
    accelerator, model, optimizer, plain, plain_optimizer = start()
    for update in range(2):
        with accelerator.accumulate(model):
            loss = mean_of_squares(model, get_own_rows(accelerator, make_inputs(update)))
            accelerator.backward(loss + model.gain.scale.square())
            optimizer.step()
            optimizer.zero_grad()
        (mean_of_squares(plain, make_inputs(update)) + plain.gain.scale.square()).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    compare_weights(model, plain)
    with pytest.raises(LossError, match=r"a parameter without dimensions.*Leave it out of this term"):
        accelerator.backward(sum(p.square().sum() for p in model.parameters()))  # type: ignore[arg-type]
    accelerator.free_memory()


def values_from_modules_and_files() -> None:
    """A model on the meta device gets the scalars' initial values, and then those of a state dict."""
    accelerator = start_fsdp()
    with torch.device("meta"):
        model = Net()
    model = accelerator.prepare(model)
    assert (model.gain.scale.item(), model.gain.never.item()) == (torch.tensor(1.5), torch.tensor(0.7))
    assert model.gain.scale.shape == ()
    accelerator.free_memory()


def averages() -> None:
    """The moving average of a scalar is that of plain PyTorch."""
    accelerator, model, optimizer, plain, plain_optimizer = start()
    average = ExponentialMovingAverage(model, decay=0.5)
    expected = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    for update in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(update))))
            optimizer.step()
            optimizer.zero_grad()
        mean_of_squares(plain, make_inputs(update)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            expected[name].lerp_(parameter.detach(), 0.5)
    with average.swap_weights():
        found = layouts.gather_weights(model)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    accelerator.free_memory()


class SignDescent(torch.optim.Optimizer):
    """Works element by element. With `joins`, the step of each parameter depends on the gradients of all of them."""

    def __init__(self, parameters: Any, joins: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.joins = joins

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.norm()) ** 2 for p in parameters) ** 0.5 if self.joins else 1.0
        for p in parameters:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.lerp_(p.grad / norm, 0.1).tanh() * self.param_groups[0]["lr"])


OPTIMIZERS = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "whole matrices": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "local shards": lambda parameters: SignDescent(parameters, joins=False),
    "on one rank": lambda parameters: SignDescent(parameters, joins=True),
}


def optimizers_of_every_kind() -> None:
    """An optimizer updates scalars together with DTensors, with plain shards, and on the rank that owns them."""
    for name, make in OPTIMIZERS.items():
        accelerator, plain = start_fsdp(), build_seeded(0, Net)
        model, optimizer = accelerator.prepare(model := build_seeded(0, Net), make(list(model.parameters())))
        plain_optimizer = make(list(plain.parameters()))
        for update in range(3):
            accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(update))))
            optimizer.step()
            optimizer.zero_grad()
            mean_of_squares(plain, make_inputs(update)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert plain.gain.scale.item() != 1.5, name
        compare_weights(model, plain)
        accelerator.free_memory()


def scalars_alone() -> None:
    """A model without other parameters trains, too."""
    accelerator, plain = start_fsdp(), Gain()
    model, optimizer = accelerator.prepare(model := Gain(), torch.optim.SGD(model.parameters(), lr=0.01))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for update in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(update))))
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        mean_of_squares(plain, make_inputs(update)).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-5, atol=0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    compare_weights(model, plain)
    accelerator.free_memory()


def prepared_twice() -> None:
    """A released model keeps its scalars, and trains on after another prepare()."""
    accelerator, model, _, plain, _ = start()
    scale = model.gain.scale
    accelerator.free_memory()
    accelerator = start_fsdp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert model.gain.scale is scale
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(0))))
    optimizer.step()
    mean_of_squares(plain, make_inputs(0)).backward()
    plain_optimizer.step()
    compare_weights(model, plain)
    accelerator.free_memory()


def shared_by_models() -> None:
    """The gradient of a scalar that two models share is that of plain PyTorch, also over several windows."""
    accelerator = start_fsdp(gradient_accumulation_steps=2)
    models, plain = [build_seeded(seed, Net) for seed in (0, 1)], [build_seeded(seed, Net) for seed in (0, 1)]
    for one, other in (models, plain):
        other.gain.scale = one.gain.scale
    optimizer, plain_optimizer = (
        torch.optim.SGD({id(p): p for model in each for p in model.parameters()}.values(), lr=0.01)
        for each in (models, plain)
    )
    *models, optimizer = accelerator.prepare(*models, optimizer)
    assert models[0].gain.scale is models[1].gain.scale
    for seed in range(4):
        with accelerator.accumulate(*models):
            rows = get_own_rows(accelerator, make_inputs(seed))
            accelerator.backward(sum(mean_of_squares(model, rows) for model in models))
            optimizer.step()
            optimizer.zero_grad()
        (sum(mean_of_squares(model, make_inputs(seed)) for model in plain) / 2).backward()
        if seed % 2:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    for model, expected in zip(models, plain):
        compare_weights(model, expected)
    accelerator.free_memory()


def half_precision() -> None:
    """Scalars stay in float32 in a model that computes in bf16, and a model in bf16 keeps them in bf16."""
    for options in ({"mixed_precision": "bf16"}, {"kwargs_handlers": [ShardingOptions(param_dtype="bfloat16")]}):
        accelerator, model, optimizer, plain, plain_optimizer = start(**options)
        for update in range(2):
            accelerator.backward(model(get_own_rows(accelerator, make_inputs(update))).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            mean_of_squares(plain, make_inputs(update)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert model.gain.scale.dtype is torch.float32
        torch.testing.assert_close(model.gain.scale.detach(), plain.gain.scale.detach(), rtol=0, atol=1e-3)
        accelerator.free_memory()
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, Net).bfloat16())
    accelerator.backward(mean_of_squares(model, make_inputs(0).bfloat16()))
    assert model.gain.scale.grad.dtype is torch.bfloat16
    accelerator.free_memory()


def changed_on_one_rank() -> None:
    """Ranks find a scalar that one of them alone has changed. This must be the last function: the run ends with an error."""
    accelerator, model, optimizer, _, _ = start()

    def train(num_updates: int) -> None:
        for update in range(num_updates):
            accelerator.backward(mean_of_squares(model, get_own_rows(accelerator, make_inputs(update))))
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    if accelerator.process_index == 1:
        with torch.no_grad():
            model.gain.scale.add_(1)
    with pytest.raises(StateError, match=r"gain\.scale on rank 1 differs"):
        train(6)


LOOPS = [
    parameters_that_some_ranks_use, losses_of_several_weights, values_that_are_not_finite, failed_window, penalties,
    values_from_modules_and_files, averages, optimizers_of_every_kind, scalars_alone, prepared_twice, shared_by_models,
    half_precision, changed_on_one_rank,
]  # fmt: skip


def run_loops(only: str = "") -> list[str]:
    return run_each(LOOPS, only)


def test_loops_with_scalar_parameters():
    failures = run_ranks(run_loops, 2, timeout=200)
    assert failures == [[], []], failures[0] or failures[1]
