"""Float8 under tensor parallelism and in pipelines, compared with torchao's float8 on one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway import Accelerator, ActivationCheckpointing, Float8Options, PipelineOptions, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.verify.sharded_tensors import gather_full_tensor
from tests.devices import ON_CPU
from tests.distributed.layouts import build_seeded, gather_weights
from tests.distributed.ranks import run_ranks

torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
pytestmark = pytest.mark.timeout(900)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WIDTH, VOCABULARY, LENGTH = 64, 96, 16


def config_of(recipe: str, **changes: Any) -> Any:
    return replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True, **changes)


# ---------------------------------------------------------------- one layer in float32, where only scales can differ


def one_layer(recipe: str, dim: int, **changes: Any) -> dict[str, float]:
    """The largest differences from the whole layer, relative to its largest value, where ranks have parts of a matrix."""
    from headway.layouts.tensor.float8 import LayerSplit, split_layer

    rank, size = dist.get_rank(), dist.get_world_size()
    config = config_of(recipe, **changes)
    torch.manual_seed(3)
    whole, inputs, weights = nn.Linear(64, 96), torch.randn(5, 7, 64), torch.randn(5, 7, 96)
    # Ranks' parts are of different sizes, so that scales of parts would differ from those of the whole.
    inputs[..., 32:] *= 1.4
    weights[..., 48:] *= 1.4
    with torch.no_grad():
        whole.weight[48:] *= 1.4
        whole.weight[:, 32:] *= 1.4
    part = nn.Linear(64, 96 // size) if dim == 0 else nn.Linear(64 // size, 96)

    def own(tensor: torch.Tensor, along: int) -> torch.Tensor:
        return tensor.chunk(size, along)[rank].detach().clone()

    part.weight = nn.Parameter(own(whole.weight, dim))
    part.bias = nn.Parameter(own(whole.bias, 0)) if dim == 0 else None
    whole, part = nn.Sequential(whole), nn.Sequential(part)
    for model in (whole, part):
        torchao.convert_to_float8_training(model, config=config)
    split_layer(part[0], LayerSplit(dim, size, dist.group.WORLD.group_name))
    given, own_given = inputs.clone().requires_grad_(), (inputs if dim == 0 else own(inputs, -1)).requires_grad_()
    expected, found = whole(given), part(own_given)
    expected.backward(weights)
    found.backward(own(weights, -1) if dim == 0 else weights)
    if dim == 0:  # the outputs are parts, and the gradient of the input is a sum
        dist.all_reduce(own_given.grad)
        pairs = {"output": (found, own(expected, -1)), "input": (own_given.grad, given.grad)}
        pairs["bias"] = (part[0].bias.grad, own(whole[0].bias.grad, 0))
    else:
        output = found.detach().clone()
        dist.all_reduce(output)
        pairs = {"output": (output + whole[0].bias, expected), "input": (own_given.grad, own(given.grad, -1))}
    pairs["weight"] = (part[0].weight.grad, own(whole[0].weight.grad, dim))
    return {name: float((one - other).abs().max() / other.abs().max()) for name, (one, other) in pairs.items()}


def layers() -> dict[str, dict[str, float]]:
    found = {f"{recipe}, {dim}": one_layer(recipe, dim) for recipe in RECIPES for dim in (0, 1)}
    found["powers of two, 1"] = one_layer("tensorwise", 1, round_scales_to_power_of_2=True)
    with scales_of_parts():
        found["scales of parts, 0"] = one_layer("tensorwise", 0)
        found["scales of parts, 1"] = one_layer("tensorwise", 1)
    return found


@contextmanager
def scales_of_parts() -> Iterator[None]:
    """What the reduction is for: without it, each rank scales its part alone."""
    from headway.layouts.tensor import float8

    alone = SimpleNamespace(all_reduce=lambda tensor, *_: tensor, wait_tensor=lambda tensor: tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "functional_collectives", alone)
        yield


# ---------------------------------------------------------------- a Llama, by hand on one process and split


def llama(num_layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, num_hidden_layers=num_layers, use_cache=False, tie_word_embeddings=False,
            pad_token_id=None, **sizes,
        )
    )  # fmt: skip


class InFloat32(nn.Module):
    """Without autocast, ranks add float32 terms, and nothing but a wrong scale makes a large difference."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, **given: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.inner(**given)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(seed))


