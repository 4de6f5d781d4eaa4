"""Which layout a run takes, and its options: the Accelerator's arguments, the launcher's settings, and what they mean together.

Code wins over the config file and the environment; code against the command line is an error, as for every setting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from headway.config import deepspeed, mesh, outside, survivors
from headway.config.deepspeed import DeepSpeedPlugin
from headway.config.foreign import Foreign
from headway.config.launch import OF_DEEPSPEED, OF_SHARDS, UNSET, WRAPPING
from headway.config.layouts import ParallelismConfig
from headway.config.load import COMMAND_LINE, ranks_per_machine, run_setting
from headway.config.mesh import Layout
from headway.config.plugins import (
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    TorchTensorParallelPlugin,
)
from headway.config.sharding import ShardingOptions
from headway.config.strategies import ActivationCheckpointing, EngineOptions
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

WHOLE_MODEL = 2**62
"""More parameters than any module has: the whole model is one unit."""
_PARAMETERS = 100_000_000
"""Of a module that is gathered on its own, where the policy is by size and no size is given: Accelerate's."""


@dataclass(frozen=True)
class Chosen:
    """How a run is spread.

    Attributes:
        text: the layout as it is written.
        layout: on these ranks.
        options: of the engines.
        fsdp, tensor_parallel: the plugins that were given.
        given: sizes, as they were given.
        deepspeed: its settings, where it is the engine.
    """

    text: str
    layout: Layout
    options: EngineOptions
    fsdp: FullyShardedDataParallelPlugin | None = None
    tensor_parallel: TorchTensorParallelPlugin | None = None
    given: ParallelismConfig | None = None
    deepspeed: DeepSpeedPlugin | None = None

    @property
    def is_deepspeed(self) -> bool:
        """Does DeepSpeed's engine run it?"""
        return self.text in mesh.ENGINES

    @cached_property
    def parallelism(self) -> ParallelismConfig | None:
        """What was given, with the sizes that the run has; None where nothing was, and ranks are replicas."""
        if (self.layout.is_replicas_only or self.is_deepspeed) and self.given is None:
            return None
        found, has = self.given or ParallelismConfig(), self.layout
        found.dp_replicate_size, found.dp_shard_size = has.replicate, has.shard
        found.tp_size, found.cp_size = has.tp, has.cp
        return found

    @cached_property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """What was given, or one that says what the run does."""
        sharding, checkpointing = self.options.sharding or ShardingOptions(), self.options.checkpointing
        return self.fsdp or FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=sharding.reshard_after_forward is not False,
            cpu_offload=sharding.cpu_offload,
            activation_checkpointing=checkpointing is not None,
            activation_checkpointing_offload=checkpointing is not None and checkpointing.offload,
        )


