"""Options of torch.compile, from the script and the launcher. This module does not import torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.common.callsite import find_call_site
from headway.core.config.launch import COMPILE_MODES
from headway.core.config.load import UNSET, resolve_run_setting
from headway.core.config.string_enums import DynamoBackend
from headway.errors import ConfigError

Backend = DynamoBackend | str | Callable[..., Any]
"""Backend of torch.compile: a member of `DynamoBackend`, its name, or a function that compiles a graph."""


@dataclass
class TorchDynamoPlugin:
    """Settings for torch.compile in `prepare()`, for `Accelerator(dynamo_plugin=...)`.

    Fields that are None are read from the launcher (`--dynamo_...`). If it does not set them either, they have the
    default that is named below. Models are compiled in place, at their first forward.

    Attributes:
        backend: A `DynamoBackend`, its name in upper or lower case, such as "inductor", or a callable as accepted by torch.compile.
            "no" disables compilation. Default: "no".
        mode: Inductor's mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs". Default:
            "default".
        fullgraph: Whether a graph break is an error. False (the default): code that cannot be compiled runs eagerly.
        dynamic: Whether to compile with dynamic shapes. True: from the start. False: never, so code is recompiled for
            each new shape. None (the default): after the first change of shape.
        options: Options of the backend, as for torch.compile. They cannot be combined with another `mode` than
            "default". Default: none.
        disable: Whether to turn compilation off, whatever the backend. Default: False.
        use_regional_compilation: Whether to compile one of the model's repeated blocks and reuse the result for the
            others, instead of compiling the whole model. This takes less time. Default: False.

    Raises:
        ConfigError: If the backend or mode is unknown, or settings contradict each other or the command line.

    Example::

        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        accelerator = Accelerator(dynamo_plugin=plugin)
    """

    backend: Backend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        requested: Any = self.backend
        if requested is not None and not _is_function(requested):
            requested = parse_dynamo_backend(requested).lower()
        backend = _resolve_launched("dynamo_backend", requested, "no", "backend")
        self.backend = backend if _is_function(backend) else parse_dynamo_backend(backend)
        self.mode = _resolve_launched("dynamo_mode", self.mode, "default", "mode")
        self.fullgraph = bool(_resolve_launched("dynamo_use_fullgraph", self.fullgraph, False, "fullgraph"))
        self.dynamic = _resolve_launched("dynamo_use_dynamic", self.dynamic, None, "dynamic")
        regional = _resolve_launched(
            "dynamo_use_regional_compilation", self.use_regional_compilation, False, "use_regional_compilation"
        )
        self.use_regional_compilation = bool(regional)
        self._check_mode()

    def _check_mode(self) -> None:
        """Raise `ConfigError` if the mode is unknown, or cannot be combined with the options or the backend."""
        if self.mode not in COMPILE_MODES:
            raise ConfigError(f"mode={self.mode!r} of torch.compile is unknown; allowed: {', '.join(COMPILE_MODES)}")
        if self.mode == "default":
            return
        if self.options:
            raise ConfigError(f"give torch.compile mode={self.mode!r} or options={self.options!r}, not both")
        if self.compiles and self.backend is not DynamoBackend.INDUCTOR:
            raise ConfigError(
                f"mode={self.mode!r} only works with the backend inductor; leave it out with {self.name}, or choose inductor"
            )

    @property
    def compiles(self) -> bool:
        """Whether compilation is enabled."""
        return self.backend is not DynamoBackend.NO and not self.disable

    @property
    def has_cuda_graphs(self) -> bool:
        """Whether compiled code runs as CUDA graphs.

        Each run of such a graph overwrites the outputs of the previous one.
        """
        return (
            self.mode in ("reduce-overhead", "max-autotune")
            or self.backend is DynamoBackend.CUDAGRAPHS
            or bool((self.options or {}).get("triton.cudagraphs"))
        )

    @property
    def name(self) -> str:
        """Name of the backend, as torch.compile accepts it."""
        if _is_function(self.backend):
            return str(getattr(self.backend, "__name__", type(self.backend).__name__))
        return str(self.backend).lower()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as `to_kwargs` does, and in addition `use_regional_compilation`."""
        return {**self.to_kwargs(), "use_regional_compilation": self.use_regional_compilation}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of `torch.compile`. If there are `options`, `mode` is left out."""
        kwargs: dict[str, Any] = {"backend": self.backend if _is_function(self.backend) else self.name}
        if self.options:
            kwargs["options"] = dict(self.options)
        else:
            kwargs["mode"] = self.mode
        return {**kwargs, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "disable": self.disable}


def parse_dynamo_backend(name: DynamoBackend | str | None) -> DynamoBackend:
    """Return the backend with the given name, ignoring case. The name None gives `DynamoBackend.NO`.

    Raises:
        ConfigError: If the name is unknown.
    """
    text = "NO" if name is None else str(name).upper()
    try:
        return DynamoBackend(text)
    except ValueError:
        allowed = ", ".join(sorted(DynamoBackend.list()))
        raise ConfigError(
            f"dynamo_backend={name!r} is unknown; allowed: {allowed} in upper or lower case, or a callable as in torch.compile"
        ) from None


def resolve_compiler(backend: Backend | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the settings for torch.compile from the Accelerator's two arguments and the launcher.

    Args:
        backend: Argument `dynamo_backend` of the Accelerator. None: the launcher's setting, else no compilation.
        plugin: Argument `dynamo_plugin` of the Accelerator, or None. It is returned unchanged.

    Raises:
        ConfigError: If both arguments are given, `plugin` has the wrong type, or settings contradict each other.
    """
    if backend is not None and plugin is not None:
        raise ConfigError("give dynamo_backend or dynamo_plugin, not both")
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(
            f"dynamo_plugin is a {type(plugin).__name__}; give a headway.TorchDynamoPlugin, or leave it out"
        )
    return plugin if plugin is not None else TorchDynamoPlugin(backend=backend)


def _is_function(backend: Any) -> bool:
    return callable(backend) and not isinstance(backend, str)


def _resolve_launched(name: str, value: Any, default: Any, argument: str) -> Any:
    """Return the value of a setting from the script or the launcher.

    Args:
        name: Name of the launcher's setting.
        value: Value of the script; None if it gives none.
        default: Value if neither gives one.
        argument: Name of the script's argument, for error messages.

    Raises:
        ConfigError: If the script contradicts the command line.
    """
    origin = f"TorchDynamoPlugin({argument}={value!r}) at {find_call_site()}"
    resolved, _ = resolve_run_setting(name, UNSET if value is None else value, default, code_origin=origin)
    return resolved
