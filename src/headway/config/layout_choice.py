"""Which layout a run takes, and its options, by the code and the launch; and after machines were lost.

Code wins over the config file and the environment; code against the command line is an error, as for every setting.

The layout of a run that goes on with fewer ranks than it was launched on, after machines were lost. Torch-free.

The sizes that were asked for stay where they fit. Where they do not::

    tp, cp, ep        shrink to a divisor of what they were, as heads, sequences and experts divide by those too
    pp                becomes shards, as stages stand beside replicas alone
    replicas, shards  share the ranks that remain: as many replicas as there can be without a larger part of the model on any rank

All ranks that are left take part. `fsdp+tp=2` of 8 ranks is 3 x 2 on 6 and fsdp=7 on 7; `hsdp=2` of 4 is fsdp=3 on 3.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from headway.config import mesh
from headway.config.engines import ActivationCheckpointing, EngineOptions
from headway.config.launch import OF_DEEPSPEED, OF_SHARDS, UNSET, WRAPPING
from headway.config.load import COMMAND_LINE, asked_num_processes, ranks_per_machine, run_setting
from headway.config.mesh import Asked, Layout, parse, written
from headway.config.parallelism import LayoutPlugin, LayoutRequest, ShardingOptions, TorchContextParallelConfig
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_INNER = ("tp", "cp", "ep", "pp")
"""Axes that cut what has a number of parts, in the order in which they keep their ranks."""


def launched_on(num_ranks: int) -> int | None:
    """How many ranks the run was launched on, where machines have been lost since; else None, and without the launcher."""
    asked = asked_num_processes()
    return asked[-1] if asked is not None and num_ranks in asked[:-1] else None


def on_ranks(asked: Asked, num_ranks: int, ranks_per_machine: int) -> Layout:
    """The layout on this run's ranks, as it was asked for or as it fits what is left.

    Args:
        asked: the layout.
        num_ranks: over all machines, now.
        ranks_per_machine: how many each has.

    Raises:
        ConfigError: the sizes do not fit, and no rank was lost.
    """
    launched = launched_on(num_ranks)
    if launched is None:
        return asked.resolve(num_ranks, ranks_per_machine)
    return after_loss(asked, launched, num_ranks, ranks_per_machine)


def after_loss(asked: Asked, launched: int, left: int, ranks_per_machine: int | None = None) -> Layout:
    """The layout with which a run goes on.

    Args:
        asked: the layout that it was launched with.
        launched: ranks that it had.
        left: ranks that it has, fewer.
        ranks_per_machine: how many each machine has; None: all are on one.
    """
    whole = asked.resolve(launched, ranks_per_machine)
    as_asked = _resolved(asked, left, ranks_per_machine)
    if as_asked is not None and not any(_size(whole, axis) % _size(as_asked, axis) for axis in _INNER):
        return as_asked
    inner: dict[str, int] = {}
    rest, lost = left, 1
    for axis in _INNER:
        inner[axis] = gcd(_size(whole, axis), rest)
        rest //= inner[axis]
        lost *= _size(whole, axis) // inner[axis]
    if whole.is_replicas_only:
        return Layout(replicate=rest)
    if whole.pp > 1:
        return Layout(shard=left)
    wanted = whole.shard * lost  # what is no longer cut along the inner axes is cut into shards
    shard = next(size for size in range(min(wanted, rest), rest + 1) if rest % size == 0)
    return Layout(replicate=rest // shard, shard=shard, **inner)


def _size(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis))


def _resolved(asked: Asked, left: int, ranks_per_machine: int | None) -> Layout | None:
    try:
        return asked.resolve(left, ranks_per_machine)
    except ConfigError:
        return None


def tell(text: str, layout: Layout, num_ranks: int, ranks_per_machine: int) -> None:
    """Warn where ranks were lost and the layout is another one than was asked for."""
    launched = launched_on(num_ranks)
    if launched is not None and (said := changed(text, layout, launched, num_ranks, ranks_per_machine)):
        log.warning_once("%s", said)


def changed(text: str, layout: Layout, launched: int, left: int, ranks_per_machine: int | None = None) -> str:
    """In words, what a layout has become; empty where it fits as it was asked for."""
    if _resolved(parse(text), left, ranks_per_machine) == layout:
        return ""
    now = f"{written(layout.sizes)} ({layout.describe()})"
    return f"layout {text} of {launched} ranks does not fit {left}: the run continues with {now}"


WHOLE_MODEL = 2**62
"""More parameters than any module has: the whole model is one unit."""
_PARAMETERS = 100_000_000
"""Of a module that is gathered on its own, where the policy is by size and no size is given: Accelerate's."""


