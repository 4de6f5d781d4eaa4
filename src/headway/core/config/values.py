"""Parse and check the values of single settings. Errors contain the origin of the value."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

from headway.common import env
from headway.common.untrusted import shorten_repr
from headway.core.config.launch import LaunchSetting
from headway.core.config.other_library_names import ARGUMENTS, explain_precision
from headway.errors import CallError, ConfigError

Class = TypeVar("Class", bound=type)
Handler = TypeVar("Handler", bound="KwargsHandler")

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "switch": "true or false",
    "truth": "true or false",
}


def suggest_word(word: str, known: list[str], *, prefix: str = "") -> str:
    """Return a hint such as "; did you mean num_processes?", or "" if no known word is close to `word`.

    Args:
        word: Word that the user wrote.
        known: Allowed words.
        prefix: Text to put before each suggested word, such as "--". Default: "".
    """
    suggestions = find_similar_words(word, known)
    return f"; did you mean {' or '.join(prefix + each for each in suggestions)}?" if suggestions else ""


def find_similar_words(word: str, known: list[str]) -> list[str]:
    """Return the known words that a user might have meant: up to three that begin with `word`, else the most similar one.

    Upper and lower case, and "-" and "_", count as equal. Words of one or two characters are not completed.

    Args:
        word: Word that the user wrote.
        known: Allowed words.

    Returns:
        Words as they are in `known`. Empty if no known word is similar.
    """
    from difflib import get_close_matches

    def normalize(text: str) -> str:
        return text.lower().replace("-", "_")

    wanted = normalize(word)
    known_by_form = {normalize(each): each for each in known}
    completions = []
    if len(wanted) > 2:
        completions = [each for form, each in known_by_form.items() if form.startswith(wanted)]
    # Long words share letters by chance, such as "notamodel" and "evollamodel".
    cutoff = 0.6 if len(wanted) < 6 else 0.75
    return completions[:3] or [known_by_form[form] for form in get_close_matches(wanted, known_by_form, 1, cutoff)]


def check_count(**values: object) -> None:
    """Raise `ConfigError` unless each argument is an integer of at least 1.

    Args:
        values: Values to check. The error message uses the keywords as names.

    Raises:
        ConfigError: If a value is not such an integer.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; give a number of 1 or more")


