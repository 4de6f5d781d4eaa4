"""Runs with checkpoints in an object store: exact resuming, range reads, and protection against kills, errors and other runs."""

import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.common import scope
from headway.common.object_path import PART, THREADS, to_path
from headway.core.checkpoint import folders, lock
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.errors import CheckpointError, ConfigError
from headway.integrations.object_store.lock import ObjectLock
from tests.distributed.ranks import run_ranks
from tests.stores import server
from tests.stores.proxy import Proxy
from tests.sweep import store_faults

WIDTH = 1000
"""Width of a model of 3 million values: 12 MB, plus 24 MB of optimizer state. A manifest has 40 KB and is read several times."""


@pytest.fixture(scope="module")
def port():
    with server.running() as found:
        yield found


@pytest.fixture
def proxy(port, monkeypatch):
    """Start a proxy for this test, and make this process use it."""
    with Proxy(port) as made:
        for name, value in server.environment(made.port, patience=6, timeout=3).items():
            monkeypatch.setenv(name, value)
        scope.clear()
        yield made
        store_faults.release_locks()
        scope.clear()


def train(folder, strategy, until, settings=None, ports=(), blocking=True, every=2):
    """Train up to update `until`, from the last checkpoint if there is one.

    Args:
        folder: Folder or URL of the run.
        strategy: Strategy of the Accelerator.
        until: Number of the last update.
        settings: Environment variables.
        ports: Port of each rank's proxy. Default: the port in `settings`.
        blocking: Whether saves block.
        every: Updates between saves.

    Returns:
        The update at which the run began, and this rank's model and optimizer tensors.
    """
    rank = int(os.environ.get("RANK", "0"))
    os.environ.update(settings or {}, **({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[rank]}"} if ports else {}))
    set_seed(3)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, strategy=strategy, project_config=project)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
    accelerator.resume("latest")
    began = accelerator.num_updates
    for _ in accelerator.epochs(2):
        for (x,) in loader:
            if accelerator.num_updates == until:
                break
            with accelerator.accumulate(model):
                accelerator.backward(model(x + torch.rand(1)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % every == 0:
                accelerator.save_state(blocking=blocking)
        if accelerator.num_updates == until:
            break
    accelerator.wait_for_save()
    tensors = [
        *model.state_dict().values(),
        *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
    ]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    accelerator.end_training()
    return began, [each.detach().clone() for each in local]


def is_same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "fsdp"])
def test_resumed_run_is_exact_and_each_rank_reads_only_its_part(strategy, port, tmp_path):
    url, settings = f"s3://{server.BUCKET}/resumed_{strategy}", server.environment(port)
    whole = run_ranks(train, 2, tmp_path / "whole", strategy, 6)
    first = run_ranks(train, 2, url, strategy, 4, settings, (), False)
    with Proxy(port) as left, Proxy(port) as right:
        # Two more updates without a save, so that only the resume reads.
        second = run_ranks(train, 2, url, strategy, 6, settings, (left.port, right.port), True, 1000)
        delivered = [left.delivered, right.delivered]
    assert [began for began, _ in first + second] == [0, 0, 4, 4]
    for (_, one), (_, other) in zip(whole, second, strict=True):
        assert is_same(one, other)
    for (_, values), read in zip(second, delivered, strict=True):
        own = sum(each.numel() * each.element_size() for each in values)
        print(f"bytes read / own: {read / own:.4f}")
        assert own <= read <= 1.05 * own, (own, read)


def test_other_layout_reads_only_the_ranges_it_needs(port):
    url, settings = f"s3://{server.BUCKET}/relaid", server.environment(port)
    (_, saved), _ = run_ranks(train, 2, url, "ddp", 2, settings)
    with Proxy(port) as left, Proxy(port) as right:
        taken = run_ranks(train, 2, url, "fsdp", 2, settings, (left.port, right.port), True, 1000)
        delivered = [left.delivered, right.delivered]
    total = sum(each.numel() * each.element_size() for each in saved)
    for (began, values), read in zip(taken, delivered, strict=True):
        own = sum(each.numel() * each.element_size() for each in values)
        print(f"bytes read / own: {read / own:.4f}")
        assert began == 2
        assert own < 0.51 * total
        assert own <= read <= 1.05 * own, (own, read)
    for index, whole in enumerate(saved):
        parts = [values[index] for _, values in taken]
        assert torch.equal(torch.cat(parts) if whole.dim() else parts[0], whole)


def test_objects_of_a_run(proxy, port):
    """Check checkpoint numbers, the limit, the best checkpoint, an explicit folder, and objects of other programs."""
    url = f"s3://{server.BUCKET}/run"
    project = ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=1, keep_best="min")
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    for metric in (1.0, 0.5, 2.0, 3.0):
        accelerator.save_state(metric=metric)
    place = to_path(url) / "checkpoints"
    assert [path.name for path in folders.list_committed(place)] == ["checkpoint_3", "checkpoint_1"]
    kept = set(server.keys(port, "run/"))
    owners = {"/".join(key.split("/")[:3]) for key in kept}
    assert owners == {
        "run/checkpoints/checkpoint_3",
        "run/checkpoints/checkpoint_1",
        "run/checkpoints/latest",
        "run/checkpoints.lock",
    }
    other = f"s3://{server.BUCKET}/elsewhere/mine"
    free = Accelerator(cpu=True)
    copy = free.prepare(torch.nn.Linear(3, 1))
    with torch.no_grad():
        copy.weight.copy_(model.weight)
    for value in range(3):  # each save replaces the last
        with torch.no_grad():
            copy.bias.fill_(value)
        free.save_state(other)
    with torch.no_grad():
        copy.bias.fill_(9)
        copy.weight.fill_(9)
    free.load_state(other)
    assert copy.bias.item() == 2
    assert torch.equal(copy.weight, model.weight)
    fresh = torch.nn.Linear(3, 1)
    free.load_weights(fresh, other, strict=True)  # read by prepare()
    fresh = free.prepare(fresh)
    assert fresh.bias.item() == 2
    assert torch.equal(fresh.weight, model.weight)
    nonces = {key.split("/")[2] for key in server.keys(port, "elsewhere/mine/")}
    assert len(nonces) == 2, "only the manifest and the files of one save may remain"
    server.s3(port).put_object(Bucket=server.BUCKET, Key="elsewhere/theirs/notes.txt", Body=b"mine")
    with pytest.raises(CheckpointError, match="contains objects"):
        free.save_state(f"s3://{server.BUCKET}/elsewhere/theirs")
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        free.load_state(f"s3://{server.BUCKET}/elsewhere/nothing")
    with pytest.raises(ConfigError, match="as text"):
        free.save_state(Path(other))
    free.end_training()
    accelerator.end_training()
    assert not [key for key in server.keys(port) if key.endswith(".lock")]


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(proxy, port):
    root = f"s3://{server.BUCKET}/litter"
    assert store_faults.save(root, 1, True) == "saved"
    put = server.s3(port).put_object
    litter = [
        "checkpoint_1/data-0123456789abcdef/model-00000.safetensors",
        "checkpoint_7/data-0123456789abcdef/.writing-0",
    ]
    theirs = ["notes.txt", "checkpoint_7/data-mine/x", "checkpoint_7/other", "data-0123456789abcdef"]
    for name in litter + theirs:
        put(Bucket=server.BUCKET, Key=f"litter/{name}", Body=b"?")
    put(Bucket=server.BUCKET, Key="litter_of_others/checkpoint_1/data-0123456789abcdef/x", Body=b"?")
    assert store_faults.save(root, 2, True) == "saved"
    left = set(store_faults.list_stray_keys(port, root))
    assert left == {f"litter/{name}" for name in theirs}
    assert server.keys(port, "litter_of_others/")


