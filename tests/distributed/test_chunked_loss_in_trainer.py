"""`chunk_loss=True` of the Trainer gives the weights of the plain run of one process on two ranks, replicated and sharded."""

import pytest
import safetensors.torch
import torch
from torch import nn

from headway import ShardingOptions, Trainer, TrainingArguments
from headway.trainer.collation import Collator
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import llama, texts

if not hasattr(nn.functional, "linear_cross_entropy"):
    pytest.skip("torch 2.13 brings linear_cross_entropy", allow_module_level=True)


def train(folder, strategy, num_rows, is_chunked):
    """Train, evaluate, and return the saved weights, the losses and the class of the head."""
    args = TrainingArguments(
        folder, per_device_train_batch_size=num_rows, num_train_epochs=2, learning_rate=0.3, optim="sgd",
        use_cpu=True, logging_steps=1,
        save_strategy="no", disable_tqdm=True, log_level="error", train_sampling_strategy="sequential",
        chunk_loss=is_chunked, accelerator_config={"strategy": strategy},
    )  # fmt: skip
    trainer = Trainer(llama(), args, Collator(pad_token_id=0), texts(24), texts(6))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return (
        {name: tensor.clone() for name, tensor in weights.items()},
        [*found, evaluated],
        type(trainer.model.lm_head).__name__,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_equal_those_of_the_plain_run(strategy, tmp_path):
    weights, losses, _ = train(tmp_path / "one", None, 8, is_chunked=False)
    for found, found_losses, head in run_ranks(train, 2, tmp_path / "two", strategy, 4, True):
        assert found_losses == pytest.approx(losses, rel=1e-4)
        assert head == "Linear"
        for name, tensor in found.items():
            assert torch.allclose(tensor, weights[name], atol=1e-5), name


def train_twice(folder, num_rows, is_chunked, config):
    """Train twice with one Trainer, and return the losses of both runs, those of calls after each, and the saved weights."""
    args = TrainingArguments(
        folder, per_device_train_batch_size=num_rows, num_train_epochs=1, learning_rate=0.3, optim="sgd",
        use_cpu=True, logging_steps=1,
        save_strategy="no", disable_tqdm=True, log_level="error", train_sampling_strategy="sequential",
        chunk_loss=is_chunked, accelerator_config=config,
    )  # fmt: skip
    trainer = Trainer(llama(), args, Collator(pad_token_id=0), texts(24), texts(6))
    tokens = torch.arange(1, 9).reshape(1, 8)
    found = []
    for _ in range(2):
        trainer.train()
        found += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append(trainer.evaluate()["eval_loss"])
        outputs = trainer.model.train()(input_ids=tokens, labels=tokens)
        assert outputs.logits.shape == (1, 8, 60)
        found.append(outputs.loss.item())
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    head_classes = [each.__name__ for each in type(trainer.model.lm_head).__mro__]
    return found, safetensors.torch.load_file(folder / "model.safetensors"), head_classes


LINEAR = ["Linear", "Module", "object"]


@pytest.mark.parametrize(
    ("options", "head_classes"),
    [
        pytest.param(ShardingOptions(), LINEAR, id="in the root's unit"),
        pytest.param(
            ShardingOptions(units=("LlamaDecoderLayer", "lm_head")),
            ["FSDPLinear", "FSDPModule", *LINEAR],
            id="own unit",
        ),
        pytest.param(
            ShardingOptions(min_num_params=500), ["FSDPLinear", "FSDPModule", *LINEAR], marks=pytest.mark.matrix
        ),
    ],
)
def test_sharded_model_is_evaluated_saved_and_trained_again(options, head_classes, tmp_path):
    expected, weights, _ = train_twice(tmp_path / "one", 8, False, {})
    config = {"strategy": "fsdp", "kwargs_handlers": [options]}
    for found, saved, classes in run_ranks(train_twice, 2, tmp_path / "two", 4, True, config):
        assert found == pytest.approx(expected, rel=1e-4)
        assert classes == head_classes
        assert saved.keys() == weights.keys()
        for name, tensor in saved.items():
            assert torch.allclose(tensor, weights[name], atol=1e-5), name