class KwargsHandler:
    """Base class of option dataclasses for the Accelerator.

    The Accelerator uses a read-only copy of the object, so later changes to the original have no effect on it. Setting
    a field of the copy raises `ConfigError`. Setting an unknown field raises `CallError`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_is_frozen"):
            raise ConfigError(
                f"{type(self).__name__}.{name} = {value!r}: an Accelerator already uses these options. Set them before you create "
                "it"
            )
        known = [each.name for each in fields(self)]  # type: ignore[arg-type]
        if name not in known:
            raise CallError(f"{type(self).__name__} has no field {name!r}{suggest_word(name, known)}")
        object.__setattr__(self, name, value)

    def freeze_copy(self: Handler) -> Handler:
        """Validate the options, and return a copy that is read-only.

        Raises:
            ConfigError: If a field has an invalid value.
        """
        copy = replace(self)  # type: ignore[type-var]  # with a dataclass
        object.__setattr__(copy, "_is_frozen", True)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


def report_unknown_keywords(kind: Class) -> Class:
    """Decorate a class so that its constructor reports an unknown keyword, and suggests the most similar known keyword.

    Raises:
        CallError: From the decorated class's constructor, if it gets an unknown keyword.
    """
    constructor: Callable[..., None] = vars(kind)["__init__"]
    # The constructor's parameters come first among its local variables. `self` is left out.
    code = constructor.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @wraps(constructor)
    def initialize_checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                hint = f": {ARGUMENTS[name]}" if name in ARGUMENTS else suggest_word(name, [*known])
                hint = hint or f"; allowed: {', '.join(known)}"
                raise CallError(f"{type(self).__name__}() has no argument {name!r}{hint}")
        constructor(self, *args, **kwargs)

    type.__setattr__(kind, "__init__", initialize_checked)  # mypy refuses `kind.__init__ = ...`
    return kind


def parse_text(setting: LaunchSetting, text: str, origin: str) -> Any:
    """Parse a value that was given as text, on the command line or in the environment.

    Args:
        setting: Description of the setting.
        text: Text of the value.
        origin: Where the value was set, for error messages.

    Raises:
        ConfigError: If the text is not a valid value. The message contains setting, text, origin and allowed values.
    """
    if setting.kind == "text":
        return _check_value(setting, text, origin)
    if setting.kind in ("switch", "truth"):
        return env.parse_bool(text, f"{setting.name} ({origin})")
    if setting.kind == "choice":
        return _check_value(setting, text.strip().lower(), origin)
    try:
        value: Any = int(text) if setting.kind == "integer" else float(text)
    except ValueError:
        raise _make_error(setting, text, origin) from None
    return _check_value(setting, value, origin)


def check_file_value(setting: LaunchSetting, value: Any, origin: str) -> Any:
    """Return a value from a config file in normalized form, or raise an error if its type or range is wrong.

    In YAML, an unquoted `no` means False. For a setting that has the choice "no", False is converted back to "no".
    Integers are converted to text for "text" and "choice" settings, and to float for "number" settings.

    Args:
        setting: Description of the setting.
        value: Value as the YAML parser returned it.
        origin: Where the value was set, for error messages.

    Raises:
        ConfigError: If the value has the wrong type, or is out of range or not allowed.
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # too long for Python to print or to convert to float
        raise _make_error(setting, value, origin)
    if setting.kind == "choice":
        if value is False and "no" in setting.choices:
            return "no"
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        has_right_type = isinstance(value, str)
    elif setting.kind == "text":
        if isinstance(value, int) and not isinstance(value, bool):  # such as `gpu_ids: 0`
            value = str(value)
        has_right_type = isinstance(value, str)
    elif setting.kind in ("switch", "truth"):
        has_right_type = isinstance(value, bool)
    else:
        number_types = (int, float) if setting.kind == "number" else (int,)
        has_right_type = isinstance(value, number_types) and not isinstance(value, bool)
    if not has_right_type:
        raise _make_error(setting, value, origin)
    return _check_value(setting, float(value) if setting.kind == "number" else value, origin)


def _check_value(setting: LaunchSetting, value: Any, origin: str) -> Any:
    """Return a value after its setting's normalization.

    Args:
        setting: Description of the setting.
        value: Value of the right type.
        origin: Where the value was set, for messages.

    Raises:
        ConfigError: If the value is not one of the choices, out of range, or an empty text.
    """
    is_allowed = not setting.choices or value in setting.choices
    if setting.minimum is not None:
        is_allowed = setting.minimum <= value <= setting.maximum  # False for NaN, too
    if isinstance(value, str):
        is_allowed = is_allowed and "\0" not in value and bool(value.strip())
    if not is_allowed:
        raise _make_error(setting, value, origin)
    if setting.normalize is not None:
        try:
            return setting.normalize(value)
        except ConfigError as error:
            raise ConfigError(f"{error} ({origin})") from None
    return value


def _make_error(setting: LaunchSetting, value: Any, origin: str) -> ConfigError:
    """Return the error for a wrong value of a setting. The message contains the value, its origin, and what is allowed."""
    if setting.choices:
        allowed = f"one of {', '.join(setting.choices)}"
    else:
        allowed = _KINDS[setting.kind]
        if setting.minimum is not None:
            is_bounded = setting.maximum != LaunchSetting.maximum or (
                isinstance(value, (int, float)) and value > setting.maximum
            )
            allowed += f", {setting.minimum} to {setting.maximum}" if is_bounded else f", {setting.minimum} or more"
    hint = explain_precision(value, setting.choices) if setting.name == "mixed_precision" else ""
    return ConfigError(f"{setting.name}={shorten_repr(value)} ({origin}) must be {allowed}{hint}")
