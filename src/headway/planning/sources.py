"""Find the model to plan or forecast: from a transformers config, a model type, or a user's function."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.common.optional import require
from headway.core.config.values import suggest_word
from headway.errors import ConfigError
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning.dry_run.step_drivers import Step
from headway.planning.model_types import check_model_folder, make_unknown_model_error
from headway.planning.tasks import TASKS

_AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
"""transformers' Auto classes to try in order for a config that names no class.

Encoders are also registered as causal models, so more specific classes are tried first.
"""
_TOKEN_LABEL_CLASSES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Endings of the names of model classes that take one label per token."""
_DEFAULT_TOKENS = 4096
"""Default number of tokens per sample, unless the model allows only fewer."""
_UNLIMITED_TOKENS = 1 << 20
"""Maximum number of tokens that is assumed for a model whose config has no limit."""


@dataclass(frozen=True)
class ModelSource:
    """Model to plan or forecast, with a training step.

    Attributes:
        title: Description of the model for the user.
        make: Function that makes the model. Call it within `init_empty_weights()`, so that parameters take no memory.
        step: Function that takes the model and returns the loss of one data shard's batch. None if it is unknown how to
            call the model, or if the user's function returns no step.
        tokens: Tokens in the batch of `step`, or 0 if unknown.
        batch: Description of the batch for the user.
        has_tp_plan: Whether the model defines how tensor parallelism splits its weights.
    """

    title: str
    make: Callable[[], nn.Module]
    step: Step | None
    tokens: int
    batch: str
    has_tp_plan: bool = False


def find_source(text: str, batch: int = 1, sequence: int | None = None, task: str | None = None) -> ModelSource:
    """Return a `ModelSource` for the model that a text identifies.

    Args:
        text: Folder with a transformers config.json, path of such a file, model type ("llama"), or "module:function".
            The function returns a model, or a pair of a model and a training step. The other arguments do not apply to
            it.
        batch: Samples of one data shard.
        sequence: Tokens per sample, or None for the largest number that the model allows, up to 4096.
        task: One of `TASKS`, or None for the task of the config's architecture or else of the model type.

    Raises:
        ConfigError: If the text has none of these forms, the model cannot be built, or the sequence is longer than the
            model allows.
        OptionalDependencyMissing: If transformers is not installed.
    """
    path = Path(text)
    if path.is_file() or (path / "config.json").is_file():
        return make_config_source(read_config(path), text, batch, sequence, task)
    module, colon, function = text.partition(":")
    if colon:
        return _load_function_source(module, function, text)
    if path.is_dir():
        raise ConfigError(f"{text}: there is no config.json in this folder; save_pretrained() writes one")
    transformers = require("transformers", f"planning the model type {text!r} needs", "transformers")
    known = sorted(transformers.CONFIG_MAPPING.keys())
    if text not in known:
        raise make_unknown_model_error(text, known)
    return make_config_source(transformers.CONFIG_MAPPING[text](), text, batch, sequence, task)


def load_meta_model(folder: str | Path) -> nn.Module:
    """Make a model on the meta device from the `config.json` in a local folder.

    Code in the folder is not run.

    Raises:
        ConfigError: If there is no such folder or config, or transformers cannot build a model from it.
        OptionalDependencyMissing: If transformers is not installed.
    """
    folder = Path(folder)
    check_model_folder(folder)
    return build_meta_model(read_config(folder), str(folder))


def read_config(folder: str | Path) -> Any:
    """Read a transformers config from a local folder, or from a file such as config.json.

    Raises:
        ConfigError: If transformers cannot read the config.
        OptionalDependencyMissing: If transformers is not installed.
    """
    transformers = require("transformers", "building a model from its config.json needs", "transformers")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ConfigError(f"{folder}: transformers cannot build a model from its config.json: {error}") from error


