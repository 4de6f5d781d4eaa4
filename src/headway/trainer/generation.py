"""Generated tokens as predictions of an evaluation (`predict_with_generate`), as in transformers' Seq2SeqTrainer."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.errors import ConfigError, MetricError
from headway.trainer.arguments import TrainingArguments
from headway.trainer.data import Batch

_DEFAULT_MAX_LENGTH = 20
"""Maximum length if neither `max_length` nor `max_new_tokens` is set.

In transformers, the first batch may have one token more, because its Seq2SeqTrainer sets the default only afterward.
"""
_LENGTHS = frozenset({"max_length", "max_new_tokens"})
"""Arguments of `generate` that limit the length. One of them is enough."""
_DECODER_INPUTS = ("decoder_input_ids", "decoder_attention_mask")
"""Inputs that a collator may have made from the labels, as DataCollatorForSeq2Seq does."""


def set_generation_config(model: torch.nn.Module, args: TrainingArguments) -> None:
    """Set `model.generation_config` to that of the arguments, if they have one.

    Args:
        model: Model that generates.
        args: Arguments with `predict_with_generate` and `generation_config`.

    Raises:
        ConfigError: If `predict_with_generate` is set, but the model has no `generate` method or no generation config, or
            if the generation config contradicts itself.
    """
    can_generate = callable(getattr(model, "generate", None))
    if can_generate and args.generation_config is not None:
        model.generation_config = _load_generation_config(args.generation_config)
    if args.predict_with_generate and not (can_generate and getattr(model, "generation_config", None) is not None):
        missing = "generation_config" if can_generate else "generate()"
        raise ConfigError(
            f"predict_with_generate=True needs a model with generate() and a generation_config, but {type(model).__name__} has no "
            f"{missing}; give a transformers model that generates text, or leave predict_with_generate out"
        )


def _load_generation_config(source: Any) -> Any:
    """Return a `GenerationConfig`: a copy of the given one, or one that is read from a file, a folder or the Hub.

    Raises:
        ConfigError: If the generation config contradicts itself. `save_pretrained` would refuse it after the training.
    """
    from transformers import GenerationConfig

    if isinstance(source, GenerationConfig):
        config = deepcopy(source)
    elif Path(source).is_file():
        config = GenerationConfig.from_pretrained(Path(source).parent, Path(source).name)
    else:
        config = GenerationConfig.from_pretrained(source)
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ConfigError(f"generation_config={source!r} cannot be saved with the model: {error}") from error
    return config


class Generator:
    """Generator of predictions: the tokens that a model generates for each row of a batch.

    Args:
        accelerator: Accelerator that has prepared the model.
        args: Arguments with `generation_max_length` and `generation_num_beams`.
        processing_class: Tokenizer or similar object, whose `pad_token_id` fills up short rows. None: that of the
            model's config, or of its generation config.
        options: Arguments of `generate` that the caller of `evaluate` or `predict` has given, by name. They take
            precedence over `args`, and both over the model's `generation_config`.
    """

    def __init__(
        self, accelerator: Accelerator, args: TrainingArguments, processing_class: Any, options: Mapping[str, Any]
    ) -> None:
        self._processing_class = processing_class
        self._options = {name: value for name, value in options.items() if value is not None}
        if args.generation_max_length is not None and not _LENGTHS & self._options.keys():
            self._options["max_length"] = args.generation_max_length
        if args.generation_num_beams is not None:
            self._options.setdefault("num_beams", args.generation_num_beams)
        # A forward of a sharded model is a collective, so a rank whose rows are complete must go on calling it.
        is_collective = not accelerator.strategy.capabilities.lone_forward
        self._options.setdefault("synced_gpus", is_collective and accelerator.num_processes > 1)

    def generate(self, model: Any, model_inputs: Batch, labels: Any) -> tuple[torch.Tensor, Any]:
        """Return the generated tokens and the labels, both filled up with the padding token as transformers does.

        They are filled up to the maximum length in the model's `generation_config`.

        Args:
            model: Prepared model.
            model_inputs: Batch on the device, without labels.
            labels: Labels of the batch. Only a tensor is filled up.

        Raises:
            MetricError: If the batch is no dict, or there is not one generated row per row of the batch.
            ConfigError: If neither the processing class nor the model has a padding token.
        """
        if not isinstance(model_inputs, Mapping):
            raise MetricError(
                "predict_with_generate needs batches that are dicts of generate()'s arguments, but a batch is a "
                f"{type(model_inputs).__name__}"
            )
        inputs = dict(model_inputs)
        decoder_inputs = inputs.get("decoder_input_ids")
        has_labels = isinstance(labels, torch.Tensor)
        if decoder_inputs is not None and has_labels and decoder_inputs.shape == labels.shape:
            # They were made from the labels. The model would continue them instead of generating freely.
            inputs = {name: value for name, value in inputs.items() if name not in _DECODER_INPUTS}
        options = dict(self._options)
        config = model.generation_config
        if config.max_length is None and config.max_new_tokens is None and not _LENGTHS & options.keys():
            options["max_length"] = _DEFAULT_MAX_LENGTH
        tokens: torch.Tensor = model.generate(**inputs, **options)
        num_rows = len(next(iter(inputs.values())))
        if len(tokens) != num_rows:
            raise MetricError(
                f"generate() returned {len(tokens)} rows for a batch of {num_rows}; predictions need one row each, so leave "
                "num_return_sequences out"
            )
        return self._fill_up(tokens, model), self._fill_up(labels, model) if has_labels else labels

    def _fill_up(self, tokens: torch.Tensor, model: Any) -> torch.Tensor:
        """Return tokens of shape (rows, length) with the padding token added up to the maximum length."""
        config = model.generation_config
        length, num_new = tokens.shape[-1], config.max_new_tokens
        width = _DEFAULT_MAX_LENGTH if config.max_length is None else config.max_length
        if length >= width:
            width = 0 if num_new is None else num_new + 1
        if length >= width:
            return tokens
        return torch.nn.functional.pad(tokens, (0, width - length), value=self._get_pad_token_id(model))

    def _get_pad_token_id(self, model: Any) -> int:
        """Return the padding token of the processing class, or without one, that of the model.

        Raises:
            ConfigError: If there is no padding token.
        """
        source = self._processing_class
        if source is not None and hasattr(source, "pad_token_id"):
            token = source.eos_token_id if source.pad_token_id is None else source.pad_token_id
        else:
            token = getattr(getattr(model, "config", None), "pad_token_id", None)
        if token is None:
            token = model.generation_config.pad_token_id
        if token is None:
            raise ConfigError(
                "predict_with_generate fills up short rows with the padding token, but neither the processing_class, the model's "
                "config nor its generation_config has a pad_token_id; set one"
            )
        return int(token)
