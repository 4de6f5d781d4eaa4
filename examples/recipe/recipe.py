"""A small language model, from text to reinforcement learning: tokenizer, pretraining, LoRA fine-tuning, GRPO, samples.

    headway launch --cpu -n 2 examples/recipe/recipe.py --quick      a minute, to see that it works
    headway launch --cpu -n 2 examples/recipe/recipe.py              twenty minutes on two CPU cores
    headway launch -n 8 examples/recipe/recipe.py                    the same on eight GPUs

The text comes with Python: the source of the standard library, and the language reference that `help()`
prints. The model learns to continue both, then to write a function's header for a comment, then to write headers that
Python can parse and that are named after the comment. You can kill it at any time and start it again: each stage resumes from
its last checkpoint, with bitwise the same result. At the end it writes the page runs/recipe/report.html.
"""

import argparse
import ast
import hashlib
import math
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed, track
from headway.core.tracking.report import html_page, load

STAGES = ("pretraining", "finetuning", "reinforcement")
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
END = 0  # the token that ends a text and pads rows
Pair = tuple[list[int], list[int]]  # the tokens of a prompt and of its answer
Loss = Callable[[nn.Module, Tensor], tuple[Tensor, int]]  # of a model and a batch: (sum of losses, number of items)

# ------------------------------------------------------------------------------------------------------------ text


def read_texts(max_bytes: int) -> dict[tuple[str, str], list[str]]:
    """Return texts by (part, source). The hash of a text decides whether it is held out; one in ten is.

    Parts are "train" and "held_out", sources are "code" and "prose".
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    sources = {"code": {path.read_text(errors="replace") for path in paths}, "prose": set(topics.values())}
    selected: dict[tuple[str, str], list[str]] = {}
    for source, texts in sources.items():
        parts: dict[str, list[str]] = {"train": [], "held_out": []}
        # In the order of their hashes, so that every process reads the same texts in the same order.
        for digest, text in sorted((hashlib.sha256(text.encode()).digest(), text) for text in texts):
            parts["held_out" if digest[-1] < 26 else "train"].append(text)
        for part, part_texts in parts.items():
            selected[part, source] = take_prefix(part_texts, max_bytes)
    return selected


def take_prefix(texts: list[str], max_bytes: int) -> list[str]:
    """Return the first texts whose characters together are fewer than `max_bytes`, but at least one text."""
    total_sizes = accumulate(len(text) for text in texts)
    return [text for text, total in zip(texts, total_sizes) if total < max_bytes] or texts[:1]


def train_tokenizer(texts: list[str], num_tokens: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer on the training text, and write it to `path`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<|end|>"],  # the first token, so its number is END
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(f"{path}.part")
    Path(f"{path}.part").rename(path)  # so that an existing file is always complete


def list_functions(texts: list[str], tokenizer: Tokenizer) -> list[Pair]:
    """Return ("# what it does", "def its_header(...):") for every documented function, as tokens."""
    pairs = []
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                header = ast.unparse(ast.FunctionDef(node.name, node.args, [ast.Pass()], [], None, lineno=1))
                prompt = tokenizer.encode(f"# {doc.splitlines()[0]}\n").ids
                answer = tokenizer.encode(header.removesuffix("\n    pass")).ids + [END]
                if len(prompt) + len(answer) < 64:
                    pairs.append((prompt, answer))
    return pairs


class Mixture(Dataset):
    """Random windows of several streams of tokens, int64[length + 1], drawn by weight.

    A row depends only on (seed, index), so a resumed run continues with the same rows.
    """

    def __init__(self, streams: list[Tensor], weights: list[float], num_rows: int, length: int, seed: int) -> None:
        self.streams, self.weights, self.num_rows, self.length, self.seed = streams, weights, num_rows, length, seed

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        rng = random.Random(f"{self.seed} {index}")
        (stream,) = rng.choices(self.streams, self.weights)
        start = rng.randrange(len(stream) - self.length)
        return stream[start : start + self.length + 1]


def collate(pairs: list[Pair]) -> Tensor:
    """Return int64[rows, 2, length]: the tokens of prompts and answers, padded on the right; and 1 for tokens of answers."""
    rows = [torch.tensor([prompt + answer, [0] * len(prompt) + [1] * len(answer)]).T for prompt, answer in pairs]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).movedim(2, 1)


# ----------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Transformer block: attention and a perceptron on normalized inputs, each added to the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 32
        self.norm_1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Map int64[batch, length] tokens to float32[batch, length, num_tokens] logits of the next token."""

    def __init__(self, num_tokens: int, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))).float()


