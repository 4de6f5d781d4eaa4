"""Table of the training tasks of transformers models, which `headway estimate --task` names."""

from typing import NamedTuple


class Task(NamedTuple):
    """Training task of a transformers model.

    Attributes:
        auto_class: Name of transformers' Auto class that makes a model for the task.
        token_labels: Names of the model's arguments that receive one label per token.
        sample_labels: Names of the model's arguments that receive one label per sample.
    """

    auto_class: str
    token_labels: tuple[str, ...] = ()
    sample_labels: tuple[str, ...] = ()


TASKS = {
    "causal_lm": Task("AutoModelForCausalLM", token_labels=("labels",)),
    "masked_lm": Task("AutoModelForMaskedLM", token_labels=("labels",)),
    "seq2seq_lm": Task("AutoModelForSeq2SeqLM", token_labels=("labels",)),
    "sequence_classification": Task("AutoModelForSequenceClassification", sample_labels=("labels",)),
    "token_classification": Task("AutoModelForTokenClassification", token_labels=("labels",)),
    "question_answering": Task("AutoModelForQuestionAnswering", sample_labels=("start_positions", "end_positions")),
    "image_classification": Task("AutoModelForImageClassification", sample_labels=("labels",)),
}
"""Training tasks of transformers models, by the value of the command line's option `--task`.

On the command line, dashes are accepted in place of underscores.
"""
