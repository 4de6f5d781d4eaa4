"""Models with PEFT adapters, trained by plain PyTorch on one process and by Headway in any layout."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import peft
import torch
import transformers
from torch import nn

from headway import Accelerator
from headway.core.weights.pieces import is_dtensor
from tests.devices import ON_CPU

VOCABULARY, LENGTH, ROWS = 32, 8, 8
NUM_UPDATES = 20
CLOSE = 1e-5
"""Absolute tolerance. The models are float64, but their norms and rotary embeddings round to float32."""

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {"llama": EVERY, "mixtral": ATTENTION, "bert": ["query", "key", "value", "dense"]}
SCALED: dict[str, dict[str, list[str]]] = {
    "llama": {"feedforward_modules": ["down_proj"]},
    "mixtral": {"feedforward_modules": []},
    "bert": {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]},
}
"""Modules that IA3 scales. "feedforward_modules" scale their input; for BERT, "target_modules" lists all scaled modules."""


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # grouped matrix products of experts exist only in float32
    return model


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "mixtral": mixtral, "bert": bert}

METHODS: dict[str, Callable[[str], Any]] = {
    "LoRA": lambda model: peft.LoraConfig(r=4, lora_alpha=8, **make_target_options(model)),
    "rsLoRA": lambda model: peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, **make_target_options(model)),
    "LoRA with modules_to_save": lambda model: peft.LoraConfig(
        r=4, modules_to_save=["lm_head"], **make_target_options(model)
    ),
    "LoRA of experts": lambda model: peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=ATTENTION, target_parameters=EXPERTS, **make_task_options(model)
    ),
    "LoRA of routers": lambda model: peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=ATTENTION, target_parameters=["mlp.gate.weight"], **make_task_options(model)
    ),
    "DoRA": lambda model: peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, **make_target_options(model)),
    "VeRA": lambda model: peft.VeraConfig(r=4, **make_target_options(model)),
    "IA3": lambda model: peft.IA3Config(**{**make_target_options(model), **SCALED[model]}),
    "AdaLoRA": lambda model: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, **make_target_options(model)),
    "VBLoRA": lambda model: peft.VBLoRAConfig(
        r=2,
        num_vectors=8,
        vector_length=8,
        init_vector_bank_bound=1.0,
        init_logits_std=0.5,
        **make_target_options(model),
    ),
    "OFT": lambda model: peft.OFTConfig(oft_block_size=4, **make_target_options(model)),
    "BOFT": lambda model: peft.BOFTConfig(boft_block_size=4, **make_target_options(model)),
    "FourierFT": lambda model: peft.FourierFTConfig(n_frequency=20, scaling=15.0, **make_target_options(model)),
    "prompt tuning": lambda model: peft.PromptTuningConfig(num_virtual_tokens=3, **make_task_options(model)),
    "p-tuning": lambda model: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, **make_task_options(model)
    ),
    "prefix tuning": lambda model: peft.PrefixTuningConfig(num_virtual_tokens=3, **make_task_options(model)),
}
OF_MIXTURES = ["LoRA of experts", "LoRA of routers"]
TRANSFORMS = ["OFT", "BOFT", "FourierFT"]
DENSE = [name for name in METHODS if name not in (*OF_MIXTURES, *TRANSFORMS)]
CELLS: dict[str, dict[str, list[str]]] = {
    **{
        layout: {"llama": DENSE, "mixtral": ["LoRA of experts"], "bert": ["LoRA", "DoRA", "IA3"]}
        for layout in ("ddp", "fsdp", "tp")
    },
    "one process": {"llama": [*DENSE, *TRANSFORMS], "mixtral": ["LoRA of experts"], "bert": ["LoRA", "DoRA", "IA3"]},
    "fsdp+tp=2": {"llama": DENSE, "mixtral": ["LoRA of experts"]},
    "pp": {"llama": DENSE, "mixtral": ["LoRA of experts"]},
    "ep": {"mixtral": [name for name in METHODS if name != "FourierFT"]},
    "fsdp+ep=2": {"mixtral": ["LoRA of routers", "DoRA", "OFT", "BOFT"]},
    "cp": {"llama": ["LoRA", "DoRA", "OFT", "prompt tuning", "prefix tuning"]},
}
"""Methods tested in each layout, by model."""
LAYOUTS = {"one process": 1, "ddp": 2, "fsdp": 2, "tp": 2, "fsdp+tp=2": 4, "pp": 2, "ep": 2, "fsdp+ep=2": 4, "cp": 2}
"""Number of ranks of each layout."""
NOT_SPLIT = (
    "LoRA of experts", "DoRA", "VeRA", "IA3", "VBLoRA", "OFT", "BOFT", "FourierFT", "prefix tuning",
)  # fmt: skip
"""Methods that tensor parallelism rejects."""
HINTS = {
    "AdaLoRA": "Use LoRA (LoraConfig), or one of the layouts ddp, zero1 and zero2",
    "prefix tuning": "Use prompt tuning or p-tuning",
}
"""Alternative that the error suggests, for methods with their own suggestion."""
IN_PARTS = ("fsdp", "tp", "fsdp+tp=2", "pp", "ep", "fsdp+ep=2", "cp")
"""Layouts in which no rank holds all adapters. AdaLoRA's loss needs all of them."""


