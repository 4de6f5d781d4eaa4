"""`headway tokenize`: turn text files into the token files that `TokenDataset` and Megatron-LM read."""

import sys
from pathlib import Path

import click

from headway.cli.options import GroupedCommand, LocalPath, format_examples, make_option
from headway.cli.progress import show_progress
from headway.common.untrusted import escape_text
from headway.errors import ConfigError

_ABOUT = """Tokenize text, and write OUTPUT.bin and OUTPUT.idx, which TokenDataset and Megatron-LM read.

DATA are files, patterns or URLs: JSON lines, Parquet, Arrow, tar or MDS files with one document per record, or .txt files, each of
which is one document. They can be compressed. Documents keep their order. If the command is interrupted, run it again to
continue; until it is finished, the files have the suffix .partial.
"""

_EPILOG = format_examples(
    "headway tokenize 'data/*.jsonl.gz' --tokenizer llama/ --output tokens/web",
    "headway tokenize data/*.parquet --tokenizer tokenizer.json --eos '</s>' --output tokens/web",
    "headway tokenize book.txt --tokenizer llama/ --output book --dry-run",
)

_TOKENIZER = "Folder with a tokenizer of transformers, or a tokenizer.json."
_EOS = "ID or text of the token after each document, or none.  [default: the tokenizer's]"
_BOS = "ID or text of the token before each document, or none.  [default: none]"
_SPLIT = "Tokenize special tokens in documents like other text."
_PROCESSES = "Processes that tokenize.  [default: one for each CPU core]"
_CACHE = "Folder for indexes and decompressed files.  [default: ~/.cache/headway/shards]"
_DRY_RUN = "Tokenize only the first documents, and print what would be written."


@click.command(
    "tokenize",
    cls=GroupedCommand,
    params=[
        click.Argument(["data"], nargs=-1, required=True),
        make_option("--tokenizer", "PATH", "Tokenizer", _TOKENIZER, LocalPath(path_type=Path), required=True),
        make_option("--eos", "TOKEN", "Tokenizer", _EOS),
        make_option("--bos", "TOKEN", "Tokenizer", _BOS, default="none"),
        make_option("--split_special_tokens", None, "Tokenizer", _SPLIT),
        make_option(
            "--text_column", "NAME", "Data", "Entry with the text of a document.", default="text", show_default=True
        ),
        make_option("--cache_dir", "FOLDER", "Data", _CACHE, LocalPath(path_type=Path)),
        make_option(
            "--output",
            "PREFIX",
            "Output",
            "Path of both files without suffix.",
            LocalPath(),
            required=True,
        ),
        make_option("--overwrite", None, "Output", "Replace existing files."),
        make_option("--processes", "N", "Output", _PROCESSES, click.IntRange(min=1)),
        make_option("--dry_run", None, "Output", _DRY_RUN),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
def command(
    data: tuple[str, ...],
    tokenizer: Path,
    eos: str | None,
    bos: str,
    split_special_tokens: bool,
    text_column: str,
    cache_dir: Path | None,
    output: str,
    overwrite: bool,
    processes: int | None,
    dry_run: bool,
) -> None:
    """Tokenize documents and write a `.bin`/`.idx` pair, then print its numbers of tokens and documents, and the speed.

    Args:
        data: Paths, patterns or URLs of files with text.
        tokenizer: Folder with a tokenizer of transformers, or a `tokenizer.json`.
        eos: ID or text of the token after each document, "none", or None for the tokenizer's own.
        bos: ID or text of the token before each document, or "none".
        split_special_tokens: Whether special tokens in documents are tokenized like other text.
        text_column: Name of the entry with the text of a document.
        cache_dir: Folder for indexes and decompressed files. None: `~/.cache/headway/shards`.
        output: Path of both files without suffix.
        overwrite: Whether existing files are replaced.
        processes: Number of processes that tokenize. None: one for each CPU core that this process may use.
        dry_run: Whether to tokenize only the first documents, and to write nothing.

    Raises:
        ConfigError: If the tokenizer cannot be loaded, the pair exists, or an interrupted run had other options.
        DataError: If a document cannot be read or tokenized, or the files cannot be written.
    """
    prefix = _parse_prefix(output)
    # Imported here so that `--help` does not wait for these imports.
    from headway.language_data.token_files import tokenization
    from headway.language_data.token_files.texts import TextFiles
    from headway.language_data.token_files.tokenizer import TokenizerSettings, load_tokenizer
    from headway.language_data.token_files.writer import check_no_pair
    from headway.launch.machine import count_cores

    try:
        with show_progress():
            loaded = load_tokenizer(TokenizerSettings(str(tokenizer), eos, bos, split_special_tokens))
            files = TextFiles(data, text_column, cache_dir)
            if dry_run:
                if not overwrite:
                    check_no_pair(prefix)
                estimate = tokenization.estimate_tokens(files, loaded)
                lines = tokenization.format_estimate(estimate, files, loaded, prefix)
            else:
                num_processes = processes or count_cores()
                result = tokenization.tokenize_files(
                    files, loaded, prefix, num_processes=num_processes, overwrites=overwrite
                )
                lines = tokenization.format_result(result, loaded, prefix)
    except KeyboardInterrupt:
        click.echo("interrupted; run the command again to continue", err=True)
        sys.exit(130)
    for line in lines:
        click.echo(escape_text(line))


def _parse_prefix(output: str) -> Path:
    """Return the value of `--output` as a path.

    Raises:
        ConfigError: If it is a URL, a folder, or has the suffix of one of the two files.
    """
    if "://" in output:
        raise ConfigError(f"--output {output} is a URL; give a local path, and copy both files when they are finished")
    prefix = Path(output)
    if output.endswith("/") or prefix.name in ("", ".."):
        raise ConfigError(
            f"--output {output} is a folder; give the path of both files without suffix, such as {prefix / 'web'}"
        )
    if prefix.suffix in (".bin", ".idx"):
        raise ConfigError(f"--output {output} is the path without suffix; give {prefix.with_suffix('')}")
    return prefix
