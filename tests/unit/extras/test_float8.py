"""Test float8: its options, unsupported hardware and layouts, and the layers of a model that are converted."""

import copy
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headway import Accelerator, AORecipeKwargs, Float8Options, ShardingOptions
from headway.core.config.engines import collect_options
from headway.core.config.mesh import parse_layout
from headway.core.runtime.device import Hardware
from headway.core.strategies.build import _check_float8
from headway.errors import ConfigError, OptionalDependencyMissing, PrepareError, UnsupportedError
from headway.extras.float8 import check_float8, convert_model

EMULATED = Float8Options(emulate=True)


def test_contradicting_options_are_refused():
    for given, message in (
        ({"recipe": "delayed"}, "recipe='delayed'.*allowed: tensorwise, rowwise, rowwise_with_gw_hp"),
        ({"recipe": "rowwise", "fsdp_all_gather": True}, "only recipe='tensorwise' can gather weights"),
        ({"module_filter": bool, "keeps": "head"}, "a module_filter, which alone selects the layers"),
        ({"config": object(), "emulate": True}, "a config, which contains recipe"),
    ):
        with pytest.raises(ConfigError, match=message):
            Float8Options(**given)
    with pytest.raises(ConfigError, match="AORecipeKwargs has a config"):
        AORecipeKwargs(config=object(), pad_inner_dim=False).options
    with pytest.raises(ConfigError, match="contains two Float8Options"):
        collect_options([Float8Options(), AORecipeKwargs()])
    assert Float8Options(keeps="head").keeps == ("head",)


def test_options_are_accepted_by_accelerates_names():
    given = AORecipeKwargs(module_filter_func=bool, pad_inner_dim=False, enable_fsdp_float8_all_gather=True)
    expected = Float8Options(module_filter=bool, pad_inner_dim=False, fsdp_all_gather=True)
    assert collect_options([given]).float8 == expected
    config = SimpleNamespace(emulate=True, enable_fsdp_float8_all_gather=False)
    found = AORecipeKwargs(config=config).options
    assert found.is_emulated
    assert found.all_gather is False
    assert AORecipeKwargs().options.all_gather is None


def test_hardware_without_float8_is_refused_by_name(monkeypatch):
    with pytest.raises(
        UnsupportedError, match=r"this run computes on cpu.*capability 8.9.*Float8Options\(emulate=True\)"
    ):
        Accelerator(cpu=True, mixed_precision="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UnsupportedError, match=r"NVIDIA A100 \(compute capability 8.0\) has no float8 matrix units"):
        check_float8(Hardware("cuda"), collect_options([]))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    with pytest.raises(UnsupportedError, match="gfx90a"):
        check_float8(Hardware("cuda"), collect_options([]))


def test_missing_torchao_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(OptionalDependencyMissing, match=r"pip install 'torchao>=0.18'"):
        check_float8(Hardware("cpu"), collect_options([EMULATED]))


def test_options_without_float8_are_an_error():
    with pytest.raises(ConfigError, match="but mixed_precision='bf16'; pass mixed_precision='fp8'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[EMULATED])


@pytest.mark.parametrize(
    ("layout", "options", "sharding", "message"),
    [
        ("ep", EMULATED, None, r"expert parallelism \(ep\): experts would compute in bf16.*'hsdp', 'tp'"),
        ("cp", EMULATED, None, r"context parallelism \(cp\), whose parts of sequences.*mixed_precision='bf16'"),
        ("pp=2+tp=2", EMULATED, None, r"pipelines with tensor parallelism \(pp\+tp\)"),
        ("pp=2+fsdp=2", Float8Options(emulate=True, fsdp_all_gather=True), None, r"all_gather=True in pipelines \(pp\)"),
        ("fsdp", Float8Options(emulate=True, fsdp_all_gather=True), 2, "reshard_after_forward=2. Use .*all_gather=False"),
    ],
)  # fmt: skip
def test_unsupported_layouts_are_refused(layout, options, sharding, message):
    sizes = parse_layout(layout).resolve(4, 4)
    with pytest.raises(UnsupportedError, match=message):
        _check_float8(sizes, ShardingOptions(reshard_after_forward=sharding), options)


@pytest.mark.parametrize("layout", ["fsdp", "hsdp=2", "tp", "fsdp+tp=2", "ddp=2+tp=2", "pp", "pp=2+fsdp=2"])
def test_supported_layouts_are_accepted(layout):
    _check_float8(parse_layout(layout).resolve(4, 4), ShardingOptions(reshard_after_forward=2), EMULATED)


def test_deepspeed_is_refused():
    with pytest.raises(UnsupportedError, match="not supported with DeepSpeed"):
        Accelerator(cpu=True, mixed_precision="fp8", strategy="zero2", kwargs_handlers=[EMULATED])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4"])
def test_formats_with_scales_per_block_are_refused_by_name(name):
    reason = (
        "no MXFP8 or NVFP4: torchao trains with them only in prototypes for Blackwell GPUs. Use mixed_precision='fp8'"
    )
    for emulate in (False, True):
        with pytest.raises(ConfigError, match=f"recipe='{name}'.*{reason}"):
            Float8Options(recipe=name, emulate=emulate)
    with pytest.raises(ConfigError, match=f"mixed_precision='{name}'.*{reason}"):
        Accelerator(cpu=True, mixed_precision=name)


def test_a_part_of_a_matrix_needs_sizes_for_float8_too():
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from headway.layouts.tensor.float8 import LayerSplit

    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 16))
    splits = {"1": LayerSplit(0, 2, "group"), "2": LayerSplit(1, 3, "group")}  # 24 outputs, 16 inputs
    convert_model(model, EMULATED, None, splits)
    assert [type(module).__name__ for module in model] == ["Linear", "Linear", "SplitFloat8Linear", "Linear"]
    assert model[2].split is splits["2"]


