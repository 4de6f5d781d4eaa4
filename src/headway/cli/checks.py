"""What `headway doctor` and `headway test` run on every rank; the one file of the command line that imports torch.

The doctor asks: do the machines agree, share a folder and a clock, and how fast is the way between? The test compares a real run
with what one process computes by plain PyTorch.
"""

import platform
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.cli.doctor import Finding, graded
from headway.common import env
from headway.config.run import DataLoaderConfiguration
from headway.runtime.collectives.ranks import synchronize_rng_states
from headway.runtime.seed import set_seed
from headway.version import __version__

_SMALL, _LARGE = 1, 4 * 2**20  # numbers of 4 bytes
_NUM_SMALL, _NUM_LARGE = 50, 5
_APART = 1.0
"""Seconds that clocks may differ by."""

_SLOW = 100.0
"""Megabytes a second below which an all-reduce is called slow: what a link of 1 Gbit/s carries."""

_FAR = 5.0
"""Milliseconds above which an all-reduce of one number is called late: several times a local network's round trip."""


@dataclass(frozen=True)
class RankLocation:
    """What a rank says of itself."""

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    sees_nonce: bool
    clock: float
    interface: str


def describe(accelerator: Accelerator) -> list[RankLocation]:
    """What all ranks say of themselves; collective."""
    collectives = accelerator.collectives
    nonce = collectives.broadcast_object(f".headway-doctor-{secrets.token_hex(8)}")
    if accelerator.is_main_process:
        Path(nonce).touch()
    collectives.barrier()
    sees_nonce = Path(nonce).exists()
    versions = {"headway": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    collectives.barrier()
    clock = time.time()  # all ranks have just left the barrier
    interface = env.get("GLOO_SOCKET_IFNAME") or ""
    place = RankLocation(
        accelerator.process_index, socket.gethostname(), tuple(versions.items()), sees_nonce, clock, interface
    )
    places = collectives.gather_objects(place)
    if accelerator.is_main_process:
        Path(nonce).unlink()
    return places


def compare(places: Sequence[RankLocation]) -> Iterator[Finding]:
    """What the ranks' words say together."""
    first = places[0]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(
        "ok",
        f"{len(places)} processes on {len(hosts)} host{'s' if len(hosts) > 1 else ''} have met: {', '.join(hosts)}",
    )
    others = [place for place in places if place.versions != first.versions]
    if others:
        said = "; ".join(f"{place.host}: {_versions(place)}" for place in (first, others[0]))
        yield Finding(
            "bad", f"machines run different versions: {said}", "install the same on all: results and hangs depend on it"
        )
    blind = list(dict.fromkeys(place.host for place in places if not place.sees_nonce))
    if blind:
        yield Finding(
            "note",
            f"the working folder {Path.cwd()} of {first.host} is not shared with {', '.join(blind)}",
            "start in a folder on a shared disk, or expect scripts, data and checkpoints to be apart on each machine",
        )
    elif len(hosts) > 1:
        yield Finding("ok", f"all machines see one working folder, {Path.cwd()}")
    if len(hosts) > 1:
        yield _clocks(places)


def _versions(place: RankLocation) -> str:
    return ", ".join(f"{name} {version}" for name, version in place.versions)


def _clocks(places: Sequence[RankLocation]) -> Finding:
    early, late = (pick(places, key=lambda place: place.clock) for pick in (min, max))
    apart = late.clock - early.clock
    if apart < _APART:
        return Finding("ok", f"clocks are at most {apart:.2f} s apart (read right after a barrier)")
    said = f"the clocks of {early.host} and {late.host} are {apart:.1f} s apart"
    return Finding("note", said, "run NTP (chrony): times in logs and the order of failures mislead otherwise")


def measure(accelerator: Accelerator) -> tuple[float, float]:
    """The median all-reduce: milliseconds for one number, megabytes a second for many (bytes of one rank / time)."""

    def seconds(length: int, repeats: int) -> float:
        tensor = torch.zeros(length, device=accelerator.device)
        times = []
        for _ in range(repeats + 2):
            accelerator.collectives.barrier()
            begun = time.perf_counter()
            accelerator.collectives.sum_in_place([tensor])
            tensor[0].item()  # waits for the device
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])

    return seconds(_SMALL, _NUM_SMALL) * 1e3, _LARGE * 4 / seconds(_LARGE, _NUM_LARGE) / 1e6