MEGATRON = (
    "Megatron-LM is not there yet. It is planned; until then leave the plugin out: strategy='tp' or 'fsdp+tp=2' cuts matrices "
    "(docs/tensor_parallel.md)"
)
_PLUGINS = {
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "parallelism_config": "ParallelismConfig",
    "torch_tp_plugin": "TorchTensorParallelPlugin",
}


@dataclass(frozen=True)
class ResolvedLayout:
    """How a run is spread.

    Attributes:
        text: the layout as it is written.
        layout: on these ranks.
        options: of the engines.
        plugins: those that were given, by the Accelerator's argument; views for another library may be added.
        deepspeed: its settings, where it is the engine.
    """

    text: str
    layout: Layout
    options: EngineOptions
    plugins: dict[str, Any] = field(default_factory=dict)
    deepspeed: Any = None

    @property
    def is_deepspeed(self) -> bool:
        """Does DeepSpeed's engine run it?"""
        return self.text in mesh.ENGINES


class RequestedLayout:
    """What the script says of the layout.

    Args:
        strategy: as `Accelerator(strategy=...)`.
        origin: what errors call the script's line.
        fsdp_plugin, parallelism_config, torch_tp_plugin, megatron_lm_plugin: the Accelerator's arguments.
        uses_deepspeed: a plugin of DeepSpeed's is given.

    Attributes:
        request: what the plugins ask for.

    Raises:
        ConfigError: an argument of another type, or two that contradict each other.
        UnsupportedError: a plugin or a field that cannot be served.
    """

    def __init__(
        self,
        strategy: str | None,
        origin: str,
        fsdp_plugin: LayoutPlugin | None = None,
        parallelism_config: LayoutPlugin | None = None,
        torch_tp_plugin: LayoutPlugin | None = None,
        megatron_lm_plugin: object = None,
        uses_deepspeed: bool = False,
    ) -> None:
        if megatron_lm_plugin is not None:
            raise UnsupportedError(MEGATRON)
        if not isinstance(strategy, str | None):
            raise _wrong_type("strategy", strategy, "'fsdp'")
        self.origin = origin
        self.request = LayoutRequest()
        given = dict(zip(_PLUGINS, (fsdp_plugin, parallelism_config, torch_tp_plugin)))
        self._plugins = {name: plugin for name, plugin in given.items() if plugin is not None}
        for name, plugin in self._plugins.items():
            if getattr(plugin, "argument", None) != name:
                raise _wrong_type(name, plugin, f"headway.{_PLUGINS[name]}(...)")
        self._strategy = None if strategy is None else self._normalise(strategy)
        for plugin in self._plugins.values():
            plugin.request_layout(self.request)
        if uses_deepspeed:
            self.request.use_deepspeed("deepspeed_plugin")
        for key, reason in self.request.refused.items():
            raise UnsupportedError(f"{key}: {reason}")
        self._asked = self.request.strategy()

    def _normalise(self, strategy: str) -> str:
        try:
            return mesh.spelled(strategy)
        except ConfigError as error:
            raise ConfigError(f"{error} ({self.origin})") from None

    def resolve(self, given: EngineOptions, num_ranks: int, ranks_on_machine: int) -> ResolvedLayout:
        """The layout on so many ranks, and the options that the run has then.

        Args:
            given: the engines' options of the script.
            num_ranks: over all machines.
            ranks_on_machine: of these.

        Raises:
            ConfigError: as `layout` and `options`.
        """
        text, layout = self.layout(num_ranks, ranks_on_machine)
        if launched_on(num_ranks) is None:
            _check_typed(text, layout)
        elif mesh.find(text) is None:
            tell(text, layout, num_ranks, ranks_per_machine() or ranks_on_machine)
        if self.request.ignored:
            log.warning_once("%s: these have no effect here: %s", self.origin, "; ".join(self.request.ignored))
        return ResolvedLayout(text, layout, self.options(given, layout), dict(self._plugins))

    # ---------------------------------------------------------------- the layout

    def layout(self, num_ranks: int, ranks_on_machine: int) -> tuple[str, Layout]:
        """The layout, as it is written and as it is on so many ranks.

        Raises:
            ConfigError: it does not fit them, or the script and the command line say different things.
        """

        def resolve(text: str) -> Layout:
            if mesh.find(text) is not None:
                return Layout(replicate=num_ranks)  # as far as it is known here
            return on_ranks(mesh.parse(text), num_ranks, ranks_per_machine() or ranks_on_machine)

        said = self._find_script_strategy(resolve)
        launched, told_by = run_setting("strategy", UNSET, None)
        if said is not None and launched is not None:
            said = self._match_launched(said, launched, told_by, resolve)
        origin = (
            self.origin if self._strategy is not None or self._asked is None else f"{self._asked[1]} of {self.origin}"
        )
        text, found_by = run_setting("strategy", UNSET if said is None else said, "ddp", code_origin=origin)
        try:
            return text, resolve(text)
        except ConfigError as error:
            raise ConfigError(f"{error} ({found_by})") from None

    def _find_script_strategy(self, resolve: Callable[[str], Layout]) -> str | None:
        """What the script says, `strategy` and plugins together."""
        if self._strategy is None or self._asked is None:
            return self._strategy if self._asked is None else self._asked[0]
        wanted, keys = self._asked
        is_outside = mesh.find(self._strategy) is not None
        asked = mesh.parse("ddp" if is_outside else self._strategy)
        if wanted == "deepspeed":
            fits = self._strategy in mesh.ENGINES
        elif self.request.has_sizes:
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

    def _match_launched(self, said: str, launched: str, told_by: str, resolve: Callable[[str], Layout]) -> str:
        """The script's word in the launcher's spelling, where the two agree."""
        if said == launched:
            return said
        is_only_sharded = self._strategy is None and not self.request.has_sizes and said == "fsdp"
        if is_only_sharded and mesh.find(launched) is None and "shard" in mesh.parse(launched).sizes:
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
        if given.sharding is not None and (self.request.settings or self.request.dtypes):
            keys = ", ".join(key for _, key in self.request.settings.values()) or "fsdp_plugin.mixed_precision_policy"
            raise ConfigError(
                f"ShardingOptions in kwargs_handlers contradicts {keys} in {self.origin}; keep one of them"
            )
        sharding = self._build_sharding(given.sharding or ShardingOptions(), layout)
        checkpointing = self._build_checkpointing(given.checkpointing, sharding)
        return replace(
            given, sharding=sharding, checkpointing=checkpointing, context=self._build_context(given.context)
        )

    def _build_context(self, given: TorchContextParallelConfig | None) -> TorchContextParallelConfig:
        """Options of context parallelism: of `kwargs_handlers` or of the ParallelismConfig."""
        handler = self.request.context
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

    def _decide_setting(self, name: str, code: Any = UNSET) -> Any:
        value, key = self.request.settings.get(name, (code, name))
        found, _ = run_setting(name, value, None, code_origin=f"{key} of {self.origin}")
        return found

    def _build_sharding(self, given: ShardingOptions, layout: Layout) -> ShardingOptions:
        reshard = self._decide_setting("fsdp_reshard_after_forward", _unless_default(given, "reshard_after_forward"))
        offload = self._decide_setting("fsdp_offload_params", _unless_default(given, "cpu_offload"))
        units, number = self._choose_units(given)
        chosen = replace(
            given,
            # Accelerate's True is what None is here: all blocks, and not the root, which backward needs at once.
            reshard_after_forward=None if reshard is True and given.reshard_after_forward is None else reshard,
            cpu_offload=bool(offload),
            units=units,
            min_num_params=number,
            **self.request.dtypes,
        )
        if layout.num_shards > 1:
            chosen.check(layout.num_shards)
        return chosen

    def _choose_units(self, given: ShardingOptions) -> tuple[tuple[Any, ...], int]:
        """What is gathered together: class names or a number of parameters."""
        says_itself = bool(given.units or given.min_num_params)
        policy = self._decide_setting("fsdp_auto_wrap_policy")
        names = self._decide_setting(
            "fsdp_transformer_layer_cls_to_wrap", ",".join(map(_get_name, given.units)) or UNSET
        )
        number = self._decide_setting("fsdp_min_num_params", given.min_num_params or UNSET)
        if says_itself:
            return given.units, given.min_num_params
        classes = tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()
        by_class, by_size, _ = WRAPPING
        if classes and policy in (None, by_class):
            return classes, 0
        if classes:
            raise ConfigError(
                f"fsdp_auto_wrap_policy={policy} does not use classes, but some are named: {', '.join(classes)}; drop one"
            )
        if policy == by_size or (policy is None and number):
            return (), number or _PARAMETERS
        return (), WHOLE_MODEL if policy == WRAPPING[2] else 0

    def _build_checkpointing(
        self, given: ActivationCheckpointing | None, sharding: ShardingOptions
    ) -> ActivationCheckpointing | None:
        wanted = self._decide_setting("activation_checkpointing", UNSET if given is None else True)
        offload = self._decide_setting("activation_checkpointing_offload", UNSET if given is None else given.offload)
        if given is not None or not wanted:
            if offload and not wanted:
                raise ConfigError(
                    "activation_checkpointing_offload needs activation checkpointing; add "
                    "--activation_checkpointing, or remove it"
                )
            return given if wanted else None
        names = tuple(unit for unit in sharding.units if isinstance(unit, str))
        return ActivationCheckpointing(offload=bool(offload), blocks=names)


