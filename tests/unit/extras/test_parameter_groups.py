"""Parameter groups: which tensors get which options, compared with sets and scales that are written by hand."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headway
from headway import Accelerator, MatrixOptimizer
from headway.errors import ConfigError
from headway.trainer.optimizer import make_parameter_groups


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class RootMeanNorm(Norm):
    pass


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_bias = nn.Parameter(torch.zeros(1, width))  # a bias with two dimensions
        self.norm2 = RootMeanNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.GELU(), nn.Linear(2 * width, width))
        self.gamma = nn.Parameter(torch.ones(width))


class ViT(nn.Module):
    """A vision transformer with the names and the order of timm's."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 4)})
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)


DECAYED = {
    "patch_embed.proj.weight", "head.weight",
    *(f"blocks.{i}.{name}" for i in range(3) for name in ("qkv.weight", "mlp.0.weight", "mlp.2.weight")),
}  # fmt: skip


def list_decayed(groups: headway.ParameterGroups) -> set[str]:
    return {name for name, options in groups.options.items() if options["weight_decay"]}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_norms_embeddings_and_vectors_have_no_weight_decay(device: str) -> None:
    with torch.device(device):
        model = ViT()
    groups = headway.parameter_groups(model, 0.05)
    assert [(group["name"], group["weight_decay"], "lr" in group) for group in groups] == [
        ("no_decay", 0.0, False),
        ("decay", 0.05, False),
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in groups[1]["params"]} == DECAYED == list_decayed(groups)
    assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())


@pytest.mark.parametrize(
    ("kinds", "added"),
    [
        (["norms", "biases", "embeddings"], {f"blocks.{i}.gamma" for i in range(3)}),
        (["norms", "biases", "vectors"], {"cls_token", "pos_embed"}),
        (
            ["biases", "embeddings"],
            {
                *(f"blocks.{i}.{name}" for i in range(3) for name in ("gamma", "norm1.weight", "norm2.weight")),
                "norm.weight",
            },
        ),
        (["norms", "vectors", "embeddings"], {f"blocks.{i}.q_bias" for i in range(3)}),
    ],
)
def test_each_kind_can_be_left_out(kinds: list[str], added: set[str]) -> None:
    assert list_decayed(headway.parameter_groups(ViT(), no_decay=kinds)) == DECAYED | added


def test_no_decay_accepts_names_of_parameters_and_modules() -> None:
    kinds = ("biases", "norms", "embeddings", "vectors")
    groups = headway.parameter_groups(ViT(), no_decay=[*kinds, "blocks.*.mlp", "head.w*"])
    assert list_decayed(groups) == {"patch_embed.proj.weight", *(f"blocks.{i}.qkv.weight" for i in range(3))}
    assert list_decayed(headway.parameter_groups(nn.Linear(2, 2), no_decay="weight")) == {"bias"}


# Scales of timm 1.0.31's `param_groups_layer_decay(vit, layer_decay=0.5)` for a VisionTransformer with three blocks.
SCALES = {
    "cls_token": 0.0625, "pos_embed": 0.0625, "patch_embed.proj.weight": 0.0625, "patch_embed.proj.bias": 0.0625,
    "blocks.0": 0.125, "blocks.1": 0.25, "blocks.2": 0.5, "norm.weight": 0.5, "norm.bias": 0.5, "head.weight": 1.0,
    "head.bias": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("layers", [None, "blocks"])
def test_layer_decay_has_the_scales_of_timm(layers: str | None) -> None:
    groups = headway.parameter_groups(ViT(), lr=0.1, layer_decay=0.5, layers=layers)
    assert len(groups.options) == 4 + 3 * 10 + 4
    for name, options in groups.options.items():
        assert options["lr"] == pytest.approx(0.1 * SCALES.get(name, SCALES.get(name[:8], -1.0))), name
    assert [group["name"] for group in groups][:3] == ["layer_0/no_decay", "layer_0/decay", "layer_1/no_decay"]
    assert list_decayed(groups) == DECAYED


def test_the_last_layer_has_the_full_rate_without_a_head() -> None:
    model = ViT()
    del model.head
    rates = {
        name: options["lr"]
        for name, options in headway.parameter_groups(model, lr=1.0, layer_decay=0.5).options.items()
    }
    assert (rates["norm.weight"], rates["blocks.2.gamma"], rates["cls_token"]) == (1.0, 1.0, 0.125)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.first = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(2)))
        self.between = nn.Conv2d(4, 4, 1, bias=False)
        self.second = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(2)))
        self.head = nn.Linear(4, 2)


