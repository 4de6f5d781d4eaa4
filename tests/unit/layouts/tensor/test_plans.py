"""Test that plans are read, and invalid ones refused, before a model changes. No process group is needed for this."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from headway.core.config.parallelism import STYLES, TensorParallelOptions
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import head_counts, plans, styles
from headway.layouts.tensor.crossings import SplitAxis
from headway.layouts.tensor.parameter_splits import find_dimensions
from headway.layouts.tensor.sequence_split import arrange_sequences
from headway.layouts.tensor.tensor_parallel import _find_head
from tests.distributed.cut_models import GPT, GPT_PLAN

AXIS = SplitAxis(None, None, 0, 2)


def read_and_check(model: nn.Module, plan: dict[str, Any] | None, **more: Any) -> plans.ModelSplit:
    options = TensorParallelOptions(plan, **more)
    model_split = plans.read_plan(model, AXIS, options)
    head_counts.check_heads(model, model_split, AXIS.size, options)
    if options.sequence_parallel:
        arrange_sequences(model, model_split)
    find_dimensions(model, model_split, AXIS)
    return model_split


def test_every_style_can_be_built() -> None:
    assert all(isinstance(styles.make_style(name), styles.SplitStyle) for name in STYLES)


def test_star_matches_one_part_of_a_name() -> None:
    assert plans.is_match("blocks.*.up", "blocks.11.up")
    assert not plans.is_match("blocks.*", "blocks.1.up")
    model_split = read_and_check(GPT(), GPT_PLAN)
    assert {"blocks.0.attention.q", "blocks.1.down", "head"} < set(model_split.split_modules)


def test_tied_embedding_is_split_like_its_head() -> None:
    assert isinstance(read_and_check(GPT(), GPT_PLAN).split_modules["tokens"].style, styles.EmbeddingRowwise)
    assert "tokens" not in read_and_check(GPT(tied=False), GPT_PLAN).split_modules


class CountedHeads(nn.Module):
    """Module that uses its number of heads in forward."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.q, self.out = num_heads, nn.Linear(8, 8), nn.Linear(8, 8)


