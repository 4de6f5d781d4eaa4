"""Make the functions that `headway.forecast` needs for a transformers model, from the options of `headway estimate`."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.common.optional import require
from headway.errors import ConfigError
from headway.forecasting.forecaster import LongestSequence
from headway.forecasting.tracing.attention_masks import POSITIONS, set_attention
from headway.planning.sources import ModelSource, TransformersStep, get_loss


def parse_lora_rank(text: str) -> int:
    """Parse the LoRA rank N from the text "r=N" or "N".

    Raises:
        ConfigError: If the text has another form, or the rank is below 1.
    """
    number = text.removeprefix("r=")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--lora {text!r}: give the rank of LoRA's matrices, as in --lora r=16")
    return int(number)


class ForecastFunctions(NamedTuple):
    """Functions that `headway.forecast` needs.

    Attributes:
        model_fn: Function that makes the model.
        batch_fn: Function that makes a batch of a given number of samples.
        loss: Function that computes the loss from outputs and targets.
    """

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], dict[str, torch.Tensor]]
    loss: Callable[[Any, Any], torch.Tensor]


def make_forecast_functions(
    source: ModelSource,
    attention: str | None = None,
    dtype: str | None = None,
    lora: int | None = None,
    is_packed: bool = False,
) -> ForecastFunctions:
    """Return the functions that `headway.forecast` needs for a transformers model.

    Args:
        source: Source of a transformers model.
        attention: Attention kernel "eager" or "sdpa", or None for the model's default.
        dtype: Name of the weights' dtype, or None for float32. With `lora`, also "int4", for QLoRA.
        lora: Rank of the matrices that PEFT's LoRA adds, which are then the only trainable weights. With None, all
            weights are trained.
        is_packed: Whether each sequence contains several documents, so that the model builds a mask from their
            positions.

    Raises:
        ConfigError: If it is unknown how to call the model. Also if `is_packed` is True and the model takes no position
            IDs. The returned `model_fn` raises it if PEFT does not know which layers of the model to adapt.
        OptionalDependencyMissing: If PEFT, or bitsandbytes for int4, is not installed.
    """
    step = source.step
    if not isinstance(step, TransformersStep):
        raise ConfigError(
            f"{source.title}: {source.batch}; a forecast on the command line needs a transformers model of tokens or images. "
            "From Python, headway.forecast(model_fn, batch_fn) takes any"
        )

    if is_packed:
        parameters = inspect.signature(source.make().forward).parameters
        if not step.longest or POSITIONS not in parameters:
            raise ConfigError(f"{source.title}: its forward takes no {POSITIONS}, so documents cannot be packed")
        step = replace(step, names=(*step.names, POSITIONS))
        attention = attention or "sdpa"  # selects an attention for which transformers builds the mask

    def make_model() -> nn.Module:
        model = source.make()
        if attention is not None:
            set_attention(model, attention)
        if dtype == "int4":
            model = _quantize_to_four_bits(model)
        elif dtype is not None:
            model.to(getattr(torch, dtype))
        return model if lora is None else _add_lora(model, lora)

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        return replace(step, batch=size).inputs()

    def compute_loss(outputs: Any, targets: Any) -> torch.Tensor:
        return get_loss(outputs)  # the model has computed it, because the batch contains labels

    return ForecastFunctions(make_model, make_batch, compute_loss)


def _quantize_to_four_bits(model: nn.Module) -> nn.Module:
    """Quantize a model to four bits as in QLoRA: NF4 weights with double quantization, and bfloat16 compute.

    All other parameters are in float32. The steps are those of transformers and PEFT. Source: T. Dettmers et al.,
    QLoRA, 2023, https://arxiv.org/abs/2305.14314.
    """
    peft, transformers = (require(name, "--dtype int4 needs", name) for name in ("peft", "transformers"))
    require("bitsandbytes", "--dtype int4 needs", "bitsandbytes")
    quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    # bfloat16 is the usual dtype of a checkpoint. transformers' own `to` refuses quantized models.
    nn.Module.to(model, torch.bfloat16)
    quantizer.postprocess_model(model)
    prepared: nn.Module = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared


def _add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Add PEFT's LoRA matrices of a given rank to the model, and return it.

    Raises:
        ConfigError: If PEFT cannot adapt the model.
        OptionalDependencyMissing: If PEFT is not installed.
    """
    peft = require("peft", "--lora needs", "peft")
    try:
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank))
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT cannot adapt {type(model).__name__}: {error}") from error
    return adapted


def make_length_search(source: ModelSource) -> LongestSequence:
    """Return the options of a search for the longest sequence that a transformers model can train with.

    The search ends at the model's number of positions. It tries multiples of 64 tokens, or only the full length if the
    model has fewer positions.

    Args:
        source: Source of the model.

    Raises:
        ConfigError: If the model's inputs are not tokens.
    """
    step = source.step
    if not isinstance(step, TransformersStep) or not step.longest:
        raise ConfigError(f"{source.title}: {source.batch}; only a model of tokens has a longest sequence")
    return LongestSequence(
        lambda size, length: replace(step, batch=size, shape=(length,)).inputs(),
        limit=step.longest,
        multiple=min(LongestSequence.multiple, step.longest),
    )
