"""The model of a plan: from a transformers config, the name of a model type, or a function of the user's."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.common.optional import require
from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.forecasting.forecaster import LongestSequence
from headway.forecasting.tracing.tensors import unmasked as unmasked
from headway.offload.placement.meta_model import init_empty_weights
from headway.planning import TASKS
from headway.planning.dry_run.drive import Step

# Encoders are known as causal models too, so what a model was made for comes first.
_KINDS = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
_LEARNS_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_SEQUENCE = 4096
_ENDLESS = 1 << 20


@dataclass(frozen=True)
class Source:
    """What is to be planned.

    Attributes:
        title: for people.
        make: makes the model.
        step: one batch of one data shard; None: it is not known how to call the model.
        tokens: of that batch; 0: not known.
        batch: what it is, for people.
        has_plan: the model says how tensor parallelism cuts it.
    """

    title: str
    make: Callable[[], nn.Module]
    step: Step | None
    tokens: int
    batch: str
    has_plan: bool = False


def find(text: str, batch: int = 1, sequence: int | None = None, task: str | None = None) -> Source:
    """Find what a user names.

    Args:
        text: a folder with a transformers config.json, such a file, a model type ("llama"), or "module:function".
        batch: samples of one data shard.
        sequence: tokens of each; None: as many as the model allows, up to 4096.
        task: one of TASKS; None: what the config's architecture, or the model type, learns.

    Raises:
        ConfigError: it is none of those, or cannot be read.
        OptionalDependencyMissing: transformers is not installed.
    """
    path = Path(text)
    if path.is_file() or (path / "config.json").is_file():
        return of_config(config_of(path), str(text), batch, sequence, task)
    module, colon, function = text.partition(":")
    if colon:
        return _of_function(module, function, text)
    if path.is_dir():
        raise ConfigError(f"{text}: there is no config.json in this folder; save_pretrained() writes one")
    transformers = require("transformers", f"planning the model type {text!r} needs", "transformers")
    known = sorted(transformers.CONFIG_MAPPING.keys())
    if text not in known:
        hint = did_you_mean(text, known)
        raise ConfigError(
            f"{text!r} is neither a folder or file with a transformers config, nor a model type of transformers "
            f"{transformers.__version__}, nor module:function{hint or ''}"
        )
    return of_config(transformers.CONFIG_MAPPING[text](), text, batch, sequence, task)


def meta_model_from(folder: str | Path) -> nn.Module:
    """The model that a local folder's `config.json` describes, without memory; code in the folder is not run.

    Raises:
        ConfigError: no folder, no config, or one that transformers builds no model of.
        OptionalDependencyMissing: transformers is not installed.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no folder with a config.json; give a local folder as save_pretrained() writes it")
    return meta_model_of(config_of(folder), str(folder))


def config_of(folder: str | Path) -> Any:
    """The transformers config of a local folder, or of a file like its config.json.

    Raises:
        ConfigError: transformers cannot read it.
        OptionalDependencyMissing: transformers is not installed.
    """
    transformers = require("transformers", "building a model from its config.json needs", "transformers")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ConfigError(f"{folder}: transformers cannot build a model from its config.json: {error}") from error


def meta_model_of(
    config: Any, where: str, kinds: Sequence[str] = ("AutoModel",), include_buffers: bool = False
) -> nn.Module:
    """The model of a transformers config, without memory.

    Args:
        where: the config comes from, for messages.
        kinds: of transformers' Auto classes, those to try in turn where the config does not name its class.
        include_buffers: as for `init_empty_weights`.

    Raises:
        ConfigError: transformers builds none.
    """
    transformers = require("transformers", "building a model from its config.json needs", "transformers")
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    try:
        with init_empty_weights(include_buffers=include_buffers):
            if named and named[0] is not None:
                model = named[0](config)
            else:
                autos = [getattr(transformers, kind) for kind in kinds]
                auto = next((auto for auto in autos if type(config) in auto._model_mapping), autos[-1])
                model = auto.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{where}: transformers cannot build a model from its config.json: {error}") from error
    assert isinstance(model, nn.Module)
    return model