WRONG = {
    "no such module": (GPT, {"blocks.*.attention.w": "colwise"}, {}, ConfigError, r"similar names: blocks\.\d\.attention"),
    "twice": (GPT, {**GPT_PLAN, "blocks.0.up": "rowwise"}, {}, ConfigError, "'blocks.0.up' twice"),
    "twice, by its weight": (GPT, {"head": "colwise", "head.weight": "colwise"}, {}, ConfigError, "splits 'head.weight' twice"),
    "not linear": (GPT, {"norm": "colwise"}, {}, PrepareError, "'norm' .LayerNorm.: it is not a linear layer"),
    "no embedding": (GPT, {"head": "embedding_rowwise"}, {}, PrepareError, "not a torch.nn.Embedding"),
    "no style": (GPT, {"head": 3}, {}, ConfigError, "gives 'head' a int"),
    "packed": (lambda: nn.Sequential(nn.Linear(4, 6)), {"0": "packed_colwise"}, {}, PrepareError, "6 outputs cannot be divided"),
    "ties in two ways": (GPT, {"head": "colwise", "tokens": "embedding_colwise"}, {}, ConfigError, "in two ways"),
    "no plan": (GPT, None, {}, ConfigError, "no tensor-parallel plan of its own, and its structure gives none"),
    "heads": (lambda: GPT(width=12, num_heads=3), GPT_PLAN, {}, PrepareError, "3 heads, which cannot be divided among 2"),
    "counted heads": (CountedHeads, {"q": "colwise"}, {}, PrepareError, "divide=.'num_heads',"),
    "counts that do not divide": (
        lambda: CountedHeads(3), {"q": "colwise"}, {"divide": ("num_heads",)}, ConfigError, "'num_heads' is 3",
    ),
    "no count": (CountedHeads, {"q": "colwise"}, {"keep": ("heads",)}, ConfigError, "no such integer"),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), {"0": "embedding_rowwise"}, {}, PrepareError, "max_norm=1.0",
    ),
    "a sequence without blocks": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": "colwise", "1": "rowwise"}, {"sequence_parallel": True},
        PrepareError, "a ModuleList of blocks",
    ),
    "a whole matrix among cut ones": (
        GPT, {"blocks.*.attention.q": "colwise", "blocks.*.attention.out": "rowwise"}, {"sequence_parallel": True},
        PrepareError, "'blocks.0.attention.k' .Linear. stays replicated",
    ),
    "few rows": (lambda: nn.Sequential(nn.Linear(4, 1)), {"0": "colwise"}, {}, PrepareError, "cannot be split along dimension 0"),
    "a bias of terms": (GPT, {"blocks.0.down.bias": "rowwise"}, {}, PrepareError, "count as many times"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_plan_is_an_error_that_names_the_module(name: str) -> None:
    make, plan, more, error, said = WRONG[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=said):
        read_and_check(model, plan, **more)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("is_adapted", [False, True])
def test_unknown_style_in_the_plan_of_a_model_is_a_config_error(is_adapted: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"0": "twowise"}  # type: ignore[assignment]
    if is_adapted:
        model = importlib.import_module("peft").get_peft_model(
            model, importlib.import_module("peft").LoraConfig(target_modules=["0"])
        )
    with pytest.raises(ConfigError, match="the style 'twowise', which is not supported"):
        plans.read_plan(model, AXIS, TensorParallelOptions())


def test_counts_may_be_kept_or_divided() -> None:
    read_and_check(CountedHeads(), {"q": "colwise"}, keep=("num_heads",))
    model, options = CountedHeads(), TensorParallelOptions({"q": "colwise"}, divide=("num_heads",))
    model_split = plans.read_plan(model, AXIS, options)
    head_counts.check_heads(model, model_split, 2, options)
    head_counts.divide_counts(model, model_split, 2, options)
    assert model.num_heads == 2


def test_loss_parallel_needs_a_head_that_gathers() -> None:
    model_split = plans.read_plan(
        GPT(), AXIS, TensorParallelOptions({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    )
    with pytest.raises(ConfigError, match="colwise_gather_output"):
        _find_head(GPT(), model_split)


# ---------------------------------------------------------------- transformers


def iterate_transformers_plans() -> Iterator[tuple[str, dict[str, str]]]:
    import transformers.models as models
    from transformers import PretrainedConfig

    for family in pkgutil.iter_modules(models.__path__):
        for part in pkgutil.iter_modules([f"{models.__path__[0]}/{family.name}"]):
            if not part.name.startswith("configuration_"):
                continue
            module = importlib.import_module(f"transformers.models.{family.name}.{part.name}")
            for name, kind in vars(module).items():
                is_own = (
                    inspect.isclass(kind) and issubclass(kind, PretrainedConfig) and kind.__module__ == module.__name__
                )
                if is_own and kind.__dict__.get("base_model_tp_plan"):
                    yield f"{family.name}.{name}", kind.base_model_tp_plan


@pytest.mark.slow
def test_plans_of_transformers_use_supported_styles() -> None:
    found = dict(iterate_transformers_plans())
    refused = {
        name: [*sorted(set(plan.values()) - set(STYLES)), *plans.list_faults(plan)]
        for name, plan in found.items()
        if set(plan.values()) - set(STYLES) or plans.list_faults(plan)
    }
    assert len(found) >= len(refused) + 140, refused
    # Plans of transformers with which a model would compute other results. The last one is new in 5.24.
    assert set(refused) <= {
        "inkling.InklingTextConfig",
        "inkling2.Inkling2TextConfig",
        "inkling2_loop.Inkling2LoopTextConfig",
    }


def test_all_styles_of_transformers_are_supported() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    of_experts = {"grouped_gemm", "ep_dispatch_experts"}
    assert set(ALL_PARALLEL_STYLES) - of_experts == set(STYLES) - {"packed_qkv_colwise"}
