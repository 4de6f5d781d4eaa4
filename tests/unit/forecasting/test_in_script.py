"""Test `accelerator.forecast`: it equals `headway.forecast` and a real run, and leaves the model unchanged."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway import Accelerator, ActivationCheckpointing, ExponentialMovingAverage
from headway.errors import ConfigError, DataError, LossError, UnsupportedError
from headway.forecasting.device import calibration, local_device
from headway.forecasting.device.calibration import CalibrationRecord
from headway.forecasting.device.devices import DEVICES, GIB, name_card
from headway.forecasting.device.local_device import describe_local_device, measure_budget
from headway.forecasting.tracing.batch_resizer import BatchResizer
from headway.forecasting.tracing.recipe import StepRecipe

MSE = nn.functional.mse_loss


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


def build_net():
    return nn.Sequential(*[Block() for _ in range(3)], nn.BatchNorm1d(64))


def make_batch(size):
    return torch.ones(size, 64), torch.zeros(size, 64)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def forecast_both(accelerator, **options):
    """Return (forecast of the prepared model by `accelerator.forecast`, forecast by `headway.forecast`)."""
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inside = accelerator.forecast(model, make_batch(24), optimizer=optimizer, loss=MSE)
    outside = headway.forecast(build_net, make_batch, loss=MSE, batch_size=24, device="cpu", largest=False, **options)
    return inside, outside


# ---------------------------------------------------------------- results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({}, {}),
        ({"mixed_precision": "bf16"}, {"precision": "bf16"}),
        ({"mixed_precision": "fp16"}, {"precision": "fp16"}),
        ({"gradient_accumulation_steps": 7}, {"accumulation": 2}),
        ({"kwargs_handlers": [ActivationCheckpointing()]}, {"recompute": True}),
    ],
)
def test_forecast_equals_that_of_the_model_as_it_is_trained(setting, options):
    accelerator = Accelerator(cpu=True, **setting)
    inside, outside = forecast_both(accelerator, **options)
    assert inside.allocated == outside.allocated
    assert inside.split == outside.split
    assert (inside.batch_size, inside.largest_batch, inside.budget, inside.fits) == (24, None, None, None)
    model = build_net()
    before = accelerator.forecast(model, make_batch(24), optimizer=torch.optim.AdamW, loss=MSE)
    assert before.allocated == inside.allocated


def test_checkpointing_is_repeated_and_undone(accelerator):
    model = accelerator.prepare(build_net())
    ask = partial(accelerator.forecast, model, make_batch(256), optimizer=torch.optim.AdamW, loss=MSE)
    plain = ask().allocated
    accelerator.checkpoint_activations(model)
    assert ask().allocated < plain
    accelerator.keep_activations(model)
    assert ask().allocated == plain


def test_averages_of_the_model_are_counted(accelerator):
    model = accelerator.prepare(build_net())
    ask = partial(accelerator.forecast, model, make_batch(64), optimizer=torch.optim.AdamW, loss=MSE)
    plain, size = ask(), sum(parameter.numel() for parameter in model.parameters())
    assert "averages" not in plain.split
    averages = [
        ExponentialMovingAverage(model, name="one"),
        ExponentialMovingAverage(model, dtype=torch.float64, name="two"),
    ]
    found = ask()
    assert found.split["averages"] == found.allocated - plain.allocated == size * (4 + 8)
    assert all(each.num_updates == 0 for each in averages)


def test_forecast_equals_a_real_run(accelerator):
    model = build_net()
    found = accelerator.forecast(
        model, make_batch(64), optimizer=torch.optim.SGD(model.parameters(), momentum=0.9), loss=MSE, max_norm=1.0
    )
    recipe = StepRecipe(lambda parameters: torch.optim.SGD(parameters, momentum=0.9), MSE, max_norm=1.0)
    assert found.allocated == pytest.approx(measure_peak(model, recipe, lambda: make_batch(64)), rel=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "padding", "packed", "positions"])
def test_mask_is_left_out_where_a_run_leaves_it_out(accelerator, what):
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, vocab_size=50,
        use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.ones(8, 128, dtype=torch.long)
    mask = torch.ones_like(tokens)
    mask[:, 100:] = 0 if what == "padding" else 1
    given = transformers.BatchEncoding({"input_ids": tokens, "labels": tokens, "attention_mask": mask})
    if what in ("packed", "positions"):
        places = torch.arange(128) if what == "positions" else torch.cat([torch.arange(50), torch.arange(78)])
        given = {"input_ids": tokens, "labels": tokens, "position_ids": places.expand(8, 128).contiguous()}
    found = accelerator.forecast(model, given, optimizer=torch.optim.AdamW)
    taken = measure_peak(
        model, StepRecipe(torch.optim.AdamW), lambda: {name: tensor.clone() for name, tensor in given.items()}
    )
    assert found.allocated == pytest.approx(taken, rel=2e-3)
    assert any("masks something" in caveat for caveat in found.caveats) == (what == "padding")


@pytest.mark.slow
def test_largest_batch_is_searched_within_a_budget(accelerator):
    model = build_net()
    optimizer = torch.optim.AdamW(model.parameters())
    ask = partial(accelerator.forecast, model, optimizer=optimizer, loss=MSE, budget="8MiB")
    found = ask(make_batch(24))
    assert found.fits
    assert found.num_traces <= 6
    assert ask(make_batch(found.largest_batch), largest=False).fits
    assert ask(make_batch(found.largest_batch + 1), largest=False).fits is False
    made = ask(make_batch(24), batch_fn=make_batch)
    assert made.largest_batch == found.largest_batch
    one = accelerator.forecast(
        model,
        {"x": make_batch(24)[0], "y": make_batch(24)[1]},
        optimizer=optimizer,
        forward=lambda model, given: MSE(model(given["x"]), given["y"]),
        budget="8MiB",
    )
    assert one.largest_batch >= found.largest_batch  # the outputs are freed when the function returns


def test_another_device_can_be_named(accelerator):
    found = accelerator.forecast(
        build_net(), make_batch(24), optimizer=torch.optim.AdamW, loss=MSE, device="t4", largest=False
    )
    assert found.device == "t4"
    assert found.budget == DEVICES["t4"].memory
    assert any("memory of t4 besides tensors" in caveat for caveat in found.caveats)


# ---------------------------------------------------------------- unchanged model


def take_snapshot(model, optimizer):
    """Return what a forecast must not change: tensors, gradients, modules, hooks, the optimizer's state and RNG states.

    The tensors of the optimizer's state are not copied.
    """
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: (id(p), id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()},
        [
            (id(part), type(part), part.training, len(part._forward_hooks), len(part._forward_pre_hooks))
            for part in model.modules()
        ],
        optimizer.state_dict(),
        (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
    )


def are_equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(are_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return first == second


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [False, True])
def test_model_stays_unchanged(accelerator, is_prepared):
    model, called = build_net(), []
    model[0].up.register_forward_hook(lambda *_: called.append(1))
    own = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(own, 1)  # patches its step
    prepared, optimizer = accelerator.prepare(model, own) if is_prepared else (model, own)
    for _ in range(2):
        MSE(prepared(make_batch(8)[0]), make_batch(8)[1]).backward()
        own.step()
    model[1].eval()
    before, num_calls = take_snapshot(model, own), len(called)
    with torch.no_grad():
        accelerator.forecast(prepared, make_batch(8), optimizer=optimizer, loss=MSE, budget="4MiB")
    assert are_equal(before, take_snapshot(model, own))
    del called[num_calls:]
    MSE(prepared(make_batch(8)[0]), make_batch(8)[1]).backward()
    assert len(called) == num_calls + 1


def test_function_that_keeps_the_original_model_is_detected(accelerator):
    model = build_net()
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)
    before = take_snapshot(model, optimizer := torch.optim.AdamW(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"the model's own parameters \(0.up.weight"):
        accelerator.forecast(model, make_batch(8), optimizer=optimizer, loss=MSE)
    assert are_equal(before, take_snapshot(model, optimizer))


# ---------------------------------------------------------------- invalid use


class ReadingBlock(Block):
    def forward(self, x):
        return super().forward(x) * float(x.sum())


class LockedBlock(Block):
    def __init__(self):
        super().__init__()
        self.lock = __import__("threading").Lock()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": "net"}, ConfigError, "got a str as its model"),
        ({"batch": ("a", 3)}, DataError, "no tensor with a first dimension"),
        ({"loss": None}, LossError, "Give loss="),
        ({"loss": None, "forward": lambda m, b: None}, LossError, "the loss is missing"),
        ({"forward": lambda m, b: m(b[0]).sum()}, ConfigError, "give one of them"),
        ({"optimizer": "adamw"}, ConfigError, "optimizer='adamw'"),
        ({"optimizer": torch.optim.SGD(build_net().parameters())}, ConfigError, "that are not the model's"),
        ({"model": ReadingBlock()}, UnsupportedError, r"test_in_script.py:\d+ in forward"),
        ({"model": LockedBlock()}, UnsupportedError, "cannot be copied"),
        ({"model": nn.Sequential(nn.LazyLinear(64))}, UnsupportedError, "lazy module"),
        ({"device": "gpu"}, ConfigError, "not in the table"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(accelerator, options, error, text):
    given = {"model": Block(), "batch": make_batch(8), "optimizer": torch.optim.AdamW, "loss": MSE, **options}
    with pytest.raises(error, match=text):
        accelerator.forecast(given.pop("model"), given.pop("batch"), **given)


def test_unsupported_options_are_refused():
    compiling = Accelerator(cpu=True, dynamo_backend="eager")
    with pytest.raises(UnsupportedError, match="dynamo_backend"):
        compiling.forecast(build_net(), make_batch(8), loss=MSE)
    offloading = Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointing(offload=True)])
    with pytest.raises(UnsupportedError, match="leave offload out"):
        offloading.forecast(build_net(), make_batch(8), loss=MSE)


# ---------------------------------------------------------------- batches of other sizes


def test_rows_are_repeated_and_cut_with_their_strides():
    images = torch.zeros(6, 3, 8, 8).to(memory_format=torch.channels_last)
    rows = BatchResizer({"images": images, "weights": torch.ones(10), "names": ["a"] * 6, "scale": torch.ones(())})
    assert rows.num_rows == 6
    assert any("[10]" in caveat for caveat in rows.caveats)
    for size in (1, 5, 6, 7, 40):
        made = rows(size)
        real = torch.zeros(size, 3, 8, 8).to(memory_format=torch.channels_last)
        assert made["images"].is_meta
        assert made["images"].shape == real.shape
        assert size == 1 or made["images"].stride() == real.stride()
        assert made["weights"].shape == (10,)
        assert made["names"] == ["a"] * 6


# ---------------------------------------------------------------- present device


def simulate_gpu(name, memory, capability, reserved=0, allocated=0):
    """Return a backend of kind "cuda" whose module reports the properties of a simulated GPU, as torch.cuda does."""
    module = SimpleNamespace(
        get_device_name=lambda _: name,
        get_device_properties=lambda _: SimpleNamespace(total_memory=memory, major=capability[0], minor=capability[1]),
        memory_reserved=lambda _: reserved,
        memory_allocated=lambda _: allocated,
    )
    return SimpleNamespace(kind="cuda", module=module)


@pytest.mark.parametrize(
    ("name", "gib", "capability", "entry"),
    [
        ("NVIDIA GeForce RTX 3090", 23.7, (8, 6), "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", 79.3, (8, 0), "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, (8, 0), "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, (9, 0), "h100"),
        ("Tesla V100-SXM2-16GB", 15.8, (7, 0), "v100-16gb"),
        ("NVIDIA L40S", 44.5, (8, 9), "l40s"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, (8, 0), None),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, (8, 9), None),
    ],
)
def test_gpu_is_found_by_its_name_and_memory(name, gib, capability, entry):
    memory = int(gib * GIB)
    found = describe_local_device(simulate_gpu(name, memory, capability), torch.device("cuda:0"))
    assert (found.memory, found.capability) == (memory, capability)
    assert found.name == (entry or name)
    assert ("is not in the table" in found.source) == (entry is None)
    if entry:
        assert found.overhead == DEVICES[entry].overhead


@pytest.mark.parametrize(("product", "gib"), [("NVIDIA RTX 6000 Ada Generation", 47.5), ("NVIDIA L40S", 44.5)])
def test_calibrated_gpu_uses_the_measured_values(monkeypatch, tmp_path, product, gib):
    """The calibration record has invented values. tests/gpu contains the measurement."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    memory, capability = int(gib * GIB), (8, 9)
    record = CalibrationRecord(product, memory, capability, 123 << 20, 16 << 20, "2.13.0", "2026-11-23")
    calibration.write_record(tmp_path / calibration.FILE_NAME, name_card(product, memory), record)
    found = describe_local_device(simulate_gpu(product, memory, capability), torch.device("cuda:0"))
    assert found.overhead.likely == 123 << 20
    assert "2026-11-23" in found.source


def test_free_memory_excludes_that_of_other_programs(monkeypatch):
    monkeypatch.setattr(local_device, "read_free_bytes", lambda *_: 10 * GIB)
    card = simulate_gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), reserved=6 * GIB, allocated=5 * GIB)
    target = describe_local_device(card, torch.device("cuda:0"))
    left = measure_budget(card, torch.device("cuda:0"), target, tensor_bytes=2 * GIB)
    assert left == 10 * GIB + (6 - 3) * GIB + target.overhead.least, "3 GiB belong to other models"
    with pytest.raises(UnsupportedError, match="'mps'"):
        describe_local_device(SimpleNamespace(kind="mps"), torch.device("mps"))


@pytest.mark.slow
def test_limit_of_the_address_space_is_the_budget_on_a_cpu(accelerator, monkeypatch):
    monkeypatch.setattr(local_device, "read_free_address_space", lambda: 40 << 20)
    model = build_net()
    found = accelerator.forecast(model, make_batch(8), optimizer=torch.optim.AdamW(model.parameters()), loss=MSE)
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert found.budget == (30 << 20) + weights
    assert found.largest_batch > 8