def judge(latency: float, rate: float, places: Sequence[RankLocation]) -> Iterator[Finding]:
    """Whether the measured way is good, and what may be wrong with it."""
    between = "machines" if len({place.host for place in places}) > 1 else "processes"
    way = f" over {places[0].interface}" if places[0].interface else ""
    if between == "machines":
        hint = "another interface may be nearer (name it in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), or the hosts are far apart"
    else:
        hint = "more processes than free cores: give fewer with -n, or fewer threads with --num_cpu_threads_per_process"
    yield graded(latency <= _FAR, f"an all-reduce of one number takes {latency:.2f} ms{way}", hint)
    if between == "machines":
        hint = (
            "as on a link of 1 Gbit/s or less: name a faster interface in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs), look "
            "for a lossy cable (`ip -s link`), and compress or accumulate gradients"
        )
    yield graded(rate >= _SLOW, f"an all-reduce of {_LARGE * 4 // 2**20} MiB runs at {rate:.0f} MB/s{way}", hint)


def check_fabric(num_bad: int) -> bool:
    """Compare and measure; is all good?

    Args:
        num_bad: findings that are bad on this machine already.
    """
    accelerator = Accelerator()
    places = describe(accelerator)
    findings = list(compare(places))
    if accelerator.num_processes > 1:
        findings += judge(*measure(accelerator), places)
    for finding in findings:
        accelerator.print(finding.text())
    before = max(accelerator.collectives.gather_objects(num_bad))
    num_bad = before + sum(finding.level == "bad" for finding in findings)
    num_notes = sum(finding.level == "note" for finding in findings)
    text = f"{num_bad} bad" if num_bad else "nothing is bad"
    accelerator.print(text + (f", {num_notes} to note between processes" if num_notes else ""))
    accelerator.end_training()
    return not num_bad


_NUM_ROWS = 37  # a prime, so that nothing divides evenly
_BATCH = 4


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_NUM_ROWS, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def _model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _require(is_true: bool, what: str) -> None:
    if not is_true:
        raise AssertionError(what)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if gather is None else gather()
    return whole


def check_collectives(accelerator: Accelerator) -> str:
    """Gather, reduce and pad rank numbers."""
    rank, count = accelerator.process_index, accelerator.num_processes
    rows = torch.full((rank + 1,), rank, device=accelerator.device)
    wanted = [r for r in range(count) for _ in range(r + 1)]
    _require(accelerator.gather(rows).tolist() == wanted, "gather lost or reordered rows")
    _require(accelerator.pad_across_processes(rows).shape[0] == count, "pad_across_processes missed the longest rank")
    total = accelerator.reduce(torch.tensor([float(rank)], device=accelerator.device), "sum").item()
    _require(total == count * (count - 1) / 2, "reduce added up wrongly")
    _require(accelerator.collectives.gather_objects(f"rank {rank}")[-1] == f"rank {count - 1}", "objects were mixed up")
    return f"gather, pad, reduce and objects over {count} ranks"


def check_data(accelerator: Accelerator) -> str:
    """Every sample once an epoch, in one shuffled order that is a new one in the next epoch."""
    loader = DataLoader(TensorDataset(torch.arange(_NUM_ROWS)), batch_size=_BATCH, shuffle=True)
    prepared = accelerator.prepare_data_loader(loader)
    epochs = []
    for _ in range(2):
        rows = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in prepared]
        epochs.append([row for step in rows for row in step])
    _require(all(sorted(epoch) == list(range(_NUM_ROWS)) for epoch in epochs), "samples were lost or repeated")
    _require(epochs[0] != epochs[1], "two epochs came in one order")
    return f"{_NUM_ROWS} samples exactly once in each of 2 epochs"


