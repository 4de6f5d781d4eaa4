"""Test models compiled in place on one process: same object and names, one compilation for all blocks, equal results."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import headway
from headway import Accelerator, ActivationCheckpointing, TorchDynamoPlugin, compile_regions
from headway.extras.compiling import has_compiled_regions, is_compiled_module

pytestmark = pytest.mark.slow  # the compiler takes seconds for each model


class Block(torch.nn.Module):
    """Residual block with a norm and dropout."""

    def __init__(self, width=16):
        super().__init__()
        self.wide, self.norm, self.drop = (
            torch.nn.Linear(width, width),
            torch.nn.LayerNorm(width),
            torch.nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.wide(x))))


class Net(torch.nn.Module):
    """Embedding, `depth` blocks and a head, with a buffer that counts calls."""

    def __init__(self, depth=4):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.head = torch.nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CountingBackend:
    """Backend that counts the graphs that it receives."""

    def __init__(self, inner=lambda graph, inputs: graph.forward):
        self.num_compiled = 0
        self.inner = inner

    def __call__(self, graph, inputs):
        self.num_compiled += 1
        return self.inner(graph, inputs)


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build_accelerator(backend=None, regional=False, **kwargs):
    plugin = None if backend is None else TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    return Accelerator(cpu=True, dynamo_plugin=plugin, **kwargs)


def train(acc, sizes=(4, 4, 4, 4), net=None):
    """Train with micro-batches of the given sizes. Return the losses and the model."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    model, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    assert model is net
    torch.manual_seed(1)
    losses = []
    for size in sizes:
        with acc.accumulate(model):
            loss = model(torch.randint(0, 32, (size, 5))).float().square().mean()
            acc.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-6), ("bf16", 2e-3)])
def test_losses_are_equal_and_the_object_is_the_same(regional, precision, tolerance, is_checkpointed):
    handlers = [ActivationCheckpointing()] if is_checkpointed else None
    options = {"mixed_precision": precision, "gradient_accumulation_steps": 2, "kwargs_handlers": handlers}
    expected, plain = train(build_accelerator(**options))
    backend = CountingBackend(aot_eager)
    acc = build_accelerator(backend, regional, **options)
    losses, model = train(acc)
    assert losses == pytest.approx(expected, abs=tolerance)
    assert backend.num_compiled == 1  # for four blocks with eight calls each
    assert not counters["graph_break"]
    assert isinstance(model, Net)
    assert list(model.state_dict()) == list(plain.state_dict()) == list(acc.get_state_dict(model))
    assert model.seen == plain.seen == 4
    assert acc.unwrap_model(model) is acc.unwrap_model(model, keep_torch_compile=False) is model
    assert is_compiled_module(model) is not regional
    assert has_compiled_regions(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is Net
        assert not has_compiled_regions(other)
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("regional", [True, False])
def test_many_sizes_need_few_compilations(regional):
    """Compile for a fixed size, a dynamic size and size 1, and again without gradients. docs/compile.md promises this."""
    backend = CountingBackend()
    acc = build_accelerator(backend, regional)
    _, model = train(acc, (6, 6, 5, 4, 3, 2, 1, 6, 5))
    assert backend.num_compiled <= 3
    model.eval()
    for size in (6, 5, 4, 3):
        with torch.no_grad():
            model(torch.zeros(size, 5, dtype=torch.long))
    assert backend.num_compiled <= 5
    before = backend.num_compiled
    model.train()
    train(acc, (6, 5, 1), model)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(4, 5, dtype=torch.long))
    assert backend.num_compiled == before  # switching between training and evaluation needs no compilation
    assert not any("limit" in str(reason) for reason in counters["unimplemented"])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_of_several_classes_and_widths_compile_once_per_type(checkpointed):
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip(f"torch {torch.__version__} has one limit for all models")

    class Wide(Block):
        def forward(self, x):
            return super().forward(x) * 2

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.ModuleList(Block() for _ in range(6))
            self.second = torch.nn.ModuleList(Wide() for _ in range(6))
            self.third = torch.nn.ModuleList(Block(24) for _ in range(6))
            self.more = torch.nn.ModuleList(Block(width) for width in range(25, 37))

        def forward(self, x):
            for block in [*self.first, *self.second]:
                x = block(x)
            x = torch.nn.functional.pad(x, (0, 8))
            for block in self.third:
                x = block(x)
            for block in self.more:  # twelve widths, more than torch's limit of 8
                x = block(torch.nn.functional.pad(x, (0, 1)))
            return x

    backend = CountingBackend()
    net = Mixed()
    if checkpointed:
        build_accelerator().checkpoint_activations(net)
    assert compile_regions(net, backend=backend) is net
    net(torch.randn(3, 16, requires_grad=True)).sum().backward()
    assert backend.num_compiled == 15  # no block runs uncompiled


