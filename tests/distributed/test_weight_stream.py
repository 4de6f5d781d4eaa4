"""Weight streams to a generating engine equal save_model exactly, need bounded memory, and report failed receivers on all ranks."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headway import Accelerator, WeightChannel
from headway.core.weights.files import open_checkpoint
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import CollectiveError, StateError
from tests.devices import ON_CPU
from tests.distributed.layouts import build_seeded
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import LAYOUTS, Stack, make_two_head_llama, read_process_counter


def check_streamed(folder: str, layout: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    sizes = []
    for tied in (False, True):
        model = accelerator.prepare(build_seeded(0, lambda tied=tied: make_two_head_llama(tied)).bfloat16())
        path = Path(folder, str(tied))
        accelerator.save_model(model, path)
        stream, found = accelerator.stream_weights(model, "6KiB"), {}
        for bucket in stream:
            sizes.append(sum(tensor.nbytes for _, tensor in bucket) * (len(bucket) > 1))
            found.update((name, tensor.clone()) for name, tensor in bucket)
        assert [(name, get_dtype_name(each.dtype), list(each.shape)) for name, each in found.items()] == stream.metadata
        expected = {name: stored.tensor() for name, stored in open_checkpoint(path).tensors.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(found[name], value) if accelerator.is_main_process else found[name].is_meta
            assert same, (layout, name)
        accelerator.free_memory()
    assert len(sizes) > 4
    assert max(sizes) <= 6 * 1024
    return {}


@pytest.mark.parametrize(
    "layout",
    ["fsdp+tp=2", "pp", *(pytest.param(each, marks=pytest.mark.matrix) for each in LAYOUTS if each != "fsdp+tp=2")],
)
def test_every_layout_streams_what_save_model_writes(tmp_path, layout):
    run_ranks(check_streamed, 4 if "+" in layout or layout == "hsdp=2" else 2, str(tmp_path), layout)


# -------------------------------------------------------------------- failing receivers


def fork_receiver(connection: socket.socket, ends: signal.Signals) -> int:
    """Fork a process that receives one bucket, and then sends itself a signal."""
    child = os.fork()
    if not child:
        with suppress(StateError):
            for _ in WeightChannel(connection, "the trainer").receive():
                os.kill(os.getpid(), ends)
        os._exit(0)
    connection.close()
    return child


def stream_to_failing_receiver(ends: str) -> list[str]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = accelerator.prepare(build_seeded(0, lambda: make_two_head_llama(True)))
    own, other = socket.socketpair()
    child = fork_receiver(other, signal.Signals[ends]) if accelerator.is_main_process else None
    channel = WeightChannel(own, "the generator", timeout=2)
    messages = []
    try:
        for bucket in accelerator.stream_weights(model, "6KiB"):
            if accelerator.is_main_process:
                channel.send(bucket)
    except (StateError, CollectiveError) as error:
        messages.append(f"{type(error).__name__}: {error}")
    # The ranks are still in step. In the next stream, rank 1 leaves early, and the last stream is complete.
    try:
        for _ in accelerator.stream_weights(model, "6KiB"):
            if accelerator.process_index:
                break
    except CollectiveError as error:
        messages.append(f"{type(error).__name__}: {error}")
    messages.append(str(sum(len(bucket) for bucket in accelerator.stream_weights(model, "6KiB"))))
    if child is not None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return messages


@pytest.mark.parametrize(("ends", "expected"), [("SIGKILL", "is gone"), ("SIGSTOP", "has done nothing for 2 s")])
def test_receiver_that_dies_or_stalls_is_named_in_the_error(ends, expected):
    first, second = run_ranks(stream_to_failing_receiver, 2, ends)
    assert first[0].startswith(f"StateError: the generator {expected}")
    assert first[1].startswith("CollectiveError: another rank left accelerator.stream_weights()")
    assert second[0].startswith("CollectiveError: another rank left accelerator.stream_weights()")
    assert len(second) == 2
    assert first[-1] == second[-1] == "20"


# -------------------------------------------------------------------- memory, protocols, and the example


def count_bytes(bucket: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)


def measure_peak(width: int, num_blocks: int) -> int:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(Stack(4, 2))
    accelerator.free_memory()
    model = accelerator.prepare(Stack(width, num_blocks))
    for _ in accelerator.stream_weights(model, "4KiB"):
        break  # one-time allocations happen here
    Path("/proc/self/clear_refs").write_text("5")
    before = read_process_counter("status", "VmRSS")
    total = sum(count_bytes(bucket) for bucket in accelerator.stream_weights(model, "64MiB"))
    assert total == 4 * width * width * num_blocks
    return read_process_counter("status", "VmHWM") - before


def test_streaming_needs_memory_for_a_bucket_and_a_unit():
    for found in run_ranks(measure_peak, 2, 2048, 12):
        # 1 MiB for pages that Python and gloo touch for the first time.
        assert found <= (64 + 16 + 1) * 2**20, found


class Server(BaseHTTPRequestHandler):
    """Server that answers like a generating engine, and records what is posted."""

    posted: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, json.loads(body)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_vllm_client_sends_the_streamed_weights(monkeypatch):
    client_module = pytest.importorskip("trl.generation.vllm_client")
    import requests

    sent = {}

    class Engine:  # stands in for NCCL on the GPU
        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            sent.update((name, tensor.clone()) for name, tensor in iterator)

    monkeypatch.setattr(client_module, "NCCLWeightTransferEngine", Engine, raising=False)
    monkeypatch.setattr(client_module, "NCCLTrainerSendWeightsArgs", lambda **_: None, raising=False)
    model = build_seeded(0, lambda: make_two_head_llama(False))
    stream = Accelerator(cpu=True).stream_weights(model)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = client_module.VLLMClient.__new__(client_module.VLLMClient)  # its constructor needs vLLM
        client.session, client.communicator, client._updating_weights = requests.Session(), None, False
        client.base_url = f"http://127.0.0.1:{server.server_port}"
        client.update_named_params(stream.metadata, (pair for bucket in stream for pair in bucket))
        server.shutdown()
    assert [path for path, _ in Server.posted] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    expected = dict(model.named_parameters())
    assert Server.posted[1][1]["update_info"]["names"] == list(expected) == list(sent)
    assert all(torch.equal(sent[name], value) for name, value in expected.items())


EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


def train_by_hand() -> list[tuple[float, float]]:
    """Train on one process, and generate with the model itself. Return mean reward and gradient norm of each update."""
    parts = runpy.run_path(str(EXAMPLE), run_name="__example__")
    model = parts["build_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for update in range(8):
        model.eval()
        rows = parts["complete"](model, parts["make_prompts"](update), update)
        model.train()
        rewards = parts["compute_rewards"](rows)
        loss = (
            parts["compute_policy_loss"](model, rows, parts["compute_advantages"](rewards))
            / rows[:, parts["PROMPT_LENGTH"] :].numel()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((rewards.mean().item(), float(norm)))
    return curve


@pytest.mark.matrix
def test_grpo_example_matches_one_process():
    (updates_by_hand,) = run_ranks(train_by_hand, 1)
    assert updates_by_hand[-1][0] > updates_by_hand[0][0] + 0.05
    expected = [
        f"update {n}: reward {updates_by_hand[n - 1][0]:.4f}, norm {updates_by_hand[n - 1][1]:.4f}" for n in (4, 8)
    ]
    for num_ranks in ("1", "2"):
        command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", num_ranks, str(EXAMPLE), "--updates", "8"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert [line for line in result.stdout.splitlines() if line.startswith("update")] == expected, result.stderr
