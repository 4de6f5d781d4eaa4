"""The files that `from_pretrained` needs in addition to the weights, and uploads to the Hugging Face Hub.

Nothing here knows transformers or PEFT: a model has a `config` and a `generation_config` that can write themselves, or adapters
and a `save_pretrained` of its own. The files of a tokenizer come from whoever has it, or from where the model was loaded from: its
folder, or the cache of the Hub (nothing is downloaded).
"""

import copy
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from headway.common.optional import require
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

PATTERNS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "chat_template.*", "preprocessor_config.json",
    "processor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Names of the files that say what a folder's weights are of."""
_OF_TOKENIZERS = PATTERNS[3:]


def describe(model: torch.nn.Module, folder: Path, parts: Iterable[object] = ()) -> None:
    """Write the model's configurations, and what is known of its tokenizer, into a folder.

    Args:
        model: as the user made it.
        folder: is there.
        parts: tokenizers and processors that write themselves (`save_pretrained`); None among them is passed over.
    """
    config = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        told = copy.deepcopy(config)
        if not getattr(told, "architectures", None):
            told.architectures = [type(model).__name__]  # type: ignore[union-attr]
        told.save_pretrained(folder)  # type: ignore[union-attr]
    own = [part for part in parts if callable(getattr(part, "save_pretrained", None))]
    for part in own:
        part.save_pretrained(folder)  # type: ignore[attr-defined]
    settings = getattr(model, "generation_config", None)
    if callable(getattr(settings, "save_pretrained", None)):
        try:
            settings.save_pretrained(folder)  # type: ignore[union-attr]
        except ValueError as error:  # settings that contradict each other; a save must not fail for them
            log.warning("the generation settings of %s were not written: %s", type(model).__name__, error)
    source = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    if not own and isinstance(source, str) and source:
        copy_files(_home_of(source), folder, _OF_TOKENIZERS)


def copy_files(source: Path | None, folder: Path, patterns: Iterable[str] = PATTERNS) -> list[Path]:
    """Copy the files of these names from a folder, None or one that is not there; returns the copies."""
    if source is None or not source.is_dir() or source.resolve() == folder.resolve():
        return []
    wanted = tuple(patterns)
    found = sorted(file for file in source.iterdir() if any(fnmatch(file.name, each) for each in wanted))
    copies = []
    for file in (each for each in found if each.is_file()):
        copies.append(folder / file.name)
        with file.open("rb") as source_file, open(copies[-1], "wb") as made:
            shutil.copyfileobj(source_file, made)
    return copies


def _home_of(source: str) -> Path | None:
    """The folder that a model was loaded from, in the cache where it was an id."""
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(source, "config.json")
    except Exception:  # not installed, or no id at all
        return None
    return Path(config).parent if isinstance(config, str) else None


def has_adapters(model: torch.nn.Module) -> bool:
    """Does it write its adapters itself, as PEFT's models do?"""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "save_pretrained", None))


def save_adapters(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters and their configuration.

    Args:
        model: has them.
        state: its whole tensors, by name.
        folder: where.
    """
    model.save_pretrained(folder, state_dict=dict(state))


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Make a model repository on the Hub where there is none, and upload a folder into it in one commit.

    Args:
        folder: of files; all of them are uploaded.
        repo_id: "name" or "owner/name".
        private: of a new repository; None: what the owner's settings say.
        token: None: that of `huggingface-cli login`, or HF_TOKEN.
        revision: a branch, made where missing; None: main.
        commit_message: of the commit.

    Returns:
        The commit's URL.

    Raises:
        ConfigError: no name.
        OptionalDependencyMissing: huggingface_hub is not installed.
    """
    if not repo_id:
        raise ConfigError("push_to_hub needs a repository, such as 'owner/name'")
    hub = require("huggingface_hub", "push_to_hub uploads with", "huggingface_hub")
    api = hub.HfApi(token=token)
    name = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    made = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=commit_message)
    return str(made.commit_url)