# ---------------------------------------------------------------- two writers


def save_in_another_process(port, root):
    os.environ.update(server.environment(port))
    return store_faults.save(root, 5, True)


def test_second_writer_is_rejected(proxy, port):
    root = f"s3://{server.BUCKET}/two"
    assert store_faults.save(root, 1, True) == "saved"
    output = run_ranks(save_in_another_process, 1, port, root)[0]
    assert output.startswith("refused")
    assert f"process {os.getpid()} on" in output
    assert store_faults.save(root, 2, True) == "saved"
    store_faults.release_locks()
    assert run_ranks(save_in_another_process, 1, port, root) == ["saved"]


def test_lock_of_a_silent_machine_is_taken_over(proxy, port, monkeypatch):
    """The holder's machine cannot be queried. Clocks play no role, because nothing reads the objects' times."""
    monkeypatch.setattr(lock, "SILENCE", 1.5)
    monkeypatch.setattr(lock, "BEAT", 0.3)
    monkeypatch.setattr(lock, "_get_machine_id", lambda: "another one")
    folder = to_path(f"s3://{server.BUCKET}/silent/checkpoints")
    first = ObjectLock(folder, "first", "1")
    monkeypatch.setattr(lock, "_get_machine_id", lambda: "this one")
    with pytest.raises(CheckpointError, match=r"run first .* Two runs in one folder"):
        ObjectLock(folder, "second", "2")
    first._end.set()  # simulates that the first machine died
    time.sleep(0.5)
    second = ObjectLock(folder, "second", "2")
    second.check()
    with pytest.raises(CheckpointError, match=r"was taken by another run while this one did not respond.*run second"):
        first.check()
    second.release()
    assert not server.keys(port, "silent/")