class Model(nn.Module):
    """Model with layers that can be converted, and layers that cannot for several reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.odd, self.hooked, self.shared = nn.Linear(48, 40), nn.Linear(40, 48), nn.Linear(48, 48)
        self.again, self.attention = self.shared, nn.MultiheadAttention(48, 2, batch_first=True)
        self.head = nn.Linear(48, 16)
        self.hooked.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hooked(self.odd(self.third(self.second(self.first(x)))))
        x = self.again(self.shared(x))[None]
        return self.head(self.attention(x, x, x)[0])


def list_converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_only_suitable_layers_are_converted(caplog):
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model = Model().eval()
    names, held = list(model.state_dict()), list(model.parameters())
    with caplog.at_level(logging.INFO, "headway"):
        assert convert_model(model, EMULATED) is model
    assert list_converted(model) == ["second", "third"]
    assert list(model.state_dict()) == names
    assert all(new is old for new, old in zip(model.parameters(), held))
    for part in (
        "2 of 8 linear layers of Model compute in float8 (tensorwise, emulated)", "first and last (first, head)",
        "sizes that are no multiples of 16 (odd)", "with hooks (hooked)", "in several places of the model (shared)",
        "of a class of their own (attention.out_proj)",
    ):  # fmt: skip
        assert part in caplog.text
    before = model.second
    convert_model(model, EMULATED)
    assert model.second is before
    assert list_converted(copy.deepcopy(model)) == ["second", "third"]
    with torch.autocast("cpu", torch.bfloat16):
        assert model.second(torch.ones(2, 32)).dtype == torch.bfloat16
        assert model.second(input=torch.ones(2, 32)).dtype == torch.bfloat16


def test_layers_are_chosen_by_options():
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    chosen = {
        "ends": (Float8Options(emulate=True, keeps_first_and_last=False), ["first", "second", "third", "head"]),
        "name": (Float8Options(emulate=True, keeps=("third",)), ["second"]),
        "class": (Float8Options(emulate=True, keeps=(Model,)), []),
        "filter": (Float8Options(emulate=True, module_filter=lambda module, name: name in ("first", "odd")), ["first"]),
    }
    for options, expected in chosen.values():
        assert list_converted(convert_model(Model(), options)) == expected


def test_model_without_converted_layers_is_logged(caplog):
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    for model, message in ((nn.Linear(16, 16), "the model itself"), (nn.Conv1d(1, 1, 1), "it has none")):
        convert_model(model, EMULATED)
        assert f"no linear layer of {type(model).__name__} computes in float8" in caplog.text
        assert message in caplog.text


def test_ranks_that_convert_different_layers_are_an_error():
    pytest.importorskip("torchao.float8", reason="torchao is not installed")

    class Two:
        def gather_numbers(self, values):
            return [list(values), [values[0], values[1] + 1]]

    model = Model()
    with pytest.raises(PrepareError, match=r"by rank, how many: 2, 2"):
        convert_model(model, EMULATED, Two())
    assert not list_converted(model)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_training_equals_plain_torchao_bit_for_bit(recipe):
    torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from dataclasses import replace

    from tests.distributed.layouts import GPT, build_seeded, make_tokens, mean_square

    accelerator = Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[Float8Options(recipe=recipe, emulate=True)]
    )
    model, plain = build_seeded(0, GPT), build_seeded(0, GPT)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torchao.convert_to_float8_training(
        plain,
        config=replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True),
        module_filter_fn=lambda module, name: name not in ("blocks.0.attention", "head"),
    )
    for name in list_converted(plain):  # torchao's layer supports only CUDA's autocast
        plain.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    by_hand = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for seed in range(3):
        accelerator.backward(mean_square(model, make_tokens(seed)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_square(plain, make_tokens(seed))
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
    assert len(list_converted(model)) == len(list_converted(plain)) == 7
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
