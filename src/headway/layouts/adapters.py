"""Checks of PEFT adapters and preparation of 4-bit weights, made before a layout distributes a model."""

from collections.abc import Mapping

import torch

from headway.errors import PrepareError

_TYPES_WITH_KEYS = {"PREFIX_TUNING", "CARTRIDGE"}
"""Types of adapters that give each attention layer keys and values, instead of more tokens or weights."""


def list_adapter_types(model: torch.nn.Module) -> set[str]:
    """Return the types of a model's PEFT adapters, such as "LORA". The set is empty if the model has no adapters."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return set()
    types = (getattr(config, "peft_type", None) for config in configs.values())
    return {str(getattr(each, "value", each)) for each in types}  # an enum member, or text


def prepare_for_sharding(model: torch.nn.Module) -> None:
    """Check a model's adapters before FSDP shards the model, and keep bitsandbytes from repacking its weights.

    Args:
        model: Model to shard.

    Raises:
        PrepareError: If the model has AdaLoRA adapters.
    """
    check_adapters(model, "a sharded layout")
    keep_packing(model)


def check_adapters(model: torch.nn.Module, layout: str) -> None:
    """Raise an error if a model has adapters whose loss needs parameters of all layers.

    Args:
        model: Model that the layout will distribute.
        layout: Name of the layout, for the message.

    Raises:
        PrepareError: If the model has AdaLoRA adapters.
    """
    if "ADALORA" in list_adapter_types(model):
        raise PrepareError(
            f"{type(model).__name__} has AdaLoRA adapters. After its forward, PEFT adds a penalty on the matrices of all adapters to "
            f"the loss, but under {layout} each rank has only parts of them. "
            "Use LoRA (LoraConfig), or one of the layouts ddp, zero1 and zero2"
        )


def keep_packing(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights differently for inference on CPUs.

    In eval mode, bitsandbytes' layers repack their weights and update the quantization state to match. FSDP's shards keep
    the original packing, so after the next all-gather the state would no longer describe the weights.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_added_keys(model: torch.nn.Module, reason: str) -> None:
    """Raise an error if a model has adapters that give keys and values to its attention layers.

    Args:
        model: Model that the layout will split.
        reason: Reason why the layout cannot split such adapters, for the message. It is a complete sentence.

    Raises:
        PrepareError: If the model has adapters of prefix tuning or of PEFT's "cartridge".
    """
    if types := sorted(list_adapter_types(model) & _TYPES_WITH_KEYS):
        raise PrepareError(
            f"{type(model).__name__} has adapters of the type {types[0]}, which give keys and values to each attention layer. "
            f"{reason}. Use prompt tuning or p-tuning, or one of the layouts fsdp, ddp, ep and pp"
        )