def is_refused(method: str, layout: str) -> bool:
    if method == "prefix tuning" and layout == "cp":
        return True
    return ("tp" in layout and method in NOT_SPLIT) or (method == "AdaLoRA" and layout in IN_PARTS)


def describe_cell(method: str, layout: str) -> str:
    if not any(method in methods for methods in CELLS[layout].values()):
        return "not tried"
    return "error" if is_refused(method, layout) else "equal"


def write_table() -> str:
    """Return the Markdown table of docs/adapters.md."""
    rows = [["method", *LAYOUTS], ["---"] * (1 + len(LAYOUTS))]
    for method in METHODS:
        rows.append([method, *(describe_cell(method, layout) for layout in LAYOUTS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_task_options(model: str) -> dict[str, Any]:
    return {"task_type": "SEQ_CLS" if model == "bert" else "CAUSAL_LM"}


def make_target_options(model: str) -> dict[str, Any]:
    return {"target_modules": TARGETS[model], **make_task_options(model)}


def make_base(model: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def make_adapted(model: str, method: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    """Return a frozen base, the same on each call, with adapters that change its outputs from the start."""
    base = make_base(model, dtype)
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, METHODS[method](model))
    randomize_adapters(adapted)
    return adapted


def randomize_adapters(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_B", "lora_E", "vera_lambda_b", "ia3_l")):
                parameter.add_(torch.randn_like(parameter) * 0.1)


def list_trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def draw_rows(number: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def compute_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    labels = rows[:, 0] % 3 if "Classification" in type(model).__name__ else rows
    return model(input_ids=rows, labels=labels).loss  # type: ignore[no-any-return]


def read_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=draw_rows(99)).logits  # type: ignore[no-any-return]


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def train_by_hand(
    model: Any, optimizer: Any = None, updates: Sequence[int] = range(NUM_UPDATES), loss_of: Loss = compute_loss
) -> list[float]:
    """Train with plain PyTorch and PEFT on one process, and return the loss of each update."""
    optimizer, losses = optimizer or make_optimizer(list_trainable(model)), []
    for number in updates:
        loss = loss_of(model, draw_rows(number))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    updates: Sequence[int] = range(NUM_UPDATES),
    loss_of: Loss = compute_loss,
) -> list[float]:
    """Train on this rank's rows, and return the mean loss of each update over the rows of all ranks."""
    shard, losses = accelerator.strategy.data_shard, []
    for number in updates:
        rows = draw_rows(number)[shard.index :: shard.count]
        loss = loss_of(model, rows)
        accelerator.backward(loss, weight=len(rows))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce_mean(loss.detach() * len(rows), len(rows))))
    return losses


def make_accelerator(layout: str, **options: Any) -> Accelerator:
    return Accelerator(cpu=ON_CPU, strategy=None if layout == "one process" else layout, **options)


def prepare(accelerator: Accelerator, model: Any) -> tuple[Any, Any]:
    model, optimizer = accelerator.prepare(model, make_optimizer(list_trainable(model)))
    return model, optimizer


def gather_parameters(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole value of each parameter, gathered over the ranks. Parameters of other pipeline stages are left out."""
    accelerator.strategy.free_gathered(model)
    found = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.detach()
        if value.is_meta:
            continue
        found[name] = (value.full_tensor() if is_dtensor(value) else value).cpu().clone()
    return found


def find_differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters that are missing on one side or differ by more than `CLOSE`."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name, value in found.items() if float((value - expected[name].detach()).abs().max()) > CLOSE]


@dataclass(frozen=True)
class Reference:
    """Result of a training run in plain PyTorch.

    Attributes:
        losses: Loss of each update.
        initial: Parameters before the run.
        final: Parameters after the run.
        trained: Names of the trainable parameters.
    """

    losses: list[float]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    trained: set[str]


@cache
def compute_reference(model: str, method: str) -> Reference:
    plain = make_adapted(model, method)
    initial = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    losses = train_by_hand(plain)
    final = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    return Reference(losses=losses, initial=initial, final=final, trained=trained)