class Wish:
    """What the script says of the layout.

    Args:
        strategy: as `Accelerator(strategy=...)`.
        fsdp, tensor_parallel, parallelism: Accelerate's plugins.
        origin: what errors call the script's line.
        zero: DeepSpeed's plugin, or several by name.

    Attributes:
        needless: what was given and changes nothing, each with its reason.

    Raises:
        ConfigError: an argument of another type, or two that contradict each other.
        UnsupportedError: a field that cannot be served.
    """

    def __init__(
        self,
        strategy: str | None,
        fsdp: FullyShardedDataParallelPlugin | None,
        tensor_parallel: TorchTensorParallelPlugin | None,
        parallelism: ParallelismConfig | None,
        origin: str,
        zero: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
    ) -> None:
        _check_kind("strategy", strategy, str)
        _check_kind("fsdp_plugin", fsdp, FullyShardedDataParallelPlugin)
        _check_kind("torch_tp_plugin", tensor_parallel, TorchTensorParallelPlugin)
        _check_kind("parallelism_config", parallelism, ParallelismConfig)
        self._fsdp, self._tensor_parallel, self._parallelism = fsdp, tensor_parallel, parallelism
        self.origin = origin
        self._zero = zero
        self._strategy = None if strategy is None else self._spelled(strategy)
        read = Foreign() if fsdp is None else fsdp.read("fsdp_plugin")
        if parallelism is not None:
            for name, size in parallelism.sizes.items():
                if size > 1:
                    read.size(f"{name}_size", size, f"parallelism_config.{name}_size")
        if tensor_parallel is not None:
            _add_tensor_parallel(read, tensor_parallel, parallelism)
        if zero is not None:
            read.use_deepspeed("deepspeed_plugin")
        for key, reason in read.refused.items():
            raise UnsupportedError(f"{key}: {reason}")
        self._read, self._asked = read, read.strategy()
        self.needless = [
            f"{key} ({text.split(': ', 1)[1]})" for key, text in read.lines if text.startswith("not needed")
        ]

    def _spelled(self, strategy: str) -> str:
        try:
            return outside.spelled(strategy)
        except ConfigError as error:
            raise ConfigError(f"{error} ({self.origin})") from None

    def decide(self, given: EngineOptions, num_ranks: int, ranks_on_machine: int) -> Chosen:
        """The layout on so many ranks, and the options that the run has then.

        Args:
            given: the engines' options of the script.
            num_ranks: over all machines.
            ranks_on_machine: of these.

        Raises:
            ConfigError: as `layout` and `options`.
        """
        text, layout = self.layout(num_ranks, ranks_on_machine)
        if survivors.launched_on(num_ranks) is None:
            _check_typed(text, layout)
        elif outside.find(text) is None:
            survivors.tell(text, layout, num_ranks, ranks_per_machine() or ranks_on_machine)
        if self.needless:
            log.warning_once("%s: these have no effect here: %s", self.origin, "; ".join(self.needless))
        options, zero = (
            self.options(given, layout),
            deepspeed.chosen_plugin(text, self._given_zero(), launched_deepspeed()),
        )
        return Chosen(text, layout, options, self._fsdp, self._tensor_parallel, self._parallelism, zero)

    def _given_zero(self) -> DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None:
        """The script's plugin; None where the command line may say its options instead (`--force`)."""
        given = self._zero
        for name in OF_DEEPSPEED if given is not None else ():
            _, by = run_setting(name, self._zero, None, code_origin=f"deepspeed_plugin of {self.origin}")
            given = given if by.startswith("code") else None
        return given

    # ---------------------------------------------------------------- the layout

    def layout(self, num_ranks: int, ranks_on_machine: int) -> tuple[str, Layout]:
        """The layout, as it is written and as it is on so many ranks.

        Raises:
            ConfigError: it does not fit them, or the script and the command line say different things.
        """

        def resolve(text: str) -> Layout:
            if outside.find(text) is not None:
                return Layout(replicate=num_ranks)  # as far as it is known here
            return survivors.on_ranks(mesh.parse(text), num_ranks, ranks_per_machine() or ranks_on_machine)

        said = self._said(resolve)
        launched, told_by = run_setting("strategy", UNSET, None)
        if said is not None and launched is not None:
            said = self._against(said, launched, told_by, resolve)
        origin = (
            self.origin if self._strategy is not None or self._asked is None else f"{self._asked[1]} of {self.origin}"
        )
        text, found_by = run_setting("strategy", UNSET if said is None else said, "ddp", code_origin=origin)
        try:
            return text, resolve(text)
        except ConfigError as error:
            raise ConfigError(f"{error} ({found_by})") from None

    def _said(self, resolve: Callable[[str], Layout]) -> str | None:
        """What the script says, `strategy` and plugins together."""
        if self._strategy is None or self._asked is None:
            return self._strategy if self._asked is None else self._asked[0]
        wanted, keys = self._asked
        is_outside = outside.find(self._strategy) is not None
        asked = mesh.parse("ddp" if is_outside else self._strategy)
        if wanted == "deepspeed":
            fits = self._strategy in mesh.ENGINES
        elif self._read.has_sizes:
            fits = resolve(self._strategy) == resolve(wanted)
        elif wanted == "ddp":
            fits = not asked.sizes.keys() - {"replicate"}
        else:
            fits = set(mesh.parse(wanted).sizes) <= set(asked.sizes)
        if not fits:
            raise ConfigError(
                f"strategy={self._strategy!r} contradicts {wanted!r} from {keys} in {self.origin}; keep one of them"
            )
        return self._strategy

    def _against(self, said: str, launched: str, told_by: str, resolve: Callable[[str], Layout]) -> str:
        """The script's word in the launcher's spelling, where the two agree."""
        if said == launched:
            return said
        is_only_sharded = self._strategy is None and not self._read.has_sizes and said == "fsdp"
        if is_only_sharded and outside.find(launched) is None and "shard" in mesh.parse(launched).sizes:
            return launched
        if said == "deepspeed" and launched in mesh.ENGINES:
            return launched
        if (said in mesh.ENGINES) != (launched in mesh.ENGINES):  # alike in their groups, and another engine
            return said
        try:
            return launched if resolve(launched) == resolve(said) else said
        except ConfigError:
            return said

    # ---------------------------------------------------------------- options

    def options(self, given: EngineOptions, layout: Layout) -> EngineOptions:
        """The engines' options with what plugins and launcher say of sharding and activation checkpointing.

        Raises:
            ConfigError: two say different things, or an option was typed for a layout that does not have it.
        """
        if given.sharding is not None and (self._read.settings or self._read.dtypes):
            keys = ", ".join(key for _, key in self._read.settings.values()) or "fsdp_plugin.mixed_precision_policy"
            raise ConfigError(
                f"ShardingOptions in kwargs_handlers contradicts {keys} in {self.origin}; keep one of them"
            )
        sharding = self._sharding(given.sharding or ShardingOptions(), layout)
        checkpointing = self._checkpointing(given.checkpointing, sharding)
        return replace(given, sharding=sharding, checkpointing=checkpointing, context=self._context(given.context))

    def _context(self, given: TorchContextParallelConfig | None) -> TorchContextParallelConfig:
        """Options of context parallelism: of `kwargs_handlers` or of the ParallelismConfig."""
        handler = None if self._parallelism is None else self._parallelism.cp_handler
        if given is not None and handler is not None and given != handler:
            raise ConfigError(
                f"kwargs_handlers and parallelism_config.cp_handler of {self.origin} hold two TorchContextParallelConfig; keep one"
            )
        found = given or handler or TorchContextParallelConfig()
        code = UNSET if given is None and handler is None else found.cp_comm_strategy
        word, _ = run_setting(
            "cp_comm_strategy", code, None, code_origin=f"TorchContextParallelConfig of {self.origin}"
        )
        return replace(found, cp_comm_strategy=word)

    def _setting(self, name: str, code: Any = UNSET) -> Any:
        value, key = self._read.settings.get(name, (code, name))
        found, _ = run_setting(name, value, None, code_origin=f"{key} of {self.origin}")
        return found

    def _sharding(self, given: ShardingOptions, layout: Layout) -> ShardingOptions:
        reshard = self._setting("fsdp_reshard_after_forward", _unless_default(given, "reshard_after_forward"))
        offload = self._setting("fsdp_offload_params", _unless_default(given, "cpu_offload"))
        units, number = self._units(given)
        chosen = replace(
            given,
            # Accelerate's True is what None is here: all blocks, and not the root, which backward needs at once.
            reshard_after_forward=None if reshard is True and given.reshard_after_forward is None else reshard,
            cpu_offload=bool(offload),
            units=units,
            min_num_params=number,
            **self._read.dtypes,
        )
        if layout.num_shards > 1:
            chosen.check(layout.num_shards)
        return chosen

    def _units(self, given: ShardingOptions) -> tuple[tuple[Any, ...], int]:
        """What is gathered together: class names or a number of parameters."""
        says_itself = bool(given.units or given.min_num_params)
        policy = self._setting("fsdp_auto_wrap_policy")
        names = self._setting("fsdp_transformer_layer_cls_to_wrap", ",".join(map(_name, given.units)) or UNSET)
        number = self._setting("fsdp_min_num_params", given.min_num_params or UNSET)
        if says_itself:
            return given.units, given.min_num_params
        classes = tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()
        by_class, by_size, _ = WRAPPING
        if classes and policy in (None, by_class):
            return classes, 0
        if classes:
            raise ConfigError(
                f"fsdp_auto_wrap_policy={policy} does not use classes, but these are named to be wrapped: {', '.join(classes)}; drop "
                "one of the two"
            )
        if policy == by_size or (policy is None and number):
            return (), number or _PARAMETERS
        return (), WHOLE_MODEL if policy == WRAPPING[2] else 0

    def _checkpointing(
        self, given: ActivationCheckpointing | None, sharding: ShardingOptions
    ) -> ActivationCheckpointing | None:
        wanted = self._setting("fsdp_activation_checkpointing", UNSET if given is None else True)
        offload = self._setting("fsdp_activation_checkpointing_offload", UNSET if given is None else given.offload)
        if given is not None or not wanted:
            if offload and not wanted:
                raise ConfigError(
                    "fsdp_activation_checkpointing_offload needs activation checkpointing; add "
                    "--fsdp_activation_checkpointing true, or remove it"
                )
            return given if wanted else None
        names = tuple(unit for unit in sharding.units if isinstance(unit, str))
        return ActivationCheckpointing(offload=bool(offload), blocks=names)