def convert(model: nn.Module, recipe: str, is_cast: bool) -> nn.Module:
    """torchao's layers where Headway has them: all but the first and the last."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][1:-1]
    torchao.convert_to_float8_training(
        model, config=config_of(recipe, pad_inner_dim=True), module_filter_fn=lambda module, name: name in names
    )
    for name in names if is_cast else ():  # torchao's layer only knows CUDA's autocast
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    return model


def by_hand(make: Any, recipe: str | None, updates: int = 2) -> dict[str, Any]:
    model = build_seeded(0, make)
    if recipe is not None:
        convert(model, recipe, is_cast=make is not InFloat32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, grads = [], dict[str, torch.Tensor]()
    for seed in range(updates):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch(seed), labels=batch(seed)).loss
        loss.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "grads": grads}


def split(
    make: Any, recipe: str | None, layout: str = "tp", updates: int = 2, handlers: tuple[Any, ...] = (), **options: Any
) -> dict[str, Any]:
    """The same through the Accelerator. Ranks with the same data have the same rows."""
    float8 = [] if recipe is None else [Float8Options(emulate=True, recipe=recipe)]
    accelerator = Accelerator(
        cpu=ON_CPU, strategy=layout, mixed_precision="bf16" if recipe is None else "fp8",
        kwargs_handlers=[*float8, *handlers], **options,
    )  # fmt: skip
    model = build_seeded(0, make)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    data, losses, grads = accelerator.strategy.data_shard, [], dict[str, torch.Tensor]()
    for seed in range(updates):
        ids = batch(seed).chunk(data.count)[data.index]
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            grads = grads or {name: gather_full_tensor(p.grad.detach()).clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce_mean(loss.item(), 1)))
    found = {
        "losses": losses,
        "grads": grads,
        "weights": gather_weights(model),
        "split": [name for name, module in model.named_modules() if type(module).__name__ == "SplitFloat8Linear"],
        "gathered in float8": check_scales(model),
    }
    accelerator.end_training()
    return found


def check_scales(model: nn.Module) -> int:
    """Number of weights that are gathered in float8, each with the scale of the whole weight."""
    count = 0
    for parameter in model.parameters():
        local = get_local_shard(parameter)
        if hasattr(local, "fsdp_pre_all_gather"):
            count += 1
            assert float(local._precomputed_scale) == pytest.approx(
                448 / float(gather_full_tensor(parameter).abs().max())
            )
    return count


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest difference of losses; norm of each gradient's difference relative to the gradient's norm, the largest."""
    pairs = [(found["grads"][name], grad) for name, grad in expected["grads"].items()]
    return {
        "losses": max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)),
        "grads": max(float((one - other).norm() / other.norm()) for one, other in pairs),
    }