class LoRA(nn.Module):
    """A frozen linear layer plus a product of two thin layers, which starts at zero (Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * self.b(self.a(x))

    def merge(self) -> nn.Linear:
        """Return the linear layer with the product added to its weight."""
        self.linear.weight.data += 2 * self.b.weight.data @ self.a.weight.data
        return self.linear


def replace_layers(model: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace each layer of a kind in the model's blocks by `make(layer)`."""
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, kind):
                setattr(block, name, make(layer))
    return model


@torch.no_grad()
def generate(
    model: nn.Module, prompts: list[list[int]], num_new: int = 32, temperature: float = 1.0
) -> list[list[int]]:
    """Sample an answer to each prompt, up to its END. Padding is on the right, where causal attention ignores it."""
    device = next(model.parameters()).device
    rows = collate([(prompt, [END] * num_new) for prompt in prompts])[:, 0].to(device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    index = torch.arange(len(rows), device=device)
    is_done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for _ in range(num_new):
        logits = model(rows[:, : int(ends.max())])[index, ends - 1]  # of the token that follows each row's last one
        probabilities = (logits / temperature).softmax(-1)
        rows[index, ends] = torch.multinomial(probabilities, 1)[:, 0].masked_fill(is_done, END)
        is_done |= rows[index, ends] == END
        ends += 1
    answers = [row[len(prompt) :][:num_new] for row, prompt in zip(rows.tolist(), prompts)]
    return [answer[: answer.index(END) + 1] if END in answer else answer for answer in answers]


# ---------------------------------------------------------------------------------------------------------- losses


def token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the cross entropy of each next token: float32[rows, length - 1]."""
    return F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")


def text_loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    """Return the loss of all tokens."""
    return token_losses(model, rows).sum(), rows[:, 1:].numel()


def answer_loss(model: nn.Module, pairs: Tensor, weights: Tensor | float = 1.0) -> tuple[Tensor, int]:
    """Return the loss of the answers' tokens, each row multiplied by its weight."""
    rows, is_answer = pairs.unbind(1)
    return (token_losses(model, rows) * is_answer[:, 1:] * weights).sum(), int(is_answer.sum())


def compute_reward(prompt: str, answer: str) -> float:
    """Return 1 for a header that Python parses and whose name has a word of the comment, 0.5 if it only parses, else 0."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strange literals cause SyntaxWarnings
            (node,) = ast.parse(answer + "\n    pass").body
    except (SyntaxError, ValueError):
        return 0.0
    if not isinstance(node, ast.FunctionDef) or len(node.body) > 1:
        return 0.0
    comment_words = set(re.findall("[a-z]{3,}", prompt.lower()))
    name_words = set(re.findall("[a-z]{3,}", node.name.lower()))
    return 1.0 if comment_words & name_words else 0.5


class Rewards:
    """Generates answers and computes their rewards."""

    def __init__(self, tokenizer: Tokenizer, group: int) -> None:
        self.tokenizer, self.group = tokenizer, group

    def sample(self, model: nn.Module, prompts: list[list[int]]) -> tuple[list[Pair], Tensor]:
        """Return pairs of prompts and generated answers, and the rewards of the answers."""
        pairs = list(zip(prompts, generate(model, prompts)))
        decode = self.tokenizer.decode
        rewards = [compute_reward(decode(prompt), decode(answer)) for prompt, answer in pairs]
        return pairs, torch.tensor(rewards)

    def measure(self, model: nn.Module, prompts: list[list[int]]) -> tuple[Tensor, int]:
        """Return (sum of rewards, number of prompts)."""
        _, rewards = self.sample(model, prompts)
        return rewards.sum(), len(prompts)

    def loss(self, model: nn.Module, prompts: list[list[int]]) -> tuple[Tensor, int]:
        """Return the loss of GRPO (Shao et al. 2024) with one update per group, so without a clipped ratio, and without a penalty.

        The advantage is the reward minus the group's mean, without dividing by the standard deviation (Liu et al. 2025).
        """
        pairs, rewards = self.sample(model, [prompt for prompt in prompts for _ in range(self.group)])
        groups = rewards.view(-1, self.group)
        device = next(model.parameters()).device
        advantages = (groups - groups.mean(1, keepdim=True)).view(-1, 1).to(device)
        return answer_loss(model, collate(pairs).to(device), advantages)


# ---------------------------------------------------------------------------------------------------------- stages


class Recipe:
    """The text, the tokenizer and the three stages. Each stage is a separate run with its own checkpoints and log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.texts = read_texts(args.max_bytes)
        self.accelerator = Accelerator()
        path = args.out / "tokenizer.json"
        with self.accelerator.main_process_first():
            if not path.exists():
                train_tokenizer(self.texts["train", "code"] + self.texts["train", "prose"], args.tokens, path)
        self.tokenizer = Tokenizer.from_file(str(path))
        self.training = list_functions(self.texts["train", "code"], self.tokenizer)
        self.held_out = list_functions(self.texts["held_out", "code"], self.tokenizer)

    def build_model(self, stage: str | None = None) -> GPT:
        """Build the model, with the weights of a finished stage if one is given."""
        model = GPT(self.args.tokens, self.args.width, self.args.layers, self.args.length)
        if stage:
            model.load_state_dict(load_file(self.args.out / stage / "model.safetensors"))
        return model

    def pretrain(self) -> GPT:
        """Train on windows of code and prose."""
        args = self.args
        streams: dict[tuple[str, str], Tensor] = {}  # tokens by (part, source)
        tests = {}
        for (part, source), texts in self.texts.items():
            tokens: list[int] = []
            for encoding in self.tokenizer.encode_batch(texts):
                tokens += [*encoding.ids, END]
            streams[part, source] = torch.tensor(tokens)
            if part == "held_out":
                tokens_per_byte = len(tokens) / sum(len(text.encode()) for text in texts)
                bits = tokens_per_byte / math.log(2)  # factor from nats per token to bits per byte
                rows = streams[part, source].unfold(0, args.length + 1, args.length)[: 4 * args.batch]
                tests[f"eval_{source}_bits_per_byte"] = rows, text_loss, bits
        sources = [streams["train", source] for source in ("code", "prose")]
        mixture = Mixture(sources, [0.8, 0.2], args.steps * args.batch, args.length, args.seed)
        model, rows = self.build_model(), mixture[0].expand(args.batch // self.accelerator.num_data_shards, -1)
        forecast = self.accelerator.forecast(
            model, rows, optimizer=torch.optim.AdamW(model.parameters()),
            forward=lambda model, rows: text_loss(model, rows)[0], largest=False,
        )  # fmt: skip
        self.accelerator.print(
            f"{sum(map(len, sources)):,} tokens of text; each process will need {forecast.total / 2**20:.0f} MiB"
        )
        return self.train("pretraining", model, mixture, text_loss, args.rate, tests)

    def finetune(self) -> GPT:
        """Train LoRA adapters to write headers for comments, and merge them."""
        model = replace_layers(self.build_model("pretraining").requires_grad_(False), nn.Linear, LoRA)
        pairs = (self.training * self.args.epochs)[: -(len(self.training) % self.args.batch)]
        tests = {"eval_answer_loss": (self.held_out[: 4 * self.args.batch], answer_loss, 1.0)}
        model = self.train("finetuning", model, pairs, answer_loss, self.args.rate, tests, collate)
        return replace_layers(model, LoRA, LoRA.merge)

    def reinforce(self) -> GPT:
        """Train with GRPO on rewards for headers."""
        rewards, rng = Rewards(self.tokenizer, self.args.group), random.Random(self.args.seed)
        prompts = [rng.choice(self.training)[0] for _ in range(self.args.grpo_steps * self.args.batch // 4)]
        tests = {"eval_reward": ([prompt for prompt, _ in self.held_out[: 4 * self.args.batch]], rewards.measure, 1.0)}
        model = self.build_model("finetuning")
        return self.train(
            "reinforcement",
            model,
            prompts,
            rewards.loss,
            self.args.rate / 20,
            tests,
            list,
            batch_size=self.args.batch // 4,
        )

    def make_accelerator(self, stage: str) -> Accelerator:
        """Return the Accelerator of a stage, with its trackers."""
        args = self.args
        accelerator = Accelerator(
            log_with=args.tracker,
            scheduler_ticks="updates",
            dataloader_config=DataLoaderConfiguration(split_batches=True, data_seed=args.seed),
            project_config=ProjectConfiguration(
                args.out / stage, logging_dir=args.out, automatic_checkpoint_naming=True, total_limit=2
            ),
        )
        accelerator.init_trackers(stage, config={**vars(args), "out": str(args.out)})
        return accelerator

    def train(
        self, stage: str, model: nn.Module, data: Dataset, loss_of: Loss, rate: float,
        tests: dict[str, tuple[Sequence, Loss, float]], collate: Callable | None = None, batch_size: int | None = None,
    ) -> nn.Module:  # fmt: skip
        """Train a stage in one pass over its data. A killed stage continues from its last checkpoint, at the next batch."""
        args = self.args
        accelerator = self.make_accelerator(stage)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
        loader = DataLoader(data, batch_size or args.batch, shuffle=True, collate_fn=collate)
        num_updates = len(loader)

        def compute_lr_factor(update: int) -> float:
            """Return the factor of the learning rate: it rises for a twentieth of the updates, then falls to 2%."""
            return min(1.0, (update + 1) / (num_updates / 20), 1.02 - update / num_updates)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, compute_lr_factor)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        loaders = {
            name: accelerator.prepare(DataLoader(rows, args.batch, collate_fn=collate))
            for name, (rows, *_) in tests.items()
        }

        @torch.no_grad()
        def evaluate() -> None:
            for name, (_, measure, scale) in tests.items():
                total, count = 0.0, 0
                for batch in loaders[name]:
                    num_valid = loaders[name].num_valid  # the other rows only fill up the last batch
                    if num_valid > 0:
                        with accelerator.autocast():
                            value, weight = measure(model, batch[:num_valid])
                        total += value.item()
                        count += weight
                accelerator.log({name: accelerator.reduce_mean(total, count) * scale})

        restored = accelerator.resume("latest")
        if restored:
            accelerator.print(restored)
        else:
            num_trained = sum(parameter.numel() for parameter in trained)
            accelerator.print(f"{stage}: {num_updates} updates of {num_trained:,} parameters")
            evaluate()
        for _ in accelerator.epochs(1):
            for batch in track(loader, description=stage):
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss, weight = loss_of(model, batch)
                    # With a sum and the number of tokens, all tokens of an update count the same, on any rank.
                    accelerator.backward(loss, weight=weight, reduction="sum")
                    norm = accelerator.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.throughput.add(tokens=weight)
                if accelerator.num_updates % args.log_every == 0:
                    values = {"loss": accelerator.reduce_mean(loss.item(), weight), "grad_norm": norm}
                    rates = {"learning_rate": scheduler.get_last_lr()[0], **accelerator.throughput.values()}
                    accelerator.log(values | rates)
                if accelerator.num_updates % max(2, num_updates // 8) == 0:
                    evaluate()
                    accelerator.save_state(blocking=False)
        accelerator.wait_for_save()
        accelerator.end_trackers()
        accelerator.stop_watching()
        return accelerator.unwrap_model(model)

    def print_results(self) -> None:
        """Print headers for unseen comments and the measures, and write the page of all stages."""
        prompts = [prompt for prompt, _ in self.held_out[:: max(1, len(self.held_out) // 8)]]
        answers = generate(self.build_model("reinforcement"), prompts, temperature=0.5)
        for prompt, answer in zip(prompts, answers):
            print(self.tokenizer.decode(prompt) + self.tokenizer.decode(answer) + "\n")
        runs = load([self.args.out / stage for stage in STAGES])
        for run in runs:
            for name in sorted(name for name in run.series if name.startswith("eval_")):
                first, last = run.series[name][0][-1], run.series[name][-1][-1]
                print(f"{name.removeprefix('eval_')}: {first:.3f} -> {last:.3f}")
        (self.args.out / "report.html").write_text(html_page(runs), encoding="utf-8")
        print(f"all stages on one page: {self.args.out / 'report.html'}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(tokens=2048, group=8, max_bytes=10**9, log_every=5, seed=0)
    parser.add_argument("--quick", action="store_true", help="use tiny sizes, and ignore the size options")
    parser.add_argument("--width", type=int, default=192, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--batch", type=int, default=32, help="rows per update, over all processes")
    parser.add_argument("--steps", type=int, default=500, help="updates of pretraining")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of fine-tuning")
    parser.add_argument("--grpo-steps", type=int, default=80, help="updates of reinforcement learning")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate of pretraining")
    parser.add_argument("--tracker", help="tracker besides the run's log: tensorboard, wandb, mlflow ...")
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    args = parser.parse_args()
    if args.quick:
        small = {"tokens": 512, "width": 64, "layers": 2, "length": 128, "batch": 8, "steps": 24, "epochs": 1}
        vars(args).update(small, grpo_steps=8, max_bytes=300_000)
    return args


def main() -> None:
    recipe = Recipe(parse_args())
    for stage, train_stage in zip(STAGES, (recipe.pretrain, recipe.finetune, recipe.reinforce)):
        if not (recipe.args.out / stage / "model.safetensors").exists():  # otherwise it has already finished
            set_seed(recipe.args.seed)
            recipe.accelerator.save_model(train_stage(), recipe.args.out / stage)
    if recipe.accelerator.is_main_process:
        recipe.print_results()
    recipe.accelerator.end_training()


if __name__ == "__main__":
    main()
