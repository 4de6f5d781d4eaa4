"""Files that accompany exported weights, such as configurations and tokenizers, and the upload of a folder to the Hub.

This module depends on neither transformers nor PEFT. If a model has a `config` or a `generation_config` with a
`save_pretrained` method, these are exported too. A model with adapters and its own `save_pretrained` writes its
adapters itself. Tokenizer files come from objects that the caller passes, or from the folder or Hub cache from which
the model was loaded. Nothing is downloaded.
"""

import copy
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch

from headway.common.optional import require
from headway.errors import ConfigError
from headway.log import get_logger

logger = get_logger(__name__)

_TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model",
    "sentencepiece*.model", "chat_template.*", "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Name patterns of the files of tokenizers and processors."""
PATTERNS = ("config.json", "generation_config.json", "adapter_config.json", *_TOKENIZER_PATTERNS)
"""Name patterns of the files that accompany weights: configurations, tokenizers and processors."""


def write_configurations(model: torch.nn.Module, folder: Path, processors: Iterable[object] = ()) -> None:
    """Write a model's configuration files into a folder, and its tokenizer's files if the tokenizer is known.

    If the model has adapters, the files of its base are not written, because the folder contains only the adapters.

    Args:
        model: Model as the user created it, without wrappers.
        folder: Existing folder.
        processors: Tokenizers and processors with `save_pretrained`. Other objects, such as None, are skipped. Default: (),
            the tokenizer's files are copied from the folder or Hub cache from which the model was loaded.
    """
    config = getattr(model, "config", None)
    writes_base = not has_adapters(model)
    if writes_base and callable(getattr(config, "save_pretrained", None)):
        exported_config = copy.deepcopy(config)
        if not getattr(exported_config, "architectures", None):
            exported_config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        exported_config.save_pretrained(folder)  # type: ignore[union-attr]
    savable = [each for each in processors if callable(getattr(each, "save_pretrained", None))]
    for processor in savable:
        processor.save_pretrained(folder)  # type: ignore[attr-defined]
    generation_config = getattr(model, "generation_config", None)
    if writes_base and callable(getattr(generation_config, "save_pretrained", None)):
        try:
            generation_config.save_pretrained(folder)  # type: ignore[union-attr]
        except ValueError as error:  # contradictory settings must not make the save fail
            logger.warning("the generation settings of %s were not written: %s", type(model).__name__, error)
    source = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    if not savable and isinstance(source, str) and source:
        copy_files(_find_source_folder(source), folder, _TOKENIZER_PATTERNS)


def copy_files(source: Path | None, folder: Path, patterns: Iterable[str] = PATTERNS) -> list[Path]:
    """Copy files by name pattern from one folder to another, and return the paths of the copies.

    Args:
        source: Folder to copy from. Nothing is copied if it is None, does not exist, or is `folder`.
        folder: Folder to copy to.
        patterns: Name patterns of the files. Default: `PATTERNS`.
    """
    if source is None or not source.is_dir() or source.resolve() == folder.resolve():
        return []
    all_patterns = tuple(patterns)
    copies = []
    for file in sorted(source.iterdir()):
        is_selected = any(fnmatch(file.name, pattern) for pattern in all_patterns)
        if not is_selected or not file.is_file():
            continue
        target = folder / file.name
        with file.open("rb") as source_file, target.open("wb") as target_file:
            shutil.copyfileobj(source_file, target_file)
        copies.append(target)
    return copies


def _find_source_folder(source: str) -> Path | None:
    """Return the folder from which a model was loaded, or None if there is no such folder.

    Args:
        source: Folder, or ID of a model on the Hub. For an ID, the folder in the Hub's cache is returned.
    """
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(source, "config.json")
    except Exception:  # not installed, or the source is not an ID
        return None
    return Path(config).parent if isinstance(config, str) else None


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether a model has adapters and a `save_pretrained` method that writes them, like PEFT's models."""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "save_pretrained", None))


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Create a model repository on the Hub if it does not exist, and upload a folder to it in one commit.

    Args:
        folder: Folder whose files are all uploaded.
        repo_id: ID of the repository: "name" or "owner/name".
        private: Whether a new repository is private. Default: None, the default of the repository's owner.
        token: Access token. Default: None, the token of `huggingface-cli login`, or HF_TOKEN.
        revision: Branch, which is created if missing. Default: None, the branch main.
        commit_message: Message of the commit.

    Returns:
        URL of the commit.

    Raises:
        ConfigError: If `repo_id` is empty.
        OptionalDependencyMissing: If huggingface_hub is not installed.
    """
    if not repo_id:
        raise ConfigError("push_to_hub needs a repository, such as 'owner/name'")
    hub = require("huggingface_hub", "push_to_hub uploads with", "huggingface_hub")
    api = hub.HfApi(token=token)
    name = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    commit = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=commit_message)
    return str(commit.commit_url)
