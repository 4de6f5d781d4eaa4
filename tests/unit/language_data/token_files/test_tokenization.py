"""Test `headway tokenize`: its content, resumes, and errors."""

import gzip
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, processors

from headway import TokenDataset
from headway.cli.main import group
from headway.errors import ConfigError, DataError, StateError
from headway.language_data.token_files.indexed import choose_type
from headway.language_data.token_files.texts import TextFiles
from headway.language_data.token_files.tokenizer import TokenizerSettings, load_tokenizer
from headway.language_data.token_files.workers import map_in_order
from headway.language_data.token_files.writer import TokenizeProgress, TokenWriter
from tests.unit.language_data.token_files.token_file_writers import make_index, make_tokenizer
from tests.unit.language_data.token_files.worker_functions import double_or_die, is_interrupt_blocked

TEXTS = [f"Document {number}: " + "the quick brown fox jumps over it. " * (number % 5) for number in range(60)]


def run_command(*words: object) -> Result:
    return CliRunner().invoke(group, ["tokenize", *map(str, words)], catch_exceptions=True)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    make_tokenizer(TEXTS).save(str(path))
    return path


@pytest.fixture
def tokenize(tmp_path: Path, tokenizer: Path) -> Callable[..., Result]:
    """Return a function that tokenizes files to `tmp_path/out`."""
    fixed = ("--tokenizer", tokenizer, "--output", tmp_path / "out", "--cache_dir", tmp_path / "cache")

    def run(*words: object, eos: str | None = "<|endoftext|>") -> Result:
        return run_command(*words, *fixed, *(() if eos is None else ("--eos", eos)))

    return run


def write_lines(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def encode_by_hand(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    """Return the expected documents, each of which ends with token 0."""
    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.no_truncation()
    encoder.no_padding()
    return [[*encoder.encode(text, add_special_tokens=False).ids, 0] for text in texts]


def check_pair(prefix: Path, documents: list[list[int]]) -> None:
    """Compare both files, byte by byte, with what the format prescribes."""
    tokens = [token for document in documents for token in document]
    assert Path(f"{prefix}.bin").read_bytes() == numpy.array(tokens, "<u2").tobytes()
    lengths = [len(document) for document in documents]
    assert Path(f"{prefix}.idx").read_bytes() == make_index(lengths, list(range(len(documents) + 1)), "uint16")


def test_files_of_several_formats(tmp_path: Path, tokenizer: Path, tokenize: Callable[..., Result]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    import pyarrow

    first = write_lines(tmp_path / "a.jsonl", TEXTS[:20])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(write_lines(tmp_path / "b", TEXTS[20:30]).read_bytes()))
    rows = [{"id": number, "text": text} for number, text in enumerate([*TEXTS[30:50], None, ""])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=6)
    (tmp_path / "d.txt").write_text("\n".join(TEXTS[50:]))
    result = tokenize(first, tmp_path / "b.jsonl.gz", tmp_path / "c.parquet", tmp_path / "d.txt", "--processes", 2)
    assert result.exit_code == 0, result.exception
    expected = encode_by_hand(tokenizer, [*TEXTS[:50], "\n".join(TEXTS[50:])])
    check_pair(tmp_path / "out", expected)
    num_tokens = sum(map(len, expected))
    assert f"{tmp_path}/out.idx: {num_tokens:,} tokens in 51 documents, uint16," in result.stdout
    assert "tokens/s" in result.stdout
    assert "2 documents without text left out" in result.stdout
    dataset = TokenDataset(tmp_path / "out", vocab_size=300)
    assert [sample["input_ids"].tolist() for sample in dataset] == expected
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]
    again = tokenize(first)
    assert isinstance(again.exception, ConfigError)
    assert "out.bin exists; choose another --output, or replace it with --overwrite" in str(again.exception)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]
    assert tokenize(first, "--overwrite", "--processes", 1).exit_code == 0
    check_pair(tmp_path / "out", expected[:20])


def test_added_and_special_tokens(tmp_path: Path, tokenizer: Path, tokenize: Callable[..., Result]) -> None:
    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.enable_truncation(4)
    encoder.enable_padding(length=50)
    encoder.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    encoder.save(str(tokenizer))
    text = "One<|endoftext|>two, and more than four tokens."
    data = write_lines(tmp_path / "a.jsonl", [text])
    one, two = encode_by_hand(tokenizer, ["One", "two, and more than four tokens."])
    result = tokenize(data, "--processes", 1)
    assert result.exit_code == 0, result.exception
    check_pair(tmp_path / "out", [one + two])
    assert "'<|endoftext|>' is in the text of 1 document; --split_special_tokens" in result.stdout
    assert tokenize(data, "--processes", 1, "--overwrite", "--bos", "0", eos="none").exit_code == 0
    check_pair(tmp_path / "out", [[0, *one, *two[:-1]]])
    result = tokenize(data, "--processes", 1, "--overwrite", "--split_special_tokens")
    assert "is in the text" not in result.stdout
    (document,) = [sample["input_ids"].tolist() for sample in TokenDataset(tmp_path / "out")]
    assert 0 not in document[:-1]
    assert encoder.decode(document, skip_special_tokens=False) == text + "<|endoftext|>"