def launched_deepspeed() -> dict[str, Any]:
    """What the launcher says for a DeepSpeedPlugin, by its fields; empty where it says nothing."""
    told = {name: run_setting(name, UNSET, None)[0] for name in OF_DEEPSPEED}
    found = {name: value for name, value in told.items() if value is not None}
    if "deepspeed_config_file" in found:
        found["hf_ds_config"] = found.pop("deepspeed_config_file")
    return found


def _check_typed(text: str, layout: Layout) -> None:
    """Refuse options that were typed on the command line, where the script's layout is not one of theirs.

    Raises:
        ConfigError: there is one.
    """
    is_deepspeed = text in mesh.ENGINES
    for names, fits, what in (
        (OF_SHARDS, layout.num_shards > 1 and not is_deepspeed, "a layout with shards"),
        (("cp_comm_strategy",), layout.cp > 1, "context parallelism"),
        (OF_DEEPSPEED, is_deepspeed, "DeepSpeed"),
    ):
        for name in names if layout.num_ranks > 1 and not fits else ():
            value, origin = run_setting(name, UNSET, None)
            if value is not None and origin.startswith(COMMAND_LINE):
                raise ConfigError(
                    f"{name} ({origin}) needs {what}, but the layout is {text}: {layout.describe()}; remove it"
                )


