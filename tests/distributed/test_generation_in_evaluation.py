"""`predict_with_generate` on two ranks gives the predictions of one process, also if the ranks' rows end at different tokens."""

import pytest

from headway import ShardingOptions, Trainer, TrainingArguments
from headway.trainer.collation import Collator
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.test_generation import SAME, compute_metrics, drop_speeds, make_rows, t5


def predict(folder, strategy, num_beams, num_rows=3):
    """Return predictions, labels and metrics, before, during and after a training of one update.

    Args:
        folder: Folder of the run.
        strategy: Layout.
        num_beams: Beams, or None for greedy decoding.
        num_rows: Training rows per rank.
    """
    found = []
    # Without units, so small a model would be gathered once, and ranks would need no other ranks for a token.
    config = {
        "strategy": strategy,
        "kwargs_handlers": [ShardingOptions(units=["T5Block"])] if strategy == "fsdp" else [],
    }
    args = TrainingArguments(
        folder, log_level="error", predict_with_generate=True, generation_num_beams=num_beams, generation_max_length=14,
        eval_strategy="steps", eval_steps=1, max_steps=1, save_strategy="no", per_device_train_batch_size=num_rows,
        train_sampling_strategy="sequential", accelerator_config=config,
        **{**SAME, "per_device_eval_batch_size": 1},
    )  # fmt: skip

    def record(prediction):
        found.append((prediction.predictions.tolist(), prediction.label_ids.tolist()))
        return compute_metrics(prediction)

    trainer = Trainer(t5(), args, Collator(pad_token_id=0), make_rows(6), make_rows(7), compute_metrics=record)
    metrics = [drop_speeds(trainer.evaluate())]
    trainer.train()
    metrics.append(drop_speeds(trainer.evaluate()))
    predictions = trainer.predict(make_rows(5)).predictions.tolist()
    return found[:1] + found[-2:], metrics, predictions


@pytest.mark.parametrize("num_beams", [None, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_predict_what_one_process_predicts(strategy, num_beams, tmp_path):
    """Seven rows in batches of one: the last step gives the second rank no row of its own."""
    both = run_ranks(predict, 2, tmp_path / "two", strategy, num_beams)
    one = predict(tmp_path / "one", None, num_beams, num_rows=6)
    for arrays, metrics, predictions in both:
        assert arrays == one[0]
        assert metrics == [pytest.approx(each, rel=1e-4) for each in one[1]]
        assert predictions == one[2]
    lengths = [sum(token > 0 for token in row) for row in one[2]]
    assert len(set(lengths)) > 1
