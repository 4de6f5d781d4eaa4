"""Test steps traced on fake tensors against torch's profiler, and differences between devices."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.forecast.models import CASES
from benchmarks.forecast.truth import measure_peak
from headway.errors import LossError, UnsupportedError
from headway.forecasting.budget_search import is_same_sequence
from headway.forecasting.device.allocator import replay_events
from headway.forecasting.device.devices import estimate_use, find_device
from headway.forecasting.device.kernels import FLOAT32, FLOAT32_IF_FREE
from headway.forecasting.device.memory_events import compute_exact_peak, split_by_kind
from headway.forecasting.forecast_builder import build_forecast
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step

CPU, CARD = find_device("cpu"), find_device("rtx-3090")
MIB = 1 << 20


def build_adamw(parameters):
    return torch.optim.AdamW(parameters)


def sum_output(output, _targets=None):
    return output.sum()


class Net(nn.Module):
    def __init__(self, inner=lambda x: x, width=512):
        super().__init__()
        self.first, self.second, self.inner = nn.Linear(width, width), nn.Linear(width, width), inner

    def forward(self, x):
        return self.second(self.inner(self.first(x)))


def trace_net(inner=lambda x: x, device=CARD, batch=64, precision="no", **recipe):
    recipe = StepRecipe(recipe.pop("optimizer", build_adamw), sum_output, precision, **recipe)
    return trace_step(lambda: Net(inner), lambda: torch.zeros(batch, 512), recipe, device)


@pytest.mark.parametrize(
    "name", ["MLP", "CNN", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Llama"))]
)
def test_peak_on_a_cpu_equals_the_profilers(name):
    case = CASES[name]
    recipe = StepRecipe(build_adamw, case.loss, accumulation=2)

    def make_model():
        model = case.make()
        return skip_causal_mask(model) if hasattr(model, "set_attn_implementation") else model

    forecast = compute_exact_peak(trace_step(make_model, lambda: case.batch(4), recipe, CPU).events)
    assert forecast == pytest.approx(measure_peak(case.make().train(), recipe, lambda: case.batch(4)), rel=0.005)


class SharedTensor(nn.Module):
    """Model with a large tensor that has several users, whose gradients autograd sums in place."""

    def __init__(self, ways):
        super().__init__()
        self.first, self.ways = nn.Linear(8, 4096), ways

    def forward(self, x):
        wide = self.first(x)
        return sum(way(wide).sum() for way in self.ways)


class Adds(torch.autograd.Function):
    """Custom backward whose sum is a third tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return (grad * kept) + (grad * 2)


def take_first_column(x):
    return x[:, :1]


@pytest.mark.parametrize(
    "ways",
    [
        (take_first_column, take_first_column),
        (take_first_column, take_first_column, take_first_column),
        (take_first_column, torch.tanh),
        (Adds.apply, take_first_column),
        (Adds.apply,),
    ],
)
def test_gradients_of_several_users_are_summed_in_place_of_the_first(ways):
    def make_model():
        return SharedTensor(ways)

    recipe = StepRecipe(None, sum_output)
    forecast = compute_exact_peak(trace_step(make_model, lambda: torch.zeros(512, 8), recipe, CPU).events)
    assert forecast == pytest.approx(measure_peak(make_model().train(), recipe, lambda: torch.zeros(512, 8)), rel=0.005)


def test_empty_sums_of_gradients_take_no_memory():
    def make_empty(x):
        return x[:, :0] + x[:, :0].tanh()

    found = trace_step(
        lambda: Net(lambda x: x + make_empty(x).sum()), lambda: torch.zeros(4, 512), StepRecipe(None, sum_output), CPU
    )
    assert compute_exact_peak(found.events) > 0


