"""`neftune_noise_alpha`: noise on embeddings in training only, as a loop by hand draws it, and exact resumes."""

import math

import pytest
import torch
from torch import nn

from headway import Trainer, TrainerCallback
from headway.errors import ConfigError
from headway.trainer.collation import Collator
from headway.trainer.embedding_noise import EmbeddingNoise
from tests.unit.trainer.models import Points, Speaker, WithLoss, arguments, llama, losses, texts, weights


class NamedSpeaker(Speaker):
    """Model that names its embedding, as transformers' models do."""

    def get_input_embeddings(self):
        return self.embed


def make_trainer(folder, model, alpha=5.0, **given):
    args = arguments(folder, neftune_noise_alpha=alpha, train_sampling_strategy="sequential", optim="sgd",
                     lr_scheduler_type="constant", max_grad_norm=0, **given)  # fmt: skip
    return Trainer(model, args, Collator(pad_token_id=0), texts(24, low=6, high=7), texts(8))


def test_noise_has_the_range_of_the_paper_and_spares_evaluation_and_gradients():
    model, tokens = NamedSpeaker(), torch.randint(1, 60, (200, 32))
    plain = model.embed(tokens)
    handle = EmbeddingNoise(model, 8.0)
    noise = model.embed(tokens) - plain
    limit = 8.0 / math.sqrt(32 * 8)
    assert noise.abs().max() <= limit + 1e-6
    assert noise.abs().max() > 0.99 * limit
    assert abs(noise.mean()) < 0.01 * limit
    assert noise.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)  # of a uniform distribution
    assert not torch.equal(model.embed(tokens) - plain, noise)
    model.embed(tokens).sum().backward()
    counts = torch.bincount(tokens.flatten(), minlength=60).float()
    assert torch.equal(model.embed.weight.grad, counts[:, None].expand(60, 8))
    assert torch.equal(model.eval().embed(tokens), plain)
    handle.remove()
    assert torch.equal(model.train().embed(tokens), plain)


def test_training_equals_a_loop_by_hand(tmp_path):
    trainer = make_trainer(tmp_path, NamedSpeaker())
    trainer.train()
    model, rows = NamedSpeaker(), texts(24, low=6, high=7)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.01), []
    torch.manual_seed(trainer.args.seed)
    for start in range(0, 24, 4):
        batch = {name: torch.tensor([row[name] for row in rows[start : start + 4]]) for name in ("input_ids", "labels")}
        embedded = model.embed(batch["input_ids"])
        limit = 5.0 / math.sqrt(6 * 8)
        logits = model.head(torch.tanh(embedded + torch.empty_like(embedded).uniform_(-limit, limit)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(weights(trainer.model), weights(model), atol=1e-6)
    without_noise = make_trainer(tmp_path, NamedSpeaker(), alpha=None)
    without_noise.train()
    assert not torch.allclose(weights(without_noise.model), weights(model), atol=1e-5)


def test_the_hook_is_gone_after_the_training_even_after_an_error(tmp_path):
    model = llama()
    trainer = make_trainer(tmp_path, model)
    trainer.train()
    assert not model.get_input_embeddings()._forward_hooks
    trainer.train_dataset = [{"input_ids": [99], "labels": [99]}]  # beyond the vocabulary
    with pytest.raises(Exception, match="index out of range"):
        trainer.train()
    assert not model.get_input_embeddings()._forward_hooks


def test_resumed_run_draws_the_same_noise(tmp_path):
    whole, half = llama(), llama()
    make_trainer(tmp_path / "whole", whole, max_steps=6).train()
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(tmp_path / "half", half, **given)
    trainer.train()
    resumed = llama()
    make_trainer(tmp_path / "half", resumed, **given).train(
        resume_from_checkpoint=str(tmp_path / "half" / "run" / "checkpoints" / "checkpoint_0")
    )
    assert torch.equal(weights(half), weights(whole))
    assert torch.equal(weights(resumed), weights(whole))


def test_adapters_on_a_frozen_embedding_get_noise(tmp_path):
    peft = pytest.importorskip("peft")

    def build():
        torch.manual_seed(2)
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"))

    noisy, plain = make_trainer(tmp_path, build()), make_trainer(tmp_path, build(), alpha=0)
    noisy.train()
    plain.train()
    assert losses(noisy) != pytest.approx(losses(plain), rel=1e-4)


def test_model_that_does_not_name_its_embedding_is_an_error(tmp_path):
    trainer = Trainer(WithLoss(), arguments(tmp_path, neftune_noise_alpha=5), train_dataset=Points(8))
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5 adds .* WithLoss does not name"):
        trainer.train()
    with pytest.raises(ConfigError, match="neftune_noise_alpha=-1"):
        arguments(tmp_path, neftune_noise_alpha=-1)


class EmbeddedSpeaker(NamedSpeaker):
    """Model that embeds tokens without calling its embedding, as for batches with `inputs_embeds`."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(torch.tanh(self.embed.weight[input_ids]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def list_warnings(caplog):
    return [each.getMessage() for each in caplog.records if "had no effect in the first update" in each.getMessage()]


def test_noise_without_effect_gives_one_warning(tmp_path, caplog):
    make_trainer(tmp_path, EmbeddedSpeaker()).train()
    assert len(list_warnings(caplog)) == 1
    assert "inputs_embeds" in list_warnings(caplog)[0]


def test_batches_with_embeddings_give_the_warning_before_the_second_update(tmp_path, caplog):
    model, seen = llama(), []
    rows = [{"inputs_embeds": torch.randn(6, 16), "labels": torch.arange(6)} for _ in range(12)]

    class WarningsAtUpdates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(len(list_warnings(caplog)))

    args = arguments(tmp_path, neftune_noise_alpha=5.0, optim="sgd")
    Trainer(model, args, train_dataset=rows, callbacks=[WarningsAtUpdates()]).train()
    assert len(seen) > 1
    assert set(seen) == {1}


@pytest.mark.parametrize("given", [{}, {"torch_compile_backend": "aot_eager"}])
def test_noise_with_an_effect_gives_no_warning(tmp_path, caplog, given):
    make_trainer(tmp_path, llama(), **given).train()
    assert not list_warnings(caplog)


def test_prompt_tuning_adds_noise_to_the_tokens_of_the_batch(tmp_path, caplog):
    peft = pytest.importorskip("peft")

    def build():
        torch.manual_seed(2)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(llama(), config)

    noisy, plain = make_trainer(tmp_path, build()), make_trainer(tmp_path, build(), alpha=0)
    noisy.train()
    plain.train()
    assert losses(noisy) != pytest.approx(losses(plain), rel=1e-4)
    assert not list_warnings(caplog)
