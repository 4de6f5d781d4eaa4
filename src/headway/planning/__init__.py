"""What a run would take, for any model, layout and number of ranks, found by preparing it without memory and without processes."""

TASKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "causal_lm": ("AutoModelForCausalLM", ("labels",), ()),
    "masked_lm": ("AutoModelForMaskedLM", ("labels",), ()),
    "seq2seq_lm": ("AutoModelForSeq2SeqLM", ("labels",), ()),
    "sequence_classification": ("AutoModelForSequenceClassification", (), ("labels",)),
    "token_classification": ("AutoModelForTokenClassification", ("labels",), ()),
    "question_answering": ("AutoModelForQuestionAnswering", (), ("start_positions", "end_positions")),
    "image_classification": ("AutoModelForImageClassification", (), ("labels",)),
}
"""The heads that a transformers model can train with, by the words of --task (dashes are accepted as well).

transformers' class, the labels of each token, and those of each sample.
"""
