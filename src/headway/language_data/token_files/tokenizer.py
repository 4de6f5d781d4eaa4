"""Tokenizers from local files, which turn documents into token IDs."""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common.optional import require
from headway.errors import ConfigError

NO_TOKEN = "none"
"""Word with which a user chooses that no token is added to documents."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Choice of a tokenizer and of the tokens that are added to documents.

    Attributes:
        path: Folder with a tokenizer of transformers, or a `tokenizer.json`.
        eos: ID or text of the token at the end of each document, "none" for no such token, or None for the tokenizer's own.
        bos: ID or text of the token at the beginning of each document; "none" for no such token.
        splits_special_tokens: Whether special tokens in the text of a document are tokenized like other text.
    """

    path: str
    eos: str | None = None
    bos: str = NO_TOKEN
    splits_special_tokens: bool = False


@dataclass(frozen=True)
class DocumentTokenizer:
    """Tokenizer of documents, which can be sent to other processes.

    Attributes:
        name: Name of the tokenizer's class.
        encoder: `tokenizers.Tokenizer`, or a tokenizer of transformers that is written in Python.
        is_fast: Whether the encoder is a `tokenizers.Tokenizer`.
        vocab_size: Largest token ID plus 1.
        eos_token_id: ID of the token at the end of each document; None for no such token.
        bos_token_id: ID of the token at the beginning of each document; None for no such token.
        splits_special_tokens: Whether special tokens in the text are tokenized like other text.
    """

    name: str
    encoder: Any
    is_fast: bool
    vocab_size: int
    eos_token_id: int | None
    bos_token_id: int | None
    splits_special_tokens: bool

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token IDs of each text, without any added token. Texts are neither truncated nor padded.

        Raises:
            UnicodeEncodeError: If a text has characters that are not valid in UTF-8.
        """
        for text in texts:
            text.encode()  # an unpaired surrogate from JSON, which tokenizers report without the place
        if not self.is_fast:
            options = {
                "add_special_tokens": False,
                "split_special_tokens": self.splits_special_tokens,
                "verbose": False,
            }
            return [self.encoder(text, **options)["input_ids"] for text in texts]
        self.encoder.encode_special_tokens = self.splits_special_tokens  # not kept when the object is pickled
        encodings = self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def get_token_text(self, token_id: int) -> str:
        """Return the text of a token in the vocabulary."""
        convert = self.encoder.id_to_token if self.is_fast else self.encoder.convert_ids_to_tokens
        return str(convert(token_id))

    def compute_fingerprint(self) -> str:
        """Return a hash of all that determines the token IDs of a document. Equal tokenizers have equal hashes.

        The loaded tokenizer is hashed, not its folder, which often contains weights, logs or the token files themselves.
        """
        digest = hashlib.sha256(repr((self.eos_token_id, self.bos_token_id, self.splits_special_tokens)).encode())
        if self.is_fast:
            digest.update(self.encoder.to_str().encode())
            return digest.hexdigest()
        # A tokenizer that is written in Python has no text form, so hash the files that it saves.
        with tempfile.TemporaryDirectory() as folder:
            self.encoder.save_pretrained(folder)
            for file in sorted(Path(folder).iterdir()):
                digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
        return digest.hexdigest()


def load_tokenizer(settings: TokenizerSettings) -> DocumentTokenizer:
    """Load a tokenizer from local files.

    Raises:
        ConfigError: If there is no tokenizer at the path, or an added token is unknown.
        OptionalDependencyMissing: If transformers or tokenizers is not installed.
    """
    path = Path(settings.path)
    if path.is_dir():
        tokenizer = _load_folder(path)
        name, own_eos = type(tokenizer).__name__, tokenizer.eos_token
        is_fast = bool(tokenizer.is_fast)
        encoder = tokenizer.backend_tokenizer if is_fast else tokenizer
    else:
        encoder = _load_file(path)
        name, own_eos, is_fast = path.name, None, True
    if is_fast:
        # tokenizer.json can contain settings with which a batch was padded and truncated.
        encoder.no_truncation()
        encoder.no_padding()
    vocabulary: dict[str, int] = encoder.get_vocab()
    eos = own_eos if settings.eos is None else settings.eos
    if eos is None:
        raise ConfigError(
            f"{path} names no end-of-sequence token; give --eos with the ID or the text of a token, or --eos {NO_TOKEN}"
        )
    return DocumentTokenizer(
        name=name,
        encoder=encoder,
        is_fast=is_fast,
        vocab_size=max(vocabulary.values()) + 1,
        eos_token_id=_find_token("--eos", eos, vocabulary),
        bos_token_id=_find_token("--bos", settings.bos, vocabulary),
        splits_special_tokens=settings.splits_special_tokens,
    )


def _load_folder(path: Path) -> Any:
    """Return the tokenizer of transformers in a folder.

    Raises:
        ConfigError: If it cannot be loaded.
        OptionalDependencyMissing: If transformers is not installed.
    """
    transformers: Any = require("transformers", f"the tokenizer in {path} needs", "transformers")
    try:
        # Without trust_remote_code=False, transformers would ask a question and wait if the folder contains code.
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path} has no tokenizer that transformers can load ({reason}); give a folder that save_pretrained wrote, or a "
            "tokenizer.json"
        ) from error


def _load_file(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` in a `tokenizer.json`.

    Raises:
        ConfigError: If the file does not exist, or is not such a file.
        OptionalDependencyMissing: If tokenizers is not installed.
    """
    if not path.is_file():
        raise ConfigError(
            f"there is no folder or file {path}; give the path of a local tokenizer, because nothing is downloaded"
        )
    tokenizers: Any = require("tokenizers", f"{path} needs", "tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"{path} is not a tokenizer.json ({error}); give one, or a folder with a tokenizer"
        ) from error


def _find_token(flag: str, token: str, vocabulary: dict[str, int]) -> int | None:
    """Return the ID of a token that a user named by its ID or its text, or None for "none". A number is an ID.

    Raises:
        ConfigError: If there is no such token.
    """
    if token == NO_TOKEN:
        return None
    if token.isdecimal():  # an ID, although each digit is usually a token, too
        if int(token) in vocabulary.values():
            return int(token)
    elif token in vocabulary:
        return vocabulary[token]
    raise ConfigError(
        f"{flag} {token!r} is neither the ID nor the text of a token of the tokenizer; give one, or {flag} {NO_TOKEN}"
    )