def build_meta_model(
    config: Any, origin: str, auto_classes: Sequence[str] = ("AutoModel",), include_buffers: bool = False
) -> nn.Module:
    """Build the model of a transformers config with its parameters on the meta device.

    Args:
        config: Config of transformers.
        origin: Origin of the config, for error messages.
        auto_classes: Names of transformers' Auto classes, used if the config names no class that transformers has. The first
            that supports the config is used, or else the last. Default: ("AutoModel",).
        include_buffers: Whether buffers are on the meta device, too. Default: False.

    Raises:
        ConfigError: If transformers cannot build the model.
        OptionalDependencyMissing: If transformers is not installed.
    """
    transformers = require("transformers", "building a model from its config.json needs", "transformers")
    named_classes = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    try:
        with init_empty_weights(include_buffers=include_buffers):
            if named_classes and named_classes[0] is not None:
                model = named_classes[0](config)
            else:
                autos = [getattr(transformers, name) for name in auto_classes]
                auto = next((auto for auto in autos if type(config) in auto._model_mapping), autos[-1])
                model = auto.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{origin}: transformers cannot build a model from its config.json: {error}") from error
    assert isinstance(model, nn.Module)
    return model


def make_config_source(
    config: Any, origin: str, batch: int = 1, sequence: int | None = None, task: str | None = None
) -> ModelSource:
    """Make the `ModelSource` of a transformers model from its config.

    Args:
        config: Config of transformers. It is changed in place: `use_cache` becomes False, and if `task` is given,
            `architectures` becomes None.
        origin: Origin of the config, for messages.
        batch: Samples of one data shard.
        sequence: Tokens per sample, or None for the largest number that the model allows, up to 4096.
        task: One of `TASKS`, or None for the task of the config's architecture or else of the model type.

    Raises:
        ConfigError: If transformers cannot build the model, or the sequence is longer than the model allows.
    """
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training generates no tokens, so it needs no cache
    auto_classes: tuple[str, ...] = _AUTO_CLASSES
    if task is not None:
        # Without `architectures`, build_meta_model uses the task's Auto class instead of the class that the config names.
        config.architectures = None
        auto_classes = (TASKS[task].auto_class,)

    def make_model() -> nn.Module:
        # A real run without padding builds no causal mask. On meta tensors, transformers would always build one.
        return skip_causal_mask(build_meta_model(config, origin, auto_classes, include_buffers=True))

    model = make_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    title = f"{type(model).__name__}: {num_parameters:,} parameters"
    has_tp_plan = bool(getattr(model, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None))
    planned_step = _make_step(model, origin, batch, sequence, task)
    return ModelSource(title, make_model, planned_step.step, planned_step.tokens, planned_step.description, has_tp_plan)


class _PlannedStep(NamedTuple):
    """Training step of a transformers model.

    Attributes:
        step: Training step, or None if it is unknown how to call the model.
        tokens: Number of tokens in the batch, or 0 if its inputs are not tokens.
        description: Description of the batch, or the reason why there is none.
    """

    step: Step | None
    tokens: int
    description: str


def _make_step(model: nn.Module, origin: str, batch: int, sequence: int | None, task: str | None) -> _PlannedStep:
    """Return the training step of a transformers model on a batch of zeros.

    Args:
        model: Model of the transformers config.
        origin: Origin of the config, for messages.
        batch: Samples of one data shard.
        sequence: Tokens per sample, or None for the largest number that the model allows, up to 4096.
        task: One of `TASKS`. None: labels or decoder inputs are chosen by the model's class.

    Raises:
        ConfigError: If the sequence is longer than the model allows.
    """
    token_labels = _name_second_input(model) if task is None else TASKS[task].token_labels
    sample_labels = () if task is None else TASKS[task].sample_labels
    input_name: str = getattr(model, "main_input_name", "")
    config: Any = model.config
    if input_name == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if not isinstance(size, int):
            return _PlannedStep(None, 0, "no batch: the config does not give the image size")
        image_step = TransformersStep(batch, (channels, size, size), (input_name,), per_sample=sample_labels)
        return _PlannedStep(image_step, 0, f"{batch} image(s) of {size} x {size}")
    if input_name != "input_ids":
        return _PlannedStep(None, 0, f"no batch: {type(model).__name__} takes {input_name or 'unknown inputs'}")
    num_positions = getattr(config, "max_position_embeddings", None)
    limit = num_positions if isinstance(num_positions, int) and num_positions > 0 else None
    length = sequence or min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS)
    if limit is not None and length > limit:
        raise ConfigError(
            f"{origin}: a sequence of {length} tokens, but the model has {limit} positions (max_position_embeddings); give "
            f"{limit} or less"
        )
    step = TransformersStep(batch, (length,), (input_name, *token_labels), limit or _UNLIMITED_TOKENS, sample_labels)
    return _PlannedStep(step, batch * length, f"{batch} x {length:,} tokens")