def test_layers_by_several_names_and_by_a_function() -> None:
    model = Stages()
    with pytest.raises(ConfigError, match="repeated blocks in 'first', 'second', so the order"):
        headway.parameter_groups(model, lr=1.0, layer_decay=0.5)
    by_name = headway.parameter_groups(model, lr=1.0, layer_decay=0.5, layers=("first", "second")).options
    expected = {"stem.bias": 2**-5, "first.0.0.bias": 2**-4, "first.1.1.bias": 2**-3, "between.weight": 2**-3,
                "second.0.0.bias": 2**-2, "second.1.0.bias": 2**-1, "head.bias": 1.0}  # fmt: skip
    assert {name: by_name[name]["lr"] for name in expected} == expected
    numbers = {"stem": 0, "first": 1, "between": 1, "second": 4, "head": 5}
    by_function = headway.parameter_groups(
        model, lr=1.0, layer_decay=0.5, layers=lambda name: numbers[name.partition(".")[0]]
    ).options
    assert (by_function["stem.bias"]["lr"], by_function["second.0.0.bias"]["lr"]) == (2**-5, 0.5)


class ConvNet(nn.Module):
    def __init__(self, *features: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(4, 2)


def list_rates(model: nn.Module) -> dict[str, Any]:
    """Return the learning rates of all weights, with `features` as blocks, `lr=1` and `layer_decay=0.5`."""
    groups = headway.parameter_groups(model, lr=1.0, layer_decay=0.5, layers="features")
    return {name: options["lr"] for name, options in groups.options.items() if name.endswith("weight")}


def test_blocks_without_parameters_are_no_layers() -> None:
    model = ConvNet(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    expected = {"stem.weight": 0.125, "features.1.weight": 0.25, "features.3.weight": 0.5, "classifier.weight": 1.0}
    assert list_rates(model) == expected
    with pytest.raises(ConfigError, match="none of the 2 blocks of ConvNet has parameters"):
        list_rates(ConvNet(nn.ReLU(), nn.MaxPool2d(2)))


def test_repeated_uses_of_a_block_are_one_layer() -> None:
    shared, tied = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, bias=False)
    tied.weight = shared.weight
    expected = {"stem.weight": 0.25, "features.0.weight": 0.5, "classifier.weight": 1.0}
    assert list_rates(ConvNet(shared, shared, tied)) == expected


def test_overrides_replace_options_and_later_ones_win() -> None:
    groups = headway.parameter_groups(
        ViT(),
        lr=0.1,
        layer_decay=0.5,
        overrides={
            "blocks.0": {"lr": 0.3},
            "*.gamma": {"weight_decay": 0.7, "betas": (0.5, 0.9)},
            "blocks.0.gamma": {"lr": 0.4},
        },
    )
    assert groups.options["blocks.0.qkv.weight"] == {"lr": 0.3, "weight_decay": 0.1}
    assert groups.options["blocks.0.gamma"] == {"lr": 0.4, "weight_decay": 0.7, "betas": (0.5, 0.9)}
    assert groups.options["blocks.1.gamma"] == {"lr": 0.025, "weight_decay": 0.7, "betas": (0.5, 0.9)}
    assert "layer_1/decay/blocks.0/*.gamma/blocks.0.gamma" in [group["name"] for group in groups]
    torch.optim.AdamW(groups)  # accepts them


def test_tied_and_frozen_parameters() -> None:
    model = ViT()
    model.register_module("decoder", nn.Linear(8, 5, bias=False))
    model.register_module("words", nn.Embedding(5, 8))
    model.decoder.weight = model.words.weight
    model.head.requires_grad_(False)
    groups = headway.parameter_groups(model, overrides={"words": {"lr": 0.5}})
    members = [p for group in groups for p in group["params"]]
    assert sum(p is model.words.weight for p in members) == 1
    assert not any(p is model.head.weight for p in members)
    # The first name is the one of the Linear. As a tied embedding, it has no weight decay, and both names select it.
    assert groups.options["decoder.weight"] == {"weight_decay": 0.0, "lr": 0.5}
    assert "words.weight" not in groups.options
    assert "decoder.weight = words.weight" in str(groups)
    assert str(groups).endswith("requires_grad is False: 2 tensors\n    head.weight\n    head.bias")


def test_hidden_matrices_and_the_rest() -> None:
    model = ViT()
    groups = headway.parameter_groups(model, 0.05)
    hidden, rest = groups.split_matrices(lr=0.02)
    assert set(hidden.options) == {name for name in DECAYED if name.startswith("blocks")}
    assert set(rest.options) == {name for name, _ in model.named_parameters()} - set(hidden.options)
    assert [(group["lr"], group["weight_decay"]) for group in hidden] == [(0.02, 0.05)]
    torch.optim.Muon(hidden)
    by_name, _ = groups.split_matrices("head", "patch_embed", max_ndim=4)
    assert set(by_name.options) == {"head.weight", "patch_embed.proj.weight"}
    MatrixOptimizer(by_name, partial(torch.optim.Muon, lr=0.02))


def test_layer_decay_scales_the_rate_of_hidden_matrices() -> None:
    groups = headway.parameter_groups(ViT(), lr=0.1, layer_decay=0.5, overrides={"blocks.1.qkv": {"lr": 0.7}})
    with pytest.raises(ConfigError, match=r"pass lr= to split_matrices\(\)"):
        groups.split_matrices()
    hidden, rest = groups.split_matrices(lr=0.02)
    assert hidden.options["blocks.0.qkv.weight"]["lr"] == pytest.approx(0.02 / 8)
    assert hidden.options["blocks.1.qkv.weight"]["lr"] == 0.7
    assert rest.options["blocks.0.gamma"]["lr"] == pytest.approx(0.1 / 8)


def test_one_object_builds_several_optimizers() -> None:
    groups = headway.parameter_groups(nn.Linear(2, 2), 0.3)
    assert [group["lr"] for group in torch.optim.AdamW(groups, lr=0.5).param_groups] == [0.5, 0.5]
    assert [group["lr"] for group in torch.optim.SGD(groups, lr=0.25).param_groups] == [0.25, 0.25]
    assert all(set(group) == {"params", "name", "weight_decay"} for group in groups)


def test_summary_lists_every_tensor() -> None:
    groups = headway.parameter_groups(ViT(), 0.05, lr=1e-3, overrides={"head": {"lr": 1e-2}})
    assert str(groups).splitlines()[-8:] == [
        "decay: lr 0.001, weight_decay 0.05; 10 tensors, 1,728 values",
        "    patch_embed.proj.weight",
        "    blocks.{0-2}.qkv.weight",
        "    blocks.{0-2}.mlp.{0, 2}.weight",
        "decay/head: lr 0.01, weight_decay 0.05; 1 tensor, 80 values",
        "    head.weight",
        "no_decay/head: lr 0.01, weight_decay 0; 1 tensor, 10 values",
        "    head.bias",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_decay": ["biases", "pos_embedding"]}, "no_decay has the name pattern 'pos_embedding', which selects no"),
        ({"overrides": {"classifier": {"lr": 1.0}}}, "overrides has the name pattern 'classifier', which selects no"),
        ({"overrides": {"head": 0.1}}, r"overrides\['head'\] is 0.1; give a dict of options"),
        ({"overrides": {"head": {"params": []}}}, "sets 'params', which is no option"),
        ({"layer_decay": 0.5}, "layer_decay= needs lr="),
        ({"layer_decay": 1.5, "lr": 0.1}, "layer_decay=1.5; give a factor above 0"),
        ({"layers": "blocks"}, "layers= has no effect without layer_decay="),
        ({"layers": "encoder", "layer_decay": 0.5, "lr": 0.1}, "layers names 'encoder', which ViT does not contain"),
        ({"layers": "head", "layer_decay": 0.5, "lr": 0.1}, "'head', which ViT contains without children"),
        ({"layers": lambda name: True, "layer_decay": 0.5, "lr": 0.1}, "layers= returned True for 'cls_token'"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; give a finite number from 0"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1'; give a finite number"),
        ({"weight_decay": None}, "weight_decay=None; give a finite number"),
        ({"lr": float("nan")}, "lr=nan; give a finite number"),
        ({"lr": 0.1, "layer_decay": "0.5"}, "layer_decay='0.5'; give a finite number"),
        ({"no_decay": None}, r"no_decay=None; give kinds and name patterns, or \(\)"),
        ({"overrides": ["head"]}, r"overrides=\['head'\]; give a dict from name patterns to options"),
        ({"layers": {}.get, "layer_decay": 0.5, "lr": 0.1}, "layers= returned None for 'cls_token'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        headway.parameter_groups(ViT(), **arguments)


def test_parameters_instead_of_the_model() -> None:
    with pytest.raises(ConfigError, match="got a generator; give the model, not its parameters"):
        headway.parameter_groups(ViT().parameters())  # type: ignore[arg-type]


def test_overrides_of_frozen_parameters_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = ViT()
    model.head.requires_grad_(False)
    headway.parameter_groups(model, overrides={"blocks": {"lr": 1.0}})
    assert not caplog.text
    headway.parameter_groups(model, overrides={"head": {"lr": 1.0}})
    assert "overrides['head'] of parameter_groups() has no effect, because requires_grad is False" in caplog.text


def test_compiled_models_have_the_groups_of_the_model() -> None:
    arguments: dict[str, Any] = {"lr": 0.1, "layer_decay": 0.5, "layers": "blocks"}
    compiled: Any = torch.compile(ViT())
    assert (
        headway.parameter_groups(compiled, **arguments).options == headway.parameter_groups(ViT(), **arguments).options
    )


def test_models_without_trainable_parameters_or_blocks() -> None:
    with pytest.raises(ConfigError, match="Linear has no parameters with requires_grad=True"):
        headway.parameter_groups(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ConfigError, match="repeated blocks in no module"):
        headway.parameter_groups(nn.Linear(2, 2), lr=0.1, layer_decay=0.5)
    with pytest.raises(ConfigError, match="no matrix with 2 dimensions in repeated blocks"):
        headway.parameter_groups(nn.Linear(2, 2)).split_matrices()
    with pytest.raises(ConfigError, match="'blocks', which selects no parameter"):
        headway.parameter_groups(nn.Linear(2, 2)).split_matrices("blocks")
    with pytest.raises(ConfigError, match="max_ndim=1; give 2, or more"):
        headway.parameter_groups(ViT()).split_matrices(max_ndim=1)


# ---------------------------------------------------------------- transformers


def build_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=20,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config)


def build_bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20
    )
    return transformers.BertForSequenceClassification(config)


def build_t5() -> nn.Module:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    return transformers.T5ForConditionalGeneration(config)


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.encoder = nn.ModuleDict({"words": self.words, "layer": nn.Linear(8, 8)})


@pytest.mark.parametrize("build", [build_llama, build_bert, build_t5, SharedModule])
def test_same_sets_as_in_transformers(build: Any, tmp_path: Any) -> None:
    model = build()
    theirs = transformers.Trainer(model, transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True))
    decaying = theirs.get_decay_parameter_names(model)
    expected = {name for name, _ in model.named_parameters() if name in decaying}
    assert 0 < len(expected) < len(list(model.parameters()))
    assert list_decayed(headway.parameter_groups(model, no_decay=("biases", "norms"))) == expected
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in make_parameter_groups(model, 0.1)[0]["params"]} == expected