def of_config(config: Any, where: str, batch: int = 1, sequence: int | None = None, task: str | None = None) -> Source:
    """A transformers model by its config.

    Raises:
        ConfigError: transformers builds no model of it, or the sequence is longer than the model allows.
    """
    if hasattr(config, "use_cache"):
        config.use_cache = False  # nothing is kept for a next token in training
    kinds: tuple[str, ...] = _KINDS
    if task is not None:
        config.architectures, kinds = None, (TASKS[task][0],)

    def make() -> nn.Module:
        return unmasked(meta_model_of(config, where, kinds, include_buffers=True))

    model = make()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    title = f"{type(model).__name__}: {num_parameters:,} parameters"
    has_plan = bool(getattr(model, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None))
    step, tokens, shown = _step_of(model, where, batch, sequence, task)
    return Source(title, make, step, tokens, shown, has_plan)


def _step_of(
    model: nn.Module, where: str, batch: int, sequence: int | None, task: str | None
) -> tuple[Step | None, int, str]:
    _, of_tokens, of_samples = TASKS[task] if task is not None else ("", _beside(model), ())
    kind: str = getattr(model, "main_input_name", "")
    config: Any = model.config
    if kind == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if not isinstance(size, int):
            return None, 0, "no batch: the config does not give the image size"
        shown = f"{batch} image(s) of {size} x {size}"
        return BatchOfModel(batch, (channels, size, size), (kind,), per_sample=of_samples), 0, shown
    if kind != "input_ids":
        return None, 0, f"no batch: {type(model).__name__} takes {kind or 'unknown inputs'}"
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    length = sequence or min(_SEQUENCE, limit or _SEQUENCE)
    if limit is not None and length > limit:
        raise ConfigError(
            f"{where}: a sequence of {length} tokens, but the model has {limit} positions (max_position_embeddings); give "
            f"{limit} or less"
        )
    step = BatchOfModel(batch, (length,), (kind, *of_tokens), limit or _ENDLESS, of_samples)
    return step, batch * length, f"{batch} x {length:,} tokens"


def _beside(model: nn.Module) -> tuple[str, ...]:
    """A second name under which the tokens go in."""
    is_of_tokens = type(model).__name__.endswith(_LEARNS_TOKENS)
    if is_of_tokens and "labels" in inspect.signature(model.forward).parameters:
        return ("labels",)
    return ("decoder_input_ids",) if getattr(model.config, "is_encoder_decoder", False) else ()


@dataclass(frozen=True)
class BatchOfModel:
    """A step of a transformers model.

    Attributes:
        batch: samples.
        shape: of each: tokens, or channels, height and width.
        names: under which they go into the model.
        longest: the most tokens that the model allows; 0: it takes none.
        per_sample: names of labels, of which a sample has one.
    """

    batch: int
    shape: tuple[int, ...]
    names: tuple[str, ...]
    longest: int = 0
    per_sample: tuple[str, ...] = ()

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        dtype = torch.long if self.longest else torch.float32
        labels = dict.fromkeys(self.per_sample, torch.zeros(self.batch, dtype=torch.long))
        return dict.fromkeys(self.names, torch.zeros(self.batch, *self.shape, dtype=dtype)) | labels

    def loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Of these inputs."""
        return loss_of(model(**inputs))

    def __call__(self, model: nn.Module) -> torch.Tensor:
        """The loss."""
        return self.loss(model, self.inputs())


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss; of a model that has none, the mean of its first output, which is as large."""
    found = getattr(outputs, "loss", None)
    first: torch.Tensor = outputs[0]
    return first.float().mean() if found is None else found


def lora_rank(text: str) -> int:
    """The N of "r=N".

    Raises:
        ConfigError: it is something else.
    """
    number = text.removeprefix("r=")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--lora {text!r}: give the rank of LoRA's matrices, as in --lora r=16")
    return int(number)