@pytest.mark.parametrize("make", [
    lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
    lambda: torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(9)]),
    lambda: torch.nn.Linear(8, 8),
])  # fmt: skip
@pytest.mark.parametrize("regional", [True, False])
def test_modules_of_torch_are_compiled(make, regional):
    """`Module.compile()` silently leaves such modules uncompiled."""
    backend = CountingBackend()
    torch.manual_seed(0)
    net = make()
    x = torch.randn(2, 3, 8, requires_grad=True)
    net.eval()
    expected = net(x)
    acc = build_accelerator(backend, regional)
    model = acc.prepare(net)
    assert model is net
    torch.testing.assert_close(model(x), expected)
    assert backend.num_compiled == 1
    model(x)
    assert backend.num_compiled == 1


def test_model_without_repeated_blocks_is_compiled_whole_with_a_warning(caplog):
    backend = CountingBackend()
    model = build_accelerator(backend, True).prepare(Block())
    assert is_compiled_module(model)
    assert "no repeated blocks" in caplog.text
    assert compile_regions(Block(), backend=backend)._compiled_call_impl is not None


def test_compiled_model_is_left_unchanged():
    theirs, ours = CountingBackend(), CountingBackend()
    acc = build_accelerator(ours)
    torch.manual_seed(0)
    net = Net()
    keys = list(net.state_dict())
    wrapped = torch.compile(net, backend=theirs)
    model = acc.prepare(wrapped)
    assert model is wrapped
    acc.backward(model(torch.zeros(2, 3, dtype=torch.long)).sum())
    assert (theirs.num_compiled, ours.num_compiled) == (1, 0)
    assert list(acc.get_state_dict(model)) == keys
    assert list(model.state_dict()) == [f"_orig_mod.{key}" for key in keys]  # names given by torch
    assert acc.unwrap_model(model) is model
    assert acc.unwrap_model(model, keep_torch_compile=False) is net
    assert isinstance(copy.deepcopy(model), type(torch.compile(torch.nn.Linear(1, 1))))
    blocks = build_accelerator(ours, True).prepare(compile_regions(Net(), backend=theirs))
    blocks(torch.zeros(2, 3, dtype=torch.long))
    assert ours.num_compiled == 0


def test_evaluation_models_and_second_models_are_compiled():
    backend = CountingBackend()
    acc = build_accelerator(backend)
    learning, frozen = acc.prepare(Net()), acc.prepare_model(Net(2), evaluation_mode=True)
    x = torch.zeros(2, 3, dtype=torch.long)
    with torch.no_grad():
        frozen(x)
    assert backend.num_compiled == 1
    learning(x)
    assert backend.num_compiled == 2
    acc.free_memory()
    assert build_accelerator(backend).prepare(learning) is learning  # prepared again by another Accelerator