# ---------------------------------------------------------------- training


def test_updates_and_names_survive_a_resume_with_reordered_groups(tmp_path: Any) -> None:
    def build(order: int) -> tuple[Accelerator, nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        groups = list(headway.parameter_groups(model, 0.5, lr=0.1, overrides={"2": {"lr": 0.2}}))[::order]
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups))
        return accelerator, model, optimizer

    accelerator, model, optimizer = build(1)
    by_hand = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    by_hand.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(
        [
            {"params": [by_hand[0].weight], "lr": 0.1, "weight_decay": 0.5},
            {"params": [by_hand[0].bias, *by_hand[1].parameters()], "lr": 0.1, "weight_decay": 0.0},
            {"params": [by_hand[2].weight], "lr": 0.2, "weight_decay": 0.5},
            {"params": [by_hand[2].bias], "lr": 0.2, "weight_decay": 0.0},
        ]
    )
    x = torch.randn(8, 4)

    def update(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    update(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    accelerator.free_memory()
    accelerator, model, optimizer = build(-1)
    accelerator.load_state(tmp_path / "saved")
    assert [group["name"] for group in optimizer.param_groups] == ["no_decay/2", "decay/2", "no_decay", "decay"]
    update(accelerator, model, optimizer)
    for _ in range(2):
        by_hand(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
