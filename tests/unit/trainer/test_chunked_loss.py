"""`chunk_loss=True` trains to the weights of the plain run, saves memory in the forecast, and leaves the model as it was."""

import pytest
import torch
from torch import nn

from headway import Trainer, TrainingArguments, chunk_loss
from headway.errors import ConfigError, PrepareError
from headway.trainer import builder
from headway.trainer.collation import Collator
from tests.unit.trainer.models import Speaker, arguments, cross_entropy, llama, losses, texts, weights

if not hasattr(nn.functional, "linear_cross_entropy"):
    pytest.skip("torch 2.13 brings linear_cross_entropy", allow_module_level=True)


class LogitsRecorder(Trainer):
    """Trainer that records whether the training computed logits."""

    found: frozenset[bool] = frozenset()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            self.found = self.found | {outputs["logits"] is not None}
        return (loss, outputs) if return_outputs else loss


def train(folder, is_chunked, **given):
    args = arguments(
        folder,
        chunk_loss=is_chunked,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        eval_strategy="epoch",
        **{"optim": "sgd", "learning_rate": 0.3, **given},
    )
    trainer = LogitsRecorder(llama(tie_word_embeddings=True), args, Collator(pad_token_id=0), texts(), texts(6))
    trainer.train()
    return trainer


@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": True}], ids=["plain", "recomputed"])
def test_weights_and_losses_equal_those_of_the_plain_run(given, tmp_path):
    plain, ours = train(tmp_path / "plain", False, **given), train(tmp_path / "ours", True, **given)
    assert (plain.found, ours.found) == ({True}, {False})
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert torch.allclose(weights(ours.model), weights(plain.model), atol=1e-5)
    assert not torch.allclose(weights(ours.model), weights(llama(tie_word_embeddings=True)), atol=1e-3)
    found, expected = ours.predict(texts(6)), plain.predict(texts(6))
    assert torch.allclose(torch.tensor(found.predictions), torch.tensor(expected.predictions), atol=1e-3)


def test_model_is_as_it_was_after_the_training(tmp_path):
    trainer = train(tmp_path, True)
    model, plain = trainer.model, llama(tie_word_embeddings=True)
    assert type(model.lm_head) is nn.Linear
    assert vars(model.lm_head).keys() - vars(nn.Linear(1, 1)).keys() <= vars(plain.lm_head).keys()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model.lm_head.weight is model.get_input_embeddings().weight
    tokens = torch.ones(1, 4, dtype=torch.long)
    outputs = model.train()(input_ids=tokens, labels=tokens)
    assert outputs.logits.shape == (1, 4, 60)
    trainer.train()  # a second run chunks the loss again
    assert trainer.found == {False}


def test_forecast_counts_the_savings(tmp_path):
    tokens = torch.ones(8, 128, dtype=torch.long)
    peaks = []
    for is_chunked in (False, True):
        model, args = llama(vocab_size=8000), arguments(tmp_path, chunk_loss=is_chunked)
        accelerator = builder.create_accelerator(args)
        builder.apply_memory_savings(args, accelerator, model)
        forecast = accelerator.forecast(
            model, {"input_ids": tokens, "labels": tokens}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        peaks.append(forecast.allocated)
        builder.release_model(args, accelerator, model)
    logits = 8 * 128 * 8000 * 4
    assert peaks[0] - peaks[1] >= logits


def test_models_without_a_loss_to_chunk_are_errors(tmp_path):
    args = arguments(tmp_path, chunk_loss=True)
    with pytest.raises(PrepareError, match="chunk_loss got Speaker"):
        Trainer(Speaker(), args, Collator(pad_token_id=0), texts()).train()
    with pytest.raises(ConfigError, match="has a loss function, which needs the logits"):
        Trainer(llama(), args, loss_function=cross_entropy)
    with pytest.raises(ConfigError, match="was called on this model already"):
        Trainer(chunk_loss(llama()), args, Collator(pad_token_id=0), texts()).train()


class LabelFree(Trainer):
    """Trainer that computes the loss itself, so that the model gets no labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def test_loss_that_needs_logits_is_a_warning(tmp_path, caplog):
    for is_chunked, num_warnings in ((False, 0), (True, 1)):
        args = arguments(tmp_path, chunk_loss=is_chunked, max_steps=2, eval_strategy="epoch", log_level="warning")
        LabelFree(llama(), args, Collator(pad_token_id=0), texts(), texts(6)).train()
        warnings = [
            each for each in caplog.records if "chunk_loss has no effect: LlamaForCausalLM" in each.getMessage()
        ]
        assert len(warnings) == num_warnings


def test_smoothed_labels_need_logits(tmp_path):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 needs"):
        TrainingArguments(tmp_path, chunk_loss=True, label_smoothing_factor=0.1)