def check_gradient(accelerator: Accelerator) -> str:
    """The gradient of a ragged window over all ranks is that of the whole data in one batch."""
    inputs, targets = _data()
    whole = _model()
    torch.autograd.backward(mse_loss(whole(inputs), targets))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH)
    model = accelerator.prepare_model(_model())
    prepared = accelerator.prepare_data_loader(loader)
    prepared.even_batches = False  # repeated rows would count in the loss
    accelerator.gradient_accumulation_steps = len(prepared)
    for batch, wanted in prepared:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(batch), wanted))
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 5e-2
    scale = accelerator.precision.gradient_scale()
    errors = {}
    for (name, parameter), reference in zip(model.named_parameters(), whole.parameters()):
        assert parameter.grad is not None
        assert reference.grad is not None
        found = (
            _whole(parameter.grad).cpu().float() / scale
        )  # an exchange, where it is in parts: on all ranks, whatever is found
        errors[name] = (found - reference.grad).abs().max().item()
    for name, error in errors.items():
        _require(error <= tolerance, f"the gradient of {name} is off by {error:.2g}")
    return f"a window of {len(prepared)} micro-batches on {accelerator.num_processes} ranks = one batch of {_NUM_ROWS}"


def check_random_streams(accelerator: Accelerator) -> str:
    """Streams of different ranks can differ, and can be made equal."""
    set_seed(3, device_specific=True)
    own = accelerator.collectives.gather_objects(torch.rand(1).item())
    num_streams = accelerator.strategy.data_shard.count  # ranks that read the same draw the same
    _require(len(set(own)) == num_streams, "device_specific seeds gave two ranks one stream")
    synchronize_rng_states(["torch"])
    _require(len(set(accelerator.collectives.gather_objects(torch.rand(1).item()))) == 1, "streams stayed different")
    return "ranks differ with device_specific, agree after synchronisation"


def check_metrics(accelerator: Accelerator) -> str:
    """A metric over a padded tail counts each sample once."""
    inputs, _ = _data()
    prepared = accelerator.prepare_data_loader(DataLoader(TensorDataset(inputs), batch_size=_BATCH))
    seen = [accelerator.gather_for_metrics(batch[0]) for batch in prepared]
    _require(torch.equal(torch.cat(seen).cpu(), inputs), "gathered rows differ from the data")
    return f"{_NUM_ROWS} rows back in the data's order"


_CHECKS: list[Callable[[Accelerator], str]] = [
    check_collectives,
    check_data,
    check_gradient,
    check_random_streams,
    check_metrics,
]


def check_setup() -> bool:
    """Run every check on every rank; has none failed anywhere?"""
    started = time.monotonic()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=0))
    accelerator.print(
        f"{accelerator.num_processes} processes, {accelerator.device.type}, precision {accelerator.mixed_precision}"
    )
    num_failed = 0
    for check in _CHECKS:
        begun, problem, told = time.monotonic(), "", ""
        try:
            told = check(accelerator)
        except AssertionError as error:
            problem = f"rank {accelerator.process_index}: {error}"
        accelerator.free_memory()
        problems = [text for text in accelerator.collectives.gather_objects(problem) if text]
        num_failed += bool(problems)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        verdict = "FAILED " + "; ".join(problems) if problems else f"ok     {told}"
        accelerator.print(f"  {name:15} {verdict} ({time.monotonic() - begun:.2f} s)")
    word = "all checks passed" if not num_failed else f"{num_failed} of {len(_CHECKS)} checks failed"
    accelerator.print(f"{word} in {time.monotonic() - started:.1f} s")
    accelerator.end_training()
    return not num_failed


def main(arguments: Sequence[str]) -> None:
    """`doctor NUM_BAD` or `test`: exit 1 where something is bad, here or on another rank."""
    is_good = check_fabric(int(arguments[1])) if arguments[0] == "doctor" else check_setup()
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