def test_writer_that_lost_its_lock_commits_nothing(proxy, port, monkeypatch):
    """Another run takes the lock and removes the uploaded files between the last heartbeat and the commit."""
    root = f"s3://{server.BUCKET}/paused"
    assert store_faults.save(root, 1, True) == "saved"
    path = to_path(f"{root}.lock")

    def steal(request):
        if request.method == "PUT" and request.target.endswith("manifest.json") and not stolen:
            stolen.append(server.s3(port).put_object(Bucket=server.BUCKET, Key=path.key, Body=b"{}"))
            for key in server.keys(port, "paused/checkpoint_2/data-"):
                server.s3(port).delete_object(Bucket=server.BUCKET, Key=key)

    stolen = []
    proxy.judge = steal
    output = store_faults.save(root, 2, True)
    assert output.startswith("refused"), output
    assert "by another run" in output
    assert store_faults.load_value(root) == 1


# ---------------------------------------------------------------- failures


def test_expired_credentials_are_an_error_that_says_what_to_do(proxy, port):
    root = f"s3://{server.BUCKET}/expired"
    assert store_faults.save(root, 1, True) == "saved"
    proxy.judge = lambda request: "expired" if "data-" in request.target else None
    output = store_faults.save(root, 2, True)
    assert output.startswith("refused")
    assert "credentials were refused" in output
    assert "renew them" in output
    assert sum(fault == "expired" for _, fault in proxy.met) < 12, "rejected requests must not be repeated"
    proxy.reset()
    assert store_faults.load_value(root) == 1


def test_unavailable_store_is_retried_for_a_limited_time(proxy, port):
    root = f"s3://{server.BUCKET}/away"
    assert store_faults.save(root, 1, True) == "saved"
    proxy.judge = lambda request: "503"
    began = time.monotonic()
    output = store_faults.save(root, 2, True)
    assert "attempts in" in output
    assert "HEADWAY_STORE_RETRY_SECONDS" in output
    assert time.monotonic() - began < 60
    proxy.reset()
    assert store_faults.load_value(root) == 1


def flip_a_bit(port, folder):
    """Flip a bit in the middle of a checkpoint's first weight file, and return the object's key."""
    key = next(key for key in server.keys(port, folder) if "model-" in key)
    body = bytearray(server.s3(port).get_object(Bucket=server.BUCKET, Key=key)["Body"].read())
    body[len(body) // 2] ^= 1
    server.s3(port).put_object(Bucket=server.BUCKET, Key=key, Body=bytes(body))
    return key


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "fsdp"])
def test_resume_skips_a_damaged_checkpoint(strategy, port):
    name = f"passed_over_{strategy}"
    url, settings = f"s3://{server.BUCKET}/{name}", server.environment(port)
    whole = run_ranks(train, 2, url, strategy, 6, settings)
    flip_a_bit(port, f"{name}/checkpoints/checkpoint_2/")
    resumed = run_ranks(train, 2, url, strategy, 6, settings)
    assert [began for began, _ in resumed] == [4, 4]
    for (_, one), (_, other) in zip(whole, resumed, strict=True):
        assert is_same(one, other)
    # The next checkpoint gets a new number, so the damaged one is not overwritten.
    left = {key.split("/")[2] for key in server.keys(port, f"{name}/checkpoints/checkpoint_")}
    assert left == {"checkpoint_2", "checkpoint_3"}
    flip_a_bit(port, f"{name}/checkpoints/checkpoint_3/")
    for (message,) in run_ranks(get_resume_error, 2, url, strategy, settings):
        assert "contains 2 checkpoints, and all of them are damaged" in message


def get_resume_error(url, strategy, settings):
    with pytest.raises(CheckpointError) as exc_info:
        train(url, strategy, 2, settings)
    return (str(exc_info.value),)


