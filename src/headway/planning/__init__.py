"""Plan a run of any model, layout and number of ranks: prepare it in one process, without allocating memory."""

TASKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "causal_lm": ("AutoModelForCausalLM", ("labels",), ()),
    "masked_lm": ("AutoModelForMaskedLM", ("labels",), ()),
    "seq2seq_lm": ("AutoModelForSeq2SeqLM", ("labels",), ()),
    "sequence_classification": ("AutoModelForSequenceClassification", (), ("labels",)),
    "token_classification": ("AutoModelForTokenClassification", ("labels",), ()),
    "question_answering": ("AutoModelForQuestionAnswering", (), ("start_positions", "end_positions")),
    "image_classification": ("AutoModelForImageClassification", (), ("labels",)),
}
"""Training tasks of transformers models, by the value of the command line's option `--task`.

On the command line, dashes are accepted in place of underscores. Each task is a tuple: the transformers class, the
names of labels per token, and the names of labels per sample.
"""
