"""Small models and data for tests of the Trainer."""

from types import SimpleNamespace

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from headway import Trainer, TrainingArguments

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**given):
    import transformers  # imported here, so that ranks that do not need it start faster

    torch.manual_seed(1)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **{**NO_DROPOUT, **given}))


def llama(**given):
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, **given})
    return transformers.LlamaForCausalLM(config)


class Speaker(nn.Module):
    """Logits for the label of each token. The loss is the mean over labels that are not ignored."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(60, 8), nn.Linear(8, 60)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(torch.tanh(self.embed(input_ids)))
        found = {"logits": logits}
        return found if labels is None else {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), **found}


def classes(num_rows=40, length=6):
    """Rows of tokens. The label says whether the first two are in order."""
    rng = numpy.random.default_rng(0)
    tokens = rng.integers(1, 60, (num_rows, length))
    return [{"input_ids": row.tolist(), "labels": int(row[0] < row[1])} for row in tokens]


def texts(num_rows=40, low=3, high=12):
    """Rows of tokens of different lengths, which are their own labels. Some labels are ignored."""
    rng = numpy.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        tokens = rng.integers(1, 60, rng.integers(low, high)).tolist()
        labels = [-100 if rng.random() < 0.2 else token for token in tokens]
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Points(Dataset):
    """Pairs of x and its class."""

    def __init__(self, num_rows=40):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_rows, 5, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    """Logits of two classes, with dropout, so that RNG states matter."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x)


class WithLoss(Net):
    """Classifier that returns its loss in a dict."""

    def forward(self, x, labels=None):
        logits = self.body(x)
        found = {"logits": logits}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def cross_entropy(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def arguments(folder, **given):
    base = {"output_dir": folder / "run", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4,
            "num_train_epochs": 1, "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no"}  # fmt: skip
    return TrainingArguments(**{**base, **given})


def make(folder, model=None, callbacks=None, data=None, evaluation=None, metrics=None, **given):
    return Trainer(model or Net(), arguments(folder, **given), train_dataset=data or Points(20),
                   eval_dataset=evaluation, loss_function=cross_entropy, callbacks=callbacks, compute_metrics=metrics)  # fmt: skip


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
