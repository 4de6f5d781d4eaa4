"""`PreferenceTokenizer`: turn a prompt with a chosen and a rejected response into token IDs and labels, for DPO."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError, DataError
from headway.language_data.chat.row_tokenizer import RowTokenizer
from headway.language_data.chat.rows import CHOSEN, REJECTED, read_preference
from headway.language_data.chat.tokenizer import ChatTokenizer, get_bare_text, name_row, name_row_in_error
from headway.language_data.packing import LABELS, TOKENS

SIDES = (CHOSEN, REJECTED)
"""The two responses of a pair, in the order of `PreferenceCollator`."""


class PreferenceTokenizer(RowTokenizer):
    """Callable that tokenizes a preference pair with a chat template, and labels only the responses.

    Pass it to `ChatDataset`, or to `map` of a `datasets.Dataset` or a stream. A row is a dict with the columns of TRL:

    - `prompt`, `chosen` and `rejected`, each a list of messages or a string. A string is a message of the user in
      `prompt`, and of the assistant in `chosen` and `rejected`.
    - `chosen` and `rejected` alone, as lists of messages that begin with the same prompt.

    A row's `tools`, if any, are passed to the template. A sample has the entries `chosen_input_ids`, `chosen_labels`,
    `rejected_input_ids` and `rejected_labels`. `PreferenceCollator` makes batches of them. Labels are the token IDs of the
    response, as in a `ChatTokenizer`, and -100 elsewhere. Assistant messages of the prompt have no labels.

    Args:
        tokenizer: `ChatTokenizer` with the options that both conversations get, or a tokenizer of transformers. With
            `max_length`, a pair is too long if one of its conversations is.

    Attributes:
        chat: The `ChatTokenizer`.
        max_length: Maximum number of tokens of a conversation. None: no limit.
        too_long: Treatment of longer conversations, as in `ChatTokenizer`.

    Raises:
        ConfigError: If the `ChatTokenizer` trains all tokens or has `messages_column`.
        DataError: If the tokenizer has no chat template.

    Example::

        pairs = ChatDataset(rows, PreferenceTokenizer(ChatTokenizer(tokenizer, max_length=1024)))
        loader = DataLoader(pairs, batch_size=8, shuffle=True, collate_fn=PreferenceCollator())
    """

    def __init__(self, tokenizer: Any) -> None:
        self.chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)
        if self.chat.train_on == "all":
            raise ConfigError(
                "PreferenceTokenizer got a ChatTokenizer with train_on='all', which also labels the prompt; use the default or 'last'"
            )
        if self.chat.messages_column is not None:
            raise ConfigError(
                f"PreferenceTokenizer got a ChatTokenizer with messages_column={self.chat.messages_column!r}; it reads the columns "
                "'prompt', 'chosen' and 'rejected', so rename yours"
            )
        self.max_length = self.chat.max_length
        self.too_long = self.chat.too_long

    def __call__(self, row: Any, index: int | None = None) -> dict[str, list[int]]:
        """Return the token IDs and labels of both conversations.

        Args:
            row: Preference pair in one of the formats above.
            index: Index of the row, for error messages. None (the default): they quote the beginning of the row.

        Raises:
            DataError: If the row is not a preference pair, a conversation cannot be used (see `ChatTokenizer`), or both
                conversations have the same tokens.
        """
        sample = self.encode_unless_dropped(row, index)
        if sample is None:
            raise DataError(
                f"pair {name_row(row, index)} has a conversation with more than max_length={self.max_length} tokens; leave it out, "
                "as a ChatDataset does, or pass too_long='truncate'"
            )
        return sample

    def encode_unless_dropped(self, row: Any, index: int | None = None) -> dict[str, list[int]] | None:
        """Return what a call returns, or None if a conversation is too long and `too_long` is "drop".

        Args:
            row: Preference pair in one of the formats above.
            index: Index of the row, for error messages. None (the default): they quote the beginning of the row.

        Raises:
            DataError: As for a call.
        """
        sample: dict[str, list[int]] = {}
        try:
            for side, conversation in zip(SIDES, read_preference(row), strict=True):
                try:
                    encoded = self.chat.encode_conversation(conversation)
                except DataError as error:
                    raise DataError(f"its {side} conversation: {get_bare_text(error)}") from error
                if encoded is None:
                    return None
                sample[f"{side}_{TOKENS}"], sample[f"{side}_{LABELS}"] = encoded[TOKENS], encoded[LABELS]
            if sample[f"{CHOSEN}_{TOKENS}"] == sample[f"{REJECTED}_{TOKENS}"]:
                limit = "" if self.max_length is None else f", of which at most max_length={self.max_length} are kept"
                raise DataError(
                    f"its chosen and rejected conversations have the same tokens{limit}, so it would train nothing"
                )
        except DataError as error:
            raise name_row_in_error(error, "pair", row, index) from error
        return sample

    def count_tokens(self, sample: Mapping[str, Any]) -> int:
        """Return the number of tokens that a pair takes in a batch.

        It is twice that of the longer conversation, because the shorter one is padded.
        """
        return 2 * max(len(sample[f"{side}_{TOKENS}"]) for side in SIDES)

    def mark_trained(self, sample: Mapping[str, Any]) -> str:
        """Return the decoded tokens of a pair, with the trained parts between `[train]` and `[/train]`.

        Args:
            sample: Result of a call.
        """
        texts = [
            f"{side}:\n" + self.chat.mark_trained({name: sample[f"{side}_{name}"] for name in (TOKENS, LABELS)})
            for side in SIDES
        ]
        return "\n".join(texts)