def test_folder_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(tokenizer)), eos_token="<|endoftext|>")
    reference.save_pretrained(tmp_path / "folder")
    loaded = load_tokenizer(TokenizerSettings(str(tmp_path / "folder")))
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.vocab_size) == (0, None, len(reference))
    assert loaded.encode(TEXTS) == reference(TEXTS, add_special_tokens=False)["input_ids"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="has no tokenizer that transformers can load"):
        load_tokenizer(TokenizerSettings(str(tmp_path / "other")))


def test_tokenizer_that_is_written_in_python(tmp_path: Path) -> None:
    """A byte-level tokenizer of transformers, which has no fast version."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    loaded = load_tokenizer(TokenizerSettings(str(tmp_path / "byt5")))
    assert not loaded.is_fast
    assert loaded.encode(["ab", ""]) == [[ord("a") + 3, ord("b") + 3], []]
    assert loaded.get_token_text(1) == "</s>"
    assert loaded.eos_token_id == 1


def test_dry_run_writes_nothing(tmp_path: Path, tokenizer: Path, tokenize: Callable[..., Result]) -> None:
    data = write_lines(tmp_path / "a.jsonl", TEXTS)
    result = tokenize(data, "--dry-run")
    assert result.exit_code == 0, result.exception
    num_tokens = sum(map(len, encode_by_hand(tokenizer, TEXTS)))
    assert f"60 documents in 1 file; about {num_tokens:,} tokens" in result.stdout
    assert "tokenizer.json with 300 IDs, stored as uint16" in result.stdout
    assert "each document ends with '<|endoftext|>' (ID 0)" in result.stdout
    assert list(tmp_path.glob("out*")) == []
    (tmp_path / "out.bin").touch()
    assert "out.bin exists; choose another --output" in str(tokenize(data, "--dry-run").exception)
    assert tokenize(data, "--dry-run", "--overwrite").exit_code == 0
    assert (tmp_path / "out.bin").stat().st_size == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}\n', "a document has no 'text', only 'body'; give --text_column"),
        ('{"text": 5}\n', "has a int in 'text' instead of text"),
        ('["a"]\n', "a record is a list instead of an object; write one object with the entry 'text' per line"),
        ('{"text": "a"}\n{"text": \n', r"a.jsonl: the record at byte 14 is damaged"),
        ('{"text": "\\ud800"}\n', "a text is not valid Unicode"),
        ('{"text": ""}\n', "all documents are empty"),
        ("", "has no documents"),
    ],
)
def test_wrong_data(tmp_path: Path, tokenize: Callable[..., Result], content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    result = tokenize(tmp_path / "a.jsonl", "--processes", 1)
    assert isinstance(result.exception, DataError)
    assert message in str(result.exception)
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.idx").exists()


def test_wrong_options(tmp_path: Path, tokenizer: Path, tokenize: Callable[..., Result]) -> None:
    data = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for words, eos, message in [
        ((data,), None, "names no end-of-sequence token; give --eos"),
        ((data,), "</s>", "--eos '</s>' is neither the ID nor the text of a token"),
        ((data,), "300", "--eos '300' is neither"),
        ((data, "--bos", "<s>"), "0", "--bos '<s>' is neither"),
        ((tmp_path / "a.csv",), "0", "a.csv is not clear from its suffix; rename it"),
        ((tmp_path / "latin1.txt",), "0", "a text is not UTF-8"),
        ((tmp_path / "none.jsonl",), "0", "no file matches"),
        ((tmp_path,), "0", f"{tmp_path} is a folder; give a pattern, such as {tmp_path}/*.jsonl"),
    ]:
        result = tokenize(*words, "--processes", 1, eos=eos)
        assert message in str(result.exception), result.output
    for words, message in [
        (("--tokenizer", tokenizer, "--output", tmp_path / "out.bin"), "is the path without suffix; give"),
        (
            ("--tokenizer", tokenizer, "--output", f"{tmp_path}/"),
            f"is a folder; give the path of both files without suffix, such as {tmp_path}/web",
        ),
        (("--tokenizer", tokenizer, "--output", "."), "--output . is a folder"),
        (("--tokenizer", tokenizer, "--output", ".."), "such as ../web"),
        (("--tokenizer", tokenizer, "--output", "s3://bucket/web"), "is a URL; give a local path"),
        (("--tokenizer", "gpt2", "--output", tmp_path / "out"), "nothing is downloaded"),
        (("--tokenizer", data, "--output", tmp_path / "out"), "is not a tokenizer.json"),
    ]:
        result = run_command(data, *words)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_type_is_that_of_megatron() -> None:
    """Megatron-LM's `DType.optimal_dtype` compares with 65500."""
    assert [choose_type(size).name for size in (300, 65_499, 65_500, 128_256)] == ["uint16", "uint16", "int32", "int32"]