def save_and_load(folder: str) -> None:
    """A checkpoint of parts is one of whole float32 weights, which another layout continues from."""
    losses = []
    for layout in ("tp", "fsdp"):
        accelerator = Accelerator(
            cpu=ON_CPU, strategy=layout, mixed_precision="fp8", kwargs_handlers=[Float8Options(emulate=True)]
        )
        model = build_seeded(0 if layout == "tp" else 1, llama)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        for seed in (0, 1, 2):
            if seed == 2 and layout == "tp":
                accelerator.save_state(folder, blocking=True)
                saved = gather_weights(model)
            elif seed == 2:
                accelerator.load_state(folder)
                assert all(torch.equal(tensor, saved[name]) for name, tensor in gather_weights(model).items())
            loss = model(input_ids=batch(seed), labels=batch(seed)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.end_training()
    assert losses[1] == pytest.approx(losses[0], abs=0.01)


# ---------------------------------------------------------------- pipelines


def staged(schedule: str) -> dict[str, torch.Tensor]:
    handlers = [Float8Options(emulate=True), PipelineOptions(schedule=schedule, num_microbatches=4)]
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp", mixed_precision="fp8", kwargs_handlers=handlers)
    model = build_seeded(0, lambda: llama(4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        accelerator.forward_backward(batch(seed), lambda ids: model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    accelerator.end_training()
    return found


def accumulated() -> dict[str, torch.Tensor]:
    """The micro-batches of the pipeline one after the other, by hand."""
    model = convert(build_seeded(0, lambda: llama(4)), "tensorwise", is_cast=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        for ids in batch(seed).chunk(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def pipelines() -> dict[str, float]:
    """The largest difference of any weight of this rank's stages."""
    expected = accumulated()
    return {
        schedule: max(float((tensor - expected[name]).abs().max()) for name, tensor in staged(schedule).items())
        for schedule in ("interleaved", "zbv")
    }


# ---------------------------------------------------------------- all of it, in as few processes as will do

IN_SEQUENCES = TensorParallelOptions(sequence_parallel=True)
SAME = {
    "plain": {},
    "sequences": {"handlers": (IN_SEQUENCES,)},
    "loss, recomputed": {"handlers": (TensorParallelOptions(loss_parallel=True), ActivationCheckpointing())},
    "compiled": {"dynamo_backend": "aot_eager"},
}
"""Ways to compute the same with two parts of each matrix."""


def on_two(folder: str) -> dict[str, Any]:
    Accelerator(cpu=ON_CPU)
    found: dict[str, Any] = {"layers": layers(), "float32": {}}
    for recipe in ("tensorwise", "rowwise"):
        found["float32"][recipe] = compare(split(InFloat32, recipe), by_hand(InFloat32, recipe))
    with scales_of_parts():
        found["parts"] = compare(split(InFloat32, "tensorwise"), by_hand(InFloat32, "tensorwise"))
    expected = by_hand(llama, "tensorwise")
    runs = {name: split(llama, "tensorwise", **options) for name, options in SAME.items()}
    found["losses"] = {name: run["losses"] for name, run in runs.items()}
    found["split"] = runs["plain"]["split"]
    found["float8"] = compare(runs["plain"], expected)
    found["bf16"] = compare(split(llama, None), by_hand(llama, None))
    found["rounding"] = compare(expected, by_hand(llama, None))
    save_and_load(folder)
    found["pipelines"] = pipelines()
    return found


def on_four() -> dict[str, Any]:
    runs = {layout: split(llama, "tensorwise", layout) for layout in ("fsdp+tp=2", "ddp=2+tp=2")}
    runs["compiled"] = split(
        llama, "tensorwise", "fsdp+tp=2", handlers=(IN_SEQUENCES, ActivationCheckpointing()), dynamo_backend="aot_eager"
    )
    return {**runs, "hand": compare(runs["fsdp+tp=2"], by_hand(llama, "tensorwise"))}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_two, 2, str(tmp_path_factory.mktemp("float8")), timeout=880)


def test_a_split_layer_equals_the_whole_layer(two: list[dict[str, Any]]) -> None:
    for found in two:
        for name, differences in found["layers"].items():
            if name.startswith("scales of parts"):
                assert max(differences.values()) > 0.01, (name, differences)
            else:
                assert max(differences.values()) < 2e-6, (name, differences)


def test_a_split_model_equals_torchao_on_one_process(two: list[dict[str, Any]]) -> None:
    for found in two:
        for differences in found["float32"].values():
            assert differences["losses"] < 1e-5, found
            assert differences["grads"] < 1e-4, found
        assert found["parts"]["grads"] > 0.02, found
        # Under autocast, ranks add terms in bfloat16: more values are rounded to another neighbor in float8.
        assert found["float8"]["losses"] < 0.02
        assert found["bf16"]["grads"] < found["float8"]["grads"] < found["rounding"]["grads"], found
        assert len(found["split"]) == 13
        for losses in found["losses"].values():
            assert losses == pytest.approx(found["losses"]["plain"], abs=1e-5)


def test_a_pipeline_equals_torchao_that_accumulates(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert set(found["pipelines"].values()) == {0.0}, found["pipelines"]


@pytest.mark.slow
def test_sharded_parts_equal_replicated_parts() -> None:
    for found in run_ranks(on_four, 4, timeout=880):
        sharded, copied, compiled = (found[name] for name in ("fsdp+tp=2", "ddp=2+tp=2", "compiled"))
        # The values that are gathered in float8 are those to which each rank would round the whole weight.
        assert sharded["losses"] == copied["losses"] == compiled["losses"]
        assert sharded["gathered in float8"] == 13
        assert (
            max(float((tensor - copied["weights"][n]).abs().max()) for n, tensor in sharded["weights"].items()) < 1e-6
        )
        assert found["hand"]["losses"] < 0.03
