"""Reading one setting's value from text or from a config file, with errors that name where it came from."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

from headway.common import env
from headway.common.untrusted import shown
from headway.config.launch import LaunchSetting
from headway.errors import CallError, ConfigError

Class = TypeVar("Class", bound=type)
Taken = TypeVar("Taken", bound="KwargsHandler")

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "switch": "true or false",
    "truth": "true or false",
}


def did_you_mean(word: str, known: list[str], *, prefix: str = "") -> str:
    """A hint at the known word next to `word`, or at those it begins: "; did you mean num_processes?", or nothing."""
    from difflib import get_close_matches

    plain = word.lower().replace("-", "_")
    begun = [each for each in known if each.replace("-", "_").startswith(plain)] if len(plain) > 2 else []
    close = begun[:3] or get_close_matches(plain, known, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + each for each in close)}?" if close else ""


def check_count(**values: object) -> None:
    """Raise ConfigError unless each of these, by its name, is a whole number of 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; give a number of 1 or more")


class KwargsHandler:
    """The base of options that scripts give an Accelerator: dataclasses whose fields can be assigned until one takes them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_is_taken"):
            raise ConfigError(
                f"{type(self).__name__}.{name} = {value!r}: an Accelerator has taken these options; set them before it is created"
            )
        if name not in (known := [each.name for each in fields(self)]):  # type: ignore[arg-type]
            raise CallError(f"{type(self).__name__} has no field {name!r}{did_you_mean(name, known)}")
        object.__setattr__(self, name, value)

    def taken(self: Taken) -> Taken:
        """A copy for an Accelerator, checked as if it were new, whose fields stay.

        Raises:
            ConfigError: a value that the field cannot have.
        """
        copy = replace(self)  # type: ignore[type-var]  # with a dataclass
        object.__setattr__(copy, "_is_taken", True)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


def known_keywords(kind: Class) -> Class:
    """Class decorator: a keyword that the constructor does not know is an error that says the nearest one.

    Raises:
        CallError: by the constructor.
    """
    constructor: Callable[..., None] = vars(kind)["__init__"]
    code = constructor.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @wraps(constructor)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                allowed = f"; allowed: {', '.join(known)}"
                raise CallError(
                    f"{type(self).__name__}() has no argument {name!r}{did_you_mean(name, [*known]) or allowed}"
                )
        constructor(self, *args, **kwargs)

    type.__setattr__(kind, "__init__", initialise)
    return kind


def from_text(setting: LaunchSetting, text: str, origin: str) -> Any:
    """Read a value that was written as text: on the command line or in the environment.

    Args:
        setting: what is being set.
        text: what was written.
        origin: where, for the error.

    Raises:
        ConfigError: the text is not such a value; the message has the setting, the text, the origin and what is allowed.
    """
    if setting.kind == "text":
        return _checked(setting, text, origin)
    if setting.kind in ("switch", "truth"):
        return env.parse_bool(text, f"{setting.name} ({origin})")
    if setting.kind == "choice":
        return _checked(setting, text.strip().lower(), origin)
    try:
        value: Any = int(text) if setting.kind == "integer" else float(text)
    except ValueError:
        raise _error(setting, text, origin) from None
    return _checked(setting, value, origin)


def from_file(setting: LaunchSetting, value: Any, origin: str) -> Any:
    """Check a value that a config file holds, with its YAML type.

    A bare `no` is False in YAML, and meant as the word where words are the choice.

    Raises:
        ConfigError: it has another type or is out of range.
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # more than Python prints or makes a float of
        raise _error(setting, value, origin)
    if setting.kind == "choice":
        if value is False and "no" in setting.choices:
            return "no"
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        fits = isinstance(value, str)
    elif setting.kind == "text":
        if isinstance(value, int) and not isinstance(value, bool):  # gpu_ids: 0
            value = str(value)
        fits = isinstance(value, str)
    elif setting.kind in ("switch", "truth"):
        fits = isinstance(value, bool)
    else:
        fits = isinstance(value, (int, float) if setting.kind == "number" else int) and not isinstance(value, bool)
    if not fits:
        raise _error(setting, value, origin)
    return _checked(setting, float(value) if setting.kind == "number" else value, origin)


def _checked(setting: LaunchSetting, value: Any, origin: str) -> Any:
    is_good = not setting.choices or value in setting.choices
    if setting.minimum is not None:
        is_good = setting.minimum <= value <= setting.maximum  # written so that NaN fails
    if isinstance(value, str):
        is_good = is_good and "\0" not in value and bool(value.strip())
    if not is_good:
        raise _error(setting, value, origin)
    if setting.read is not None:
        try:
            return setting.read(value)
        except ConfigError as error:
            raise ConfigError(f"{error} ({origin})") from None
    return value


def _error(setting: LaunchSetting, value: Any, origin: str) -> ConfigError:
    if setting.choices:
        allowed = f"one of {', '.join(setting.choices)}"
    else:
        allowed = _KINDS[setting.kind]
        if setting.minimum is not None:
            is_bounded = setting.maximum != LaunchSetting.maximum or (
                isinstance(value, (int, float)) and value > setting.maximum
            )
            allowed += f", {setting.minimum} to {setting.maximum}" if is_bounded else f", {setting.minimum} or more"
    return ConfigError(f"{setting.name}={shown(value)} ({origin}) must be {allowed}")