def test_damaged_or_lost_file_is_named(proxy, port):
    root = f"s3://{server.BUCKET}/damaged"
    assert store_faults.save(root, 1, True) == "saved"
    key = flip_a_bit(port, "damaged/checkpoint_1/")
    folder = to_path(root) / "checkpoint_1"
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is damaged: its bytes .*XXH3-128 differs"):
        verify_checkpoint(folder)
    server.s3(port).delete_object(Bucket=server.BUCKET, Key=key)
    with pytest.raises(CheckpointError, match="no longer exists"):
        verify_checkpoint(folder)


@pytest.mark.matrix
def test_store_survives_random_kills_and_errors(capsys):
    """Tests a few of each. `python -m tests.sweep.store_faults` tests hundreds."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sweep.store_faults", what, "--count", "8", "--seed", "7"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for what in ("kills", "errors")
    ]
    outputs = [each.communicate(timeout=250)[0] for each in processes]
    assert [each.returncode for each in processes] == [0, 0], outputs


@pytest.mark.matrix
def test_object_store_example_ends_with_the_undisturbed_loss():
    processes = subprocess.run(
        [sys.executable, "examples/object_store.py"], capture_output=True, text=True, timeout=250,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert processes.returncode == 0, processes.stderr[-3000:]
    assert "was ended by SIGKILL" in processes.stderr
    assert "resumed from s3://bucket/killed/checkpoints/checkpoint_" in processes.stdout
    losses = re.findall(r"loss after 24 updates: (\S+)", processes.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]


# ---------------------------------------------------------------- memory


def test_upload_buffers_one_part_per_thread(proxy, port):
    """While 160 MB are sent from memory, only four parts of 16 MiB are buffered."""
    from headway.core.checkpoint.format.tensors import write_shards

    tensors = [(str(i), torch.full((10_000_000,), float(i))) for i in range(4)]
    write_shards(to_path(f"s3://{server.BUCKET}/warm"), {"a.safetensors": [("x", torch.ones(3))]})
    before, peak, is_over = _read_resident_bytes(), [0], threading.Event()

    def watch():
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], _read_resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    path = to_path(f"s3://{server.BUCKET}/warm/model-00000.safetensors")
    try:
        written = _send_without_proxy(port, path, tensors)
    finally:
        is_over.set()
        watcher.join()
    assert written.num_bytes > 160e6
    assert len(server.keys(port, "warm/model-")) == -(-written.num_bytes // PART)
    slack = 24 * 2**20  # of the client and its connections
    assert peak[0] - before < THREADS * PART + slack, (peak[0] - before) / 2**20


def _send_without_proxy(port, path, tensors):
    """Send to the server directly, because the proxy would buffer the data in this process."""
    from headway.core.checkpoint.format.tensors import write_shards

    os.environ.update(server.environment(port, patience=120, timeout=60))
    scope.clear()
    path.parent.exists()
    return write_shards(path.parent, {path.name: tensors})[0]


def _read_resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# ---------------------------------------------------------------- commands and the log


def _run_headway(*words):
    processes = subprocess.run(
        [sys.executable, "-m", "headway", *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert processes.returncode == 0, processes.stderr[-2000:]
    return processes.stdout


@pytest.mark.slow
def test_commands_and_the_log(proxy, port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"s3://{server.BUCKET}/logged"
    project = ProjectConfiguration(url, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    for attempt in range(2):
        accelerator.init_trackers("digits")
        accelerator.log({"loss": 1.0 / (attempt + 1)}, step=attempt)
        accelerator.save_state()
        accelerator.end_training()
        assert "logged/digits/log.jsonl" in server.keys(port, "logged/digits/")
    assert "holds 2 checkpoints" in _run_headway("inspect", url)
    output = _run_headway("inspect", f"{url}/checkpoints/checkpoint_0", "--verify", "--tensors")
    assert "verified: all" in output
    assert "model/0/weight" in output
    _run_headway("merge", f"{url}/checkpoints/checkpoint_0", "merged")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")["weight"], model.weight)
    assert "report.html" in _run_headway("report", url)
    assert "digits" in (tmp_path / "report.html").read_text()
    from headway.core.tracking.runlog_reader import read_run
    from headway.integrations.object_store.log_mirror import fetch_log

    run = read_run(fetch_log(to_path(url)))
    assert [point[2] for point in run.values["loss"]] == [1.0, 0.5]
    assert read_manifest(to_path(url) / "checkpoints" / "checkpoint_0").about["iteration"] == 0