def trainable(
    source: Source, attention: str | None = None, dtype: str | None = None, lora: int | None = None
) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]], Callable[[Any, Any], torch.Tensor]]:
    """What makes the model, what gives a batch of so many samples, and the loss of its outputs.

    Args:
        source: of a transformers config.
        attention: "eager" or "sdpa"; None: the model's own.
        dtype: of the weights; None: float32. With `lora` also "int4": QLoRA.
        lora: rank of PEFT's LoRA, whose matrices alone learn; None: everything learns.

    Raises:
        ConfigError: it is not known how to call the model, or PEFT does not know which of its layers to adapt.
        OptionalDependencyMissing: PEFT, or for int4 bitsandbytes, is not installed.
    """
    step = source.step
    if not isinstance(step, BatchOfModel):
        raise ConfigError(
            f"{source.title}: {source.batch}; a forecast on the command line needs a transformers model of tokens or images. "
            "From Python, headway.forecast(model_fn, batch_fn) takes any"
        )

    def make() -> nn.Module:
        model = source.make()
        if attention is not None:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        if dtype == "int4":
            model = _in_four_bits(model)
        elif dtype is not None:
            model.to(getattr(torch, dtype))
        return model if lora is None else _adapted(model, lora)

    return make, lambda size: replace(step, batch=size).inputs(), lambda outputs, _: loss_of(outputs)


def _in_four_bits(model: nn.Module) -> nn.Module:
    """As QLoRA's guides load a model: NF4 with nested scales, products in bfloat16, the rest in float32.

    Source: T. Dettmers et al., QLoRA, 2023, https://arxiv.org/abs/2305.14314; its steps are transformers' and PEFT's own.
    """
    peft, transformers = (require(name, "--dtype int4 needs", name) for name in ("peft", "transformers"))
    require("bitsandbytes", "--dtype int4 needs", "bitsandbytes")
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(how, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    nn.Module.to(
        model, torch.bfloat16
    )  # the checkpoint that is quantised; transformers casts no model with such layers
    quantizer.postprocess_model(model)
    prepared: nn.Module = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    peft = require("peft", "--lora needs", "peft")
    try:
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank))
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT cannot adapt {type(model).__name__}: {error}") from error
    return adapted


def lengths(source: Source) -> LongestSequence:
    """The search for the longest sequence of a transformers model: as long as it has positions.

    Raises:
        ConfigError: it does not take tokens.
    """
    step = source.step
    if not isinstance(step, BatchOfModel) or not step.longest:
        raise ConfigError(f"{source.title}: {source.batch}; only a model of tokens has a longest sequence")
    return LongestSequence(lambda size, length: replace(step, batch=size, shape=(length,)).inputs(), step.longest)


def _of_function(module: str, name: str, text: str) -> Source:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module lies where the command is run
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{text}: the module {module!r} cannot be imported: {error}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, names)
        raise ConfigError(f"{text}: {module!r} has no function {name!r}{hint or ''}")
    return of_function(function, text)


def of_function(function: Callable[[], Any], text: str) -> Source:
    """A model that a function makes: it returns the model, or the model and a step (model -> loss).

    Raises:
        ConfigError: it returns something else.
    """

    def make() -> nn.Module:
        return _parts(function(), text)[0]

    with init_empty_weights(include_buffers=True):
        model, step = _parts(function(), text)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shown = "the batch of the function's step" if step else "no batch: the function returns no step"
    title = f"{type(model).__name__}: {num_parameters:,} parameters"
    return Source(title, make, step, 0, shown, bool(getattr(model, "_tp_plan", None)))


def _parts(made: Any, text: str) -> tuple[nn.Module, Step | None]:
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made[0], made[1]
    raise ConfigError(
        f"{text} returned {type(made).__name__}; it must return a torch.nn.Module, or (module, step) where step(module) returns the "
        "loss of one batch"
    )