KILLED_RUN = """
import os, signal, sys
from headway.language_data.token_files import tokenization, writer

tokenization._SAVE_SECONDS = -1.0
kill_after, method = int(sys.argv[1]), sys.argv[2]
target = tokenization.TokenWriter if method == "add_block" else writer.Path
original = getattr(target, method)
calls = []

def kill_later(self, *arguments, **options):
    result = original(self, *arguments, **options)
    if method == "add_block" or str(self).endswith(("out.bin.partial", "out.idx.partial")):
        calls.append(1)
    if len(calls) == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

if __name__ == "__main__":
    setattr(target, method, kill_later)
    from headway.cli.main import main
    main(sys.argv[3:])
"""


def test_run_that_was_killed_does_not_continue_after_one_with_other_settings(tmp_path: Path) -> None:
    def add(writer: TokenWriter, token_id: int, count: int) -> None:
        lengths = numpy.array([count])
        writer.add_block(
            numpy.full(count, token_id, numpy.uint16),
            lengths,
            TokenizeProgress(num_blocks=1, num_documents=1, num_tokens=count),
        )

    dtype = numpy.dtype(numpy.uint16)
    with TokenWriter(tmp_path / "out", dtype, "first", overwrites=False).open() as run:
        add(run, 1, 3)
        run.save_progress()  # and then interrupted
    child = os.fork()
    if child == 0:  # killed before it has stored its progress, after it has written more than the first run
        with TokenWriter(tmp_path / "out", dtype, "second", overwrites=True).open() as run:
            add(run, 2, 100)
            run._bin_file.flush()
            run._lengths_file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with TokenWriter(tmp_path / "out", dtype, "first", overwrites=False).open() as run:
        assert run.progress == TokenizeProgress()  # from the beginning
        add(run, 1, 5)
        run.commit()
    assert numpy.fromfile(tmp_path / "out.bin", numpy.uint16).tolist() == [1] * 5


def test_fingerprint_depends_only_on_the_loaded_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(tokenizer)), eos_token="<|endoftext|>")
    for name, saved in (("fast", fast), ("slow", ByT5Tokenizer())):
        settings = TokenizerSettings(str(tmp_path / name))
        saved.save_pretrained(tmp_path / name)
        before = load_tokenizer(settings).compute_fingerprint()
        for other in ("tokens.bin.partial", "model.safetensors", "run.txt"):
            (tmp_path / name / other).write_text("changed")
        assert load_tokenizer(settings).compute_fingerprint() == before
        others = [
            TokenizerSettings(settings.path, bos="1"),
            TokenizerSettings(settings.path, splits_special_tokens=True),
        ]
        assert len({before, *(load_tokenizer(other).compute_fingerprint() for other in others)}) == 3
        saved.add_tokens(["added"])
        saved.save_pretrained(tmp_path / name)
        assert load_tokenizer(settings).compute_fingerprint() != before


@pytest.mark.parametrize(
    ("kill_after", "method"),
    [(1, "add_block"), (4, "add_block"), (6, "add_block"), (1, "replace"), (2, "replace")],
)
def test_killed_run_continues(tmp_path: Path, tokenizer: Path, kill_after: int, method: str) -> None:
    """A run is killed after some blocks, or between the two renames at the end."""
    files = [write_lines(tmp_path / f"{number}.jsonl", TEXTS[10 * number : 10 * number + 10]) for number in range(6)]
    options = ["--tokenizer", str(tokenizer), "--eos", "0", "--cache_dir", str(tmp_path / "cache"), "--processes", "2"]
    words = ["tokenize", *map(str, files), *options, "--output", str(tmp_path / "out")]
    script = tmp_path / "script.py"
    script.write_text(KILLED_RUN)
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    killed = subprocess.run([sys.executable, script, str(kill_after), method, *words], env=environment, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "out.idx").exists() == ((kill_after, method) == (2, "replace"))
    assert (tmp_path / "out.bin").exists() == (method == "replace")
    if method == "add_block" and kill_after == 4:
        other = CliRunner().invoke(group, [*words, "--split_special_tokens"])
        assert isinstance(other.exception, ConfigError)
        assert "an interrupted run has begun" in str(other.exception)
    result = CliRunner().invoke(group, words)
    expected = encode_by_hand(tokenizer, TEXTS)
    if (kill_after, method) == (2, "replace"):  # nothing was left to do
        assert "exists; choose another --output" in str(result.exception)
    else:
        assert result.exit_code == 0, result.exception
        assert "60 documents" in result.stdout
    check_pair(tmp_path / "out", expected)
    assert [path.name for path in tmp_path.glob("out.*") if path.suffix not in (".bin", ".idx", ".partial")] == []
    assert not (tmp_path / "out.progress.partial").exists()
    assert not (tmp_path / "out.bin.partial").exists()


