"""Check a model's name before torch is imported, so that the command line reports a wrong name without delay."""

import importlib.util
import re
from pathlib import Path

from headway.core.config.values import suggest_word
from headway.errors import ConfigError

_TABLES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
"""Files of transformers that contain the table of model types. The first file exists only from version 5 on."""

_ENTRY = re.compile(r"""\(?["']([\w.-]+)["'][,:] ?["']\w+Config["']""")
"""Pattern of a table row, which contains a model type and the name of the type's config class."""


def check_model_name(text: str) -> None:
    """Raise an error if a text certainly names neither a local model, nor a function, nor a model type of transformers.

    Unlike `find_source`, this function imports neither torch nor transformers. It accepts a name in case of doubt.

    Args:
        text: Folder, config file, model type or "module:function".

    Raises:
        ConfigError: If the text certainly has none of these forms. The message suggests a similar model type.
    """
    if ":" in text or Path(text).exists():
        return
    tables = _read_tables()
    known = sorted(set(_ENTRY.findall(tables)))
    if known and not re.search(rf"""["']{re.escape(text)}["']""", tables):
        raise make_unknown_model_error(text, known)


def make_unknown_model_error(text: str, known: list[str]) -> ConfigError:
    """Return the error for a name that is neither a local model nor a model type.

    Args:
        text: Name that the user gave.
        known: Model types of the installed transformers.
    """
    return ConfigError(
        f"{text!r} is neither a folder or file with a transformers config, nor a model type of the installed transformers, "
        f"nor module:function{suggest_word(text, known)}"
    )


def check_model_folder(folder: Path) -> None:
    """Raise an error if a folder does not exist or contains no transformers config.

    Raises:
        ConfigError: If the folder or its `config.json` does not exist.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: no folder with a config.json; give a local folder as save_pretrained() writes it. "
            "For training a model type, such as llama, add --device"
        )


def _read_tables() -> str:
    """Return the source code of transformers' tables of model types, or "" if it cannot be found."""
    spec = importlib.util.find_spec("transformers")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    paths = [Path(folder) / name for folder in folders for name in _TABLES]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