def _name_second_input(model: nn.Module) -> tuple[str, ...]:
    """Return a tuple with the second argument that receives the tokens: "labels" or "decoder_input_ids".

    The tuple is empty if the model needs no such argument.
    """
    has_token_labels = type(model).__name__.endswith(_TOKEN_LABEL_CLASSES)
    if has_token_labels and "labels" in inspect.signature(model.forward).parameters:
        return ("labels",)
    return ("decoder_input_ids",) if getattr(model.config, "is_encoder_decoder", False) else ()


@dataclass(frozen=True)
class TransformersStep:
    """Training step of a transformers model, with a batch of zeros of a given shape.

    Attributes:
        batch: Number of samples.
        shape: Shape of a sample: number of tokens, or channels, height and width.
        names: Names of the model's arguments that receive the batch.
        longest: Maximum number of tokens that the model allows, or 0 if its inputs are not tokens.
        per_sample: Names of the model's arguments that receive one label per sample.
    """

    batch: int
    shape: tuple[int, ...]
    names: tuple[str, ...]
    longest: int = 0
    per_sample: tuple[str, ...] = ()

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments to call the model with.

        The values are zeros of shape [batch, *shape]: int64 if the inputs are tokens, else float32. Labels per sample
        are int64 zeros of shape [batch].
        """
        dtype = torch.long if self.longest else torch.float32
        labels = dict.fromkeys(self.per_sample, torch.zeros(self.batch, dtype=torch.long))
        return dict.fromkeys(self.names, torch.zeros(self.batch, *self.shape, dtype=dtype)) | labels

    def loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Return the loss of the model for the given inputs."""
        return get_loss(model(**inputs))

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of the model for the entire batch."""
        return self.loss(model, self.inputs())


def get_loss(outputs: Any) -> torch.Tensor:
    """Return the loss in a model's outputs. If there is none, return the float32 mean of the first output."""
    loss: torch.Tensor | None = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first: torch.Tensor = outputs[0]
    return first.float().mean()


def _load_function_source(module: str, name: str, text: str) -> ModelSource:
    """Import the function `module:name`, and return a `ModelSource` for the model that the function makes.

    Args:
        module: Name of the function's module.
        name: Name of the function.
        text: Text that the user gave, for messages.

    Raises:
        ConfigError: If the module cannot be imported, or has no such function.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, so that modules in the current folder are found
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{text}: the module {module!r} cannot be imported: {error}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_")]
        hint = suggest_word(name, names)
        raise ConfigError(f"{text}: {module!r} has no function {name!r}{hint or ''}")
    return make_function_source(function, text)


def make_function_source(function: Callable[[], Any], text: str) -> ModelSource:
    """Make a `ModelSource` from a function that returns a model, or a pair of a model and a training step.

    The step takes the model and returns the loss.

    Args:
        function: Function to call.
        text: Text that the user gave, for messages.

    Raises:
        ConfigError: If the function returns anything else.
    """

    def make_model() -> nn.Module:
        return _split_result(function(), text)[0]

    with init_empty_weights(include_buffers=True):
        model, step = _split_result(function(), text)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    batch_text = "the batch of the function's step" if step else "no batch: the function returns no step"
    title = f"{type(model).__name__}: {num_parameters:,} parameters"
    return ModelSource(title, make_model, step, 0, batch_text, bool(getattr(model, "_tp_plan", None)))


def _split_result(result: Any, text: str) -> tuple[nn.Module, Step | None]:
    """Return the model and the training step that a user's function has returned. The step is None if there is none.

    Args:
        result: Return value of the function.
        text: Name of the function, for messages.

    Raises:
        ConfigError: If the result is neither a model nor a pair of a model and a step.
    """
    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and callable(result[1]):
        return result[0], result[1]
    raise ConfigError(
        f"{text} returned {type(result).__name__}; it must return a torch.nn.Module, or (module, step) where step(module) returns "
        "the loss of one batch"
    )