def test_workers_return_results_in_order_and_report_their_end() -> None:
    numbers = [1, 2, 7, 8, 9, 1, 2, 7, 8, 9, 10]
    assert list(map_in_order(double_or_die, numbers, 2)) == [2 * number for number in numbers]
    for number, error, message in [
        (3, DataError, "three is damaged"),
        (4, StateError, "OSError in a worker process: four"),
        (5, StateError, "worker process 0 ended with SIGKILL; if its memory ran out, use fewer"),
    ]:
        results = map_in_order(double_or_die, [1, number], 1)
        assert next(results) == 2
        with pytest.raises(error, match=message):
            next(results)
    assert multiprocessing.active_children() == []


def test_interrupts_do_not_reach_workers_while_they_start() -> None:
    assert list(map_in_order(is_interrupt_blocked, [0, 1], 2)) == [True, True]
    assert not is_interrupt_blocked(0)  # in this process


def test_another_process_that_writes_the_same_files_is_an_error(
    tmp_path: Path, tokenize: Callable[..., Result]
) -> None:
    import fcntl

    data = write_lines(tmp_path / "a.jsonl", TEXTS)
    with (tmp_path / "out.lock.partial").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = tokenize(data)
    assert isinstance(result.exception, ConfigError)
    assert "another process is writing" in str(result.exception)


def test_texts_of_tar_and_arrow_files(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is optional")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, text in enumerate(["one", "tw\u00f6", ""]):
            (tmp_path / f"{number}.txt").write_bytes(text.encode())
            archive.add(tmp_path / f"{number}.txt", f"{number}.txt")
    table = arrow.table({"txt": ["three", None], "id": [3, 4]})
    with arrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    files = TextFiles([f"{tmp_path}/a.tar", f"{tmp_path}/b.arrow"], "txt", tmp_path / "cache")
    texts = [text for block in files.blocks for text in files.read_texts(block)]
    assert texts == ["one", "tw\u00f6", "", "three", ""]
    copy = pickle.loads(pickle.dumps(files))
    assert copy.read_texts(copy.blocks[1]) == ["three", ""]
    assert files.read_texts(files.blocks[0], 2) == ["one", "tw\u00f6"]


def test_large_json_lines_file_has_several_blocks(tmp_path: Path) -> None:
    texts = ["x" * 100_000 for _ in range(40)]
    files = TextFiles([str(write_lines(tmp_path / "a.jsonl", texts))], "text", tmp_path / "cache")
    assert len(files.blocks) == 4
    assert [text for block in files.blocks for text in files.read_texts(block)] == texts


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_byte_order_mark_is_no_text(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(start + b"one\r\n")
    (tmp_path / "b.jsonl").write_bytes(start + b'{"text": "two"}\r\n')
    files = TextFiles([f"{tmp_path}/a.txt", f"{tmp_path}/b.jsonl"], "text", tmp_path / "cache")
    assert [text for block in files.blocks for text in files.read_texts(block)] == ["one\r\n", "two"]


def test_full_disk_is_an_error_after_which_a_run_continues(
    tmp_path: Path, tokenizer: Path, tokenize: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_lines(tmp_path / f"{number}.jsonl", TEXTS[10 * number : 10 * number + 10]) for number in range(6)]
    original = TokenWriter.add_block

    def fail_later(self: TokenWriter, *arguments: Any) -> None:
        if self.progress.num_blocks == 4:
            raise OSError(28, "No space left on device")
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "add_block", fail_later)
        result = tokenize(*files, "--processes", 2)
    assert isinstance(result.exception, DataError)
    assert "out cannot be written: No space left on device. Remove the cause and run the command again" in str(
        result.exception
    )
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out.bin.partial", "out.lengths.partial", "out.progress.partial",
    ]  # fmt: skip
    result = tokenize(*files, "--processes", 1)
    assert "continuing after 40 documents of an interrupted run" in result.stderr
    check_pair(tmp_path / "out", encode_by_hand(tokenizer, TEXTS))