def _check_typed(text: str, layout: Layout) -> None:
    """Refuse options that were typed on the command line, where the script's layout is not one of theirs.

    Raises:
        ConfigError: there is one.
    """
    for name, what, _ in options_of_others(text, layout):
        value, origin = run_setting(name, UNSET, None)
        if value is not None and origin.startswith(COMMAND_LINE):
            raise ConfigError(
                f"{name} ({origin}) needs {what}, but the layout is {text}: {layout.describe()}; remove it"
            )


def options_of_others(text: str, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(setting, what it needs, how that is asked for) of each that has no meaning in the layout."""
    is_deepspeed = text in mesh.ENGINES
    for names, fits, what, remedy in (
        (OF_SHARDS, layout.num_shards > 1 and not is_deepspeed, "a layout with shards", "--strategy fsdp"),
        (("cp_comm_strategy",), layout.cp > 1, "context parallelism", "--strategy cp"),
        (OF_DEEPSPEED, is_deepspeed, "DeepSpeed", "--strategy zero2"),
    ):
        if layout.num_ranks > 1 and not fits:
            yield from ((name, what, remedy) for name in names)


def _unless_default(options: ShardingOptions, name: str) -> Any:
    value = getattr(options, name)
    return UNSET if value == getattr(type(options), name) else value  # a dataclass's class holds the defaults


def _get_name(unit: Any) -> str:
    return str(getattr(unit, "__name__", unit))


def _wrong_type(name: str, given: object, example: str) -> ConfigError:
    kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    return ConfigError(f"{name} is of type {kind}; give {name}={example}")