class Tied(nn.Module):
    """Model with a weight that gets two gradients. One is a view that keeps its base alive, so the sum is a third tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20000, 64), nn.Linear(64, 20000)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_gradients_of_a_tied_weight_are_not_summed_in_place():
    recipe = StepRecipe(None, sum_output)

    def make_batch():
        return torch.zeros(2, 4, dtype=torch.long)

    assert compute_exact_peak(trace_step(Tied, make_batch, recipe, CPU).events) == pytest.approx(
        measure_peak(Tied(), recipe, make_batch), rel=0.005
    )


def test_only_model_and_optimizer_remain_after_a_step():
    found = trace_net()
    rest = split_by_kind(found.events, len(found.events) - 1)
    assert set(rest) == {"weights", "workspaces", "optimizer state"}
    assert rest["weights"] == 2 * (512 * 512 + 512) * 4
    assert {event.key for event in found.events if event.num_bytes < 0} <= {event.key for event in found.events}


def test_possible_workspace_of_cudnn_is_only_in_the_upper_bound():
    def make_model():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))

    recipe = StepRecipe(build_adamw, sum_output)
    on_card, on_cpu = (
        trace_step(make_model, lambda: torch.zeros(2, 3, 32, 32), recipe, device) for device in (CARD, CPU)
    )
    # The second layer's backward reads its gradient, its input and its weight.
    assert on_card.unsure_bytes == (2 * 8 * 28 * 28 + 2 * 8 * 30 * 30 + 8 * 8 * 9) * 4
    assert on_cpu.unsure_bytes == 0
    found = build_forecast(on_card, CARD, 2, None, False)
    assert found.allocated == replay_events(on_card.events).allocated
    assert found.most == estimate_use(CARD, found.reserved)[2] + on_card.unsure_bytes


def test_memory_is_split_by_kind():
    found = trace_net(batch=4096)
    end_of_forward = found.phases["step 2 backward"] - 1
    held = split_by_kind(found.events, end_of_forward)
    weights = 2 * (512 * 512 + 512) * 4
    assert held["weights"] == weights
    assert held["optimizer state"] == 2 * weights
    assert held["batch"] == 4096 * 512 * 4
    # Input of the second layer, and the outputs and the loss, which variables of the loop hold.
    assert held["activations"] == 2 * 4096 * 512 * 4 + 4
    dropped = trace_net(batch=4096, loop="loss_function")
    assert split_by_kind(dropped.events, dropped.phases["step 2 backward"] - 1)["activations"] == 4096 * 512 * 4 + 4
    at_update = split_by_kind(found.events, found.phases["step 2 update"] - 1)
    assert at_update["gradients"] == weights


def test_origin_of_memory_is_a_line_of_the_user():
    found = trace_net(batch=4096)
    assert any("test_trace_step.py" in event.source_line for event in found.events)


def test_dropout_keeps_one_byte_per_element_on_a_gpu_and_four_on_a_cpu():
    inner = nn.Dropout(0.1)
    on_card, on_cpu = (trace_net(inner, device, 4096, loop="loss_function") for device in (CARD, CPU))
    assert "aten::native_dropout" in on_card.operations
    assert "aten::bernoulli_" in on_cpu.operations
    kept = [
        split_by_kind(found.events, found.phases["step 2 backward"] - 1)["activations"] for found in (on_card, on_cpu)
    ]
    # Input of the second layer, and the mask.
    assert kept[0] - 4096 * 512 * 4 == pytest.approx(4096 * 512, abs=64)
    assert kept[1] - 4096 * 512 * 4 == pytest.approx(4096 * 512 * 4, abs=64)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_uses_the_same_kernels(reentrant):
    drop = nn.Dropout(0.1)

    def inner(x):
        return checkpoint(lambda y: drop(torch.tanh(y)), x, use_reentrant=reentrant)

    found = trace_net(inner)
    assert found.operations["aten::native_dropout"] == 4  # forward and recomputation, in two steps
    assert "aten::bernoulli_" not in found.operations


@pytest.mark.parametrize(
    ("precision", "masked", "kernel"),
    [("no", False, "efficient"), ("no", True, "efficient"), ("bf16", False, "flash"), ("bf16", True, "efficient")],
)
def test_attention_uses_the_kernel_of_the_gpu(precision, masked, kernel):
    def inner(x):
        query = x.view(-1, 16, 8, 64).transpose(1, 2)
        mask = torch.ones(16, 16, dtype=torch.bool) if masked else None
        return nn.functional.scaled_dot_product_attention(query, query, query, mask).transpose(1, 2).reshape(-1, 512)

    found = trace_net(inner, precision=precision)
    assert f"aten::_scaled_dot_product_{kernel}_attention" in found.operations
    assert f"aten::_scaled_dot_product_{kernel}_attention_backward" in found.operations
    assert "aten::bmm" not in found.operations


def test_autocast_uses_float32_where_cuda_does():
    norm = nn.LayerNorm(512)
    on_card, on_cpu = (trace_net(norm, device, 4096, "bf16") for device in (CARD, CPU))
    assert compute_exact_peak(on_card.events) > compute_exact_peak(on_cpu.events) + 4096 * 512 * 2 - 17 * MIB
    assert on_card.operations["aten::_to_copy"] > on_cpu.operations["aten::_to_copy"]


ELSEWHERE = {
    *(
        "atan2",
        "cross",
        "dot",
        "vdot",
        "addcdiv",
        "addcmul",
        "bilinear",
        "tensordot",
        "index_put",
        "scatter_add",
    ),  # widest dtype
    *(
        "mv",
        "addmv",
        "addr",
        "einsum",
        "chain_matmul",
        "linalg_multi_dot",
    ),  # half precision, like the operations that they call
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord"),  # composed of listed operations
    *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
    *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    "_scaled_dot_product_flash_attention",
}
"""Operations that CUDA's autocast handles and a CPU's does not, except those computed in float32."""


def test_list_for_autocast_is_that_of_the_installed_torch():
    def list_operations(key):
        names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
        return {
            name.removeprefix("aten::") for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        }

    listed = {*FLOAT32, *FLOAT32_IF_FREE}
    assert listed <= list_operations("AutocastCUDA")
    assert list_operations("AutocastCUDA") - list_operations("AutocastCPU") <= listed | ELSEWHERE


def test_interpolation_under_autocast_is_in_float32_on_a_gpu():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Upsample(scale_factor=2))
    on_card, on_cpu = (
        trace_step(lambda: model, lambda: torch.zeros(2, 3, 32, 32), StepRecipe(None, sum_output, "bf16"), device)
        for device in (CARD, CPU)
    )
    for found, width in ((on_card, 4), (on_cpu, 2)):
        sizes = {event.num_bytes for event in found.events if event.operation == "aten::upsample_nearest2d"}
        assert 2 * 8 * 64 * 64 * width in sizes


def test_optimizers_update_all_parameters_at_once_on_a_gpu():
    weights = 2 * (512 * 512 + 512) * 4

    def measure_temporaries(found):
        first, last = found.phases["step 2 update"], found.phases["end"]
        most = max((split_by_kind(found.events, i).get("temporaries", 0) for i in range(first, last)), default=0)
        return most

    assert measure_temporaries(trace_net()) >= weights
    assert measure_temporaries(trace_net(optimizer=lambda p: torch.optim.AdamW(p, fused=True))) < weights / 10
    assert measure_temporaries(trace_net(device=CPU)) < weights
    assert "aten::_fused_adamw_" in trace_net(optimizer=lambda p: torch.optim.AdamW(p, fused=True)).operations


def test_accumulation_clipping_and_scaling_are_in_the_step():
    found = trace_net(precision="fp16", accumulation=3, max_norm=1.0)
    assert found.operations["aten::_foreach_norm"] == 2
    assert found.operations["aten::_amp_foreach_non_finite_check_and_unscale_"] == 2
    one, three = trace_net(batch=4096), trace_net(batch=4096, accumulation=3)
    assert compute_exact_peak(three.events) >= compute_exact_peak(one.events)


def test_frozen_parameters_have_neither_gradients_nor_state():
    def make_model():
        net = Net()
        net.first.requires_grad_(False)
        return net

    found = trace_step(make_model, lambda: torch.zeros(64, 512), StepRecipe(build_adamw, sum_output), CARD)
    held = split_by_kind(found.events, found.phases["step 2 forward"])
    assert held["optimizer state"] == held["weights"]  # two values for each parameter of one half


def test_real_tensors_are_computed_as_before():
    before = nn.functional.dropout(torch.ones(8, requires_grad=True), 0.5).grad_fn.name()
    trace_net(nn.Dropout(0.5))
    assert nn.functional.dropout(torch.ones(8, requires_grad=True), 0.5).grad_fn.name() == before == "MulBackward0"


def reads(x):
    return x * x.sum().item()


def test_operation_that_reads_a_value_is_refused_with_its_line():
    with pytest.raises(UnsupportedError, match=r"_local_scalar_dense.*test_trace_step.py:\d+ in reads.*reads a value"):
        trace_net(reads)


def has_a_wrong_name(x):
    return x * x.exp() + tagrets  # noqa: F821


def test_error_of_the_step_itself_is_not_called_a_limit_of_the_forecast():
    with pytest.raises(
        UnsupportedError, match=r"step failed at .*test_trace_step.py:\d+.*name 'tagrets' is not defined"
    ) as exc_info:
        trace_net(has_a_wrong_name)
    assert "cannot be traced" not in str(exc_info.value)


def test_packed_sequence_is_refused_wherever_it_is_in_the_batch():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(steps, 8) for steps in (9, 7, 3)])
    for batch in (packed, (packed, torch.zeros(3)), {"input": packed}):
        with pytest.raises(UnsupportedError, match=r"PackedSequence.*padded"):
            trace_step(lambda: nn.LSTM(8, 16), lambda batch=batch: batch, StepRecipe(None, sum_output), CARD)


def test_operation_without_a_fake_kernel_is_refused():
    @torch.library.custom_op("headway_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(UnsupportedError, match=r"headway_test.*fake"):
        trace_net(lambda x: scaled(x))
    scaled.register_fake(lambda x: torch.empty_like(x))
    scaled.register_autograd(lambda ctx, grad: grad * 2)
    assert "headway_test::scaled" in trace_net(lambda x: scaled(x)).caveats[0]


def test_step_without_a_loss_is_refused():
    with pytest.raises(LossError, match=r"shape \[64, 512\]"):
        trace_step(Net, lambda: torch.zeros(64, 512), StepRecipe(build_adamw), CARD)


def test_uncounted_memory_of_convolutions_is_reported():
    found = trace_step(
        lambda: nn.Conv2d(3, 4, 3), lambda: torch.zeros(2, 3, 8, 8), StepRecipe(build_adamw, sum_output), CARD
    )
    assert any("cuDNN" in caveat for caveat in found.caveats)


def test_reduced_loss_keeps_the_memory_of_all_elements():
    """mse_loss allocates its result for each element, and resizes it to one number."""

    def make_batch():
        return torch.zeros(64, 256), torch.zeros(64, 1024)

    def build_net():
        return nn.Linear(256, 1024)

    real = torch.nn.functional.mse_loss(torch.zeros(64, 1024), torch.zeros(64, 1024))
    assert real.untyped_storage().nbytes() == 4 * 64 * 1024
    taken = measure_peak(build_net(), StepRecipe(torch.optim.SGD, nn.functional.mse_loss), make_batch)
    found = trace_step(build_net, make_batch, StepRecipe(torch.optim.SGD, nn.functional.mse_loss), find_device("cpu"))
    assert compute_exact_peak(found.events) == pytest.approx(taken, rel=0.005)


@pytest.mark.slow
def test_under_autocast_two_batches_allocate_and_free_in_the_same_order():
    """Casts of weights are freed all at once, in the order of their addresses."""
    recipe = StepRecipe(build_adamw, nn.functional.mse_loss, "bf16", accumulation=2)

    def build_net():
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])

    first, second = (
        trace_step(build_net, lambda size=size: (torch.zeros(size, 64), torch.zeros(size, 64)), recipe, CARD)
        for size in (8, 9)
    )
    assert is_same_sequence(first, second)
