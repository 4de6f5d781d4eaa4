"""Settings of torch.compile, by Accelerate's names: typed, checked, and filled in from the launch. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.common.callsite import call_site
from headway.config.launch import MODES
from headway.config.load import UNSET, run_setting
from headway.config.spelled import DynamoBackend
from headway.errors import ConfigError

Backend = DynamoBackend | str | Callable[..., Any]


@dataclass
class TorchDynamoPlugin:
    """How prepare() compiles models with torch.compile; what is None here is what the launch says (`--dynamo_...`).

    Attributes:
        backend: a `DynamoBackend`, its name in any case, or a callable as torch.compile takes it; "no": nothing is compiled.
        mode: what inductor optimises for: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        fullgraph: what the compiler cannot take in is an error; False: it runs uncompiled, between two graphs.
        dynamic: True: for all sizes from the start; False: anew for each size; None: the second size that comes makes it for
            all sizes.
        options: of the backend; not together with a mode.
        disable: compile nothing.
        use_regional_compilation: compile the model's repeated blocks, once for all of them; False: the whole model.

    Raises:
        ConfigError: an unknown backend or mode, or settings that contradict each other.
    """

    backend: Backend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given: Any = self.backend
        named = given if given is None or _is_function(given) else dynamo_backend(given).lower()
        backend = _launched("dynamo_backend", named, "no", "backend")
        self.backend = backend if _is_function(backend) else dynamo_backend(backend)
        self.mode = _launched("dynamo_mode", self.mode, "default", "mode")
        self.fullgraph = bool(_launched("dynamo_use_fullgraph", self.fullgraph, False, "fullgraph"))
        self.dynamic = _launched("dynamo_use_dynamic", self.dynamic, None, "dynamic")
        regional = _launched(
            "dynamo_use_regional_compilation", self.use_regional_compilation, False, "use_regional_compilation"
        )
        self.use_regional_compilation = bool(regional)
        self._check()

    def _check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r} of torch.compile is unknown; allowed: {', '.join(MODES)}")
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
        """Is anything to be compiled?"""
        return self.backend is not DynamoBackend.NO and not self.disable

    @property
    def name(self) -> str:
        """The backend's, as torch knows it."""
        if _is_function(self.backend):
            return str(getattr(self.backend, "__name__", type(self.backend).__name__))
        return str(self.backend).lower()

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return {**self.to_kwargs(), "use_regional_compilation": self.use_regional_compilation}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of torch.compile."""
        given: dict[str, Any] = {"backend": self.backend if _is_function(self.backend) else self.name}
        if self.options:
            given["options"] = dict(self.options)
        else:
            given["mode"] = self.mode
        return {**given, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "disable": self.disable}


def dynamo_backend(name: DynamoBackend | str | None) -> DynamoBackend:
    """The backend called `name`, in any case; None: NO.

    Raises:
        ConfigError: an unknown name.
    """
    text = "NO" if name is None else str(name).upper()
    try:
        return DynamoBackend(text)
    except ValueError:
        allowed = ", ".join(sorted(DynamoBackend.list()))
        raise ConfigError(
            f"dynamo_backend={name!r} is unknown; allowed: {allowed} in upper or lower case, or a callable as in torch.compile"
        ) from None


def compiler(backend: Backend | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """The compiler's settings, from the two arguments of the Accelerator that say so and from the launch.

    Raises:
        ConfigError: both arguments, something else than a plugin, or settings that contradict each other.
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


def _launched(name: str, given: Any, default: Any, argument: str) -> Any:
    origin = f"TorchDynamoPlugin({argument}={given!r}) at {call_site()}"
    return run_setting(name, UNSET if given is None else given, default, code_origin=origin)[0]