@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize("where", ["running", "compiling"])
def test_out_of_memory_in_compiled_code_splits_the_batch(regional, where):
    """Pieces of another size are compiled anew. The result equals that of the whole batch."""

    class ShortOfMemory(CountingBackend):
        def __call__(self, graph, inputs):
            compiled = super().__call__(graph, inputs)
            if where == "compiling" and self.num_compiled == 1:
                raise MemoryError

            def train_batches(*args):
                rows = max(arg.shape[0] for arg in args if isinstance(arg, torch.Tensor) and arg.ndim in (2, 3))
                if where == "running" and any(arg.shape[:1] == (8,) for arg in args if isinstance(arg, torch.Tensor)):
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows} GiB")
                return compiled(*args)

            return train_batches

    def train_in_pieces(acc):
        torch.manual_seed(0)
        net = Net()
        net.eval()  # without dropout, so that pieces can be compared
        data = TensorDataset(torch.randint(0, 32, (16, 5)))
        model, optimizer, loader = acc.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data, 8))
        sizes = []

        def compute_loss(piece):
            sizes.append(len(piece[0]))
            return model(piece[0]).square().mean()

        for batch in loader:
            acc.forward_backward(batch, compute_loss)
            optimizer.step()
            optimizer.zero_grad()
        return sizes, [p.detach().clone() for p in model.parameters()]

    _, expected = train_in_pieces(build_accelerator())
    backend = ShortOfMemory()
    sizes, weights = train_in_pieces(build_accelerator(backend, regional, microbatching="auto"))
    assert min(sizes) < 8
    torch.testing.assert_close(weights, expected)
    assert backend.num_compiled <= 4


@pytest.mark.parametrize("regional", [True, False])
def test_guard_and_a_loss_of_weight_0(regional):
    def train_batches(acc):
        torch.manual_seed(0)
        net = Net()
        model, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        for number in range(4):
            with acc.accumulate(model):
                loss = model(torch.full((2, 3), number)).square().mean()
                acc.backward(loss * (float("nan") if number in (1, 2) else 1), weight=0 if number == 1 else 1)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(2)
    options = {"gradient_accumulation_steps": 2, "on_non_finite": "skip"}
    expected = train_batches(build_accelerator(**options))
    torch.manual_seed(2)
    for one, other in zip(train_batches(build_accelerator(CountingBackend(), regional, **options)), expected):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("regional", [True, False])
def test_checkpoints_work_with_and_without_compilation(tmp_path, regional):
    def train_half(acc, folder=None, saves=False, num=4):
        torch.manual_seed(0)
        net = Net()
        model, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
        if folder is not None and not saves:
            acc.load_state(folder)
        losses = []
        for _ in range(num):
            loss = model(torch.randint(0, 32, (4, 5))).square().mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if saves and len(losses) == 2:
                acc.save_state(folder)
        return losses

    whole = train_half(build_accelerator("aot_eager", regional), tmp_path / "saved", saves=True)
    torch._dynamo.reset()
    assert train_half(build_accelerator("aot_eager", regional), tmp_path / "saved", num=2) == whole[2:]
    assert train_half(build_accelerator(), tmp_path / "saved", num=2) == pytest.approx(whole[2:], abs=1e-6)
    train_half(build_accelerator(), tmp_path / "plain", saves=True)
    assert train_half(build_accelerator("aot_eager", regional), tmp_path / "plain", num=2) == pytest.approx(
        whole[2:], abs=1e-6
    )


@pytest.mark.slow
def test_inductor_equals_torchs_own_compilation():
    """Run the real compiler on a small model with dropout."""
    torch.manual_seed(0)
    net, other = Net(2), Net(2)
    other.load_state_dict(net.state_dict())
    _, model = train(build_accelerator("inductor", True), (4,) * 3, net)
    torch._dynamo.reset()
    for block in other.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        other(torch.randint(0, 32, (4, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, expected in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, expected)


def test_compiler_is_not_imported_without_compilation():
    code = (
        "import sys, torch; from headway import Accelerator; a = Accelerator(cpu=True); a.prepare(torch.nn.Linear(1, 1)); "
        "assert 'headway.extras.compiling' not in sys.modules; assert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert headway.compile_regions is compile_regions