def _add_tensor_parallel(
    read: Foreign, plugin: TorchTensorParallelPlugin, parallelism: ParallelismConfig | None
) -> None:
    if plugin.torch_device_mesh is not None:
        read.refuse("torch_tp_plugin.torch_device_mesh", "the Accelerator creates the mesh; give only sizes")
    said = 1 if parallelism is None else parallelism.sizes["tp"]
    if said not in (1, plugin.tp_size):
        raise ConfigError(
            f"parallelism_config.tp_size={said} contradicts torch_tp_plugin.tp_size={plugin.tp_size}; keep one of them"
        )
    if plugin.tp_size > 1:
        read.size("tp_size", plugin.tp_size, "torch_tp_plugin.tp_size")


def _unless_default(options: ShardingOptions, name: str) -> Any:
    value = getattr(options, name)
    default = next(each.default for each in fields(options) if each.name == name)
    return UNSET if value == default else value


def _name(unit: Any) -> str:
    return str(getattr(unit, "__name__", unit))


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is None or isinstance(given, kind):
        return
    example = "'fsdp'" if kind is str else f"headway.{kind.__name__}(...)"
    raise ConfigError(
        f"{name} is of type {type(given).__module__}.{type(given).__qualname__}; give {name}={example}".replace(
            "builtins.", ""
        )
    )
