"""`ChatTokenizer`: turn a conversation into token IDs, and labels on the responses only."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headway.errors import ConfigError, DataError
from headway.language_data.chat.responses import ChatRenderer
from headway.language_data.chat.row_tokenizer import RowTokenizer
from headway.language_data.chat.rows import USER, Conversation, read_conversation
from headway.language_data.packing import IGNORE_INDEX, LABELS, TOKENS

TRAIN_ON = ("assistant", "last", "all")
TOO_LONG = ("error", "drop", "truncate")
_EXCERPT = 60
"""Number of characters of a row that an error message shows."""


class ChatTokenizer(RowTokenizer):
    """Callable that turns a conversation into token IDs and labels, with a chat template and labels on the responses.

    Pass it to `ChatDataset`, or to `map` of a `datasets.Dataset` or a stream. A row is one of these:

    - a dict with a list of messages such as {"role": "user", "content": "Hi"} in `messages`, or the list itself
    - a dict with ShareGPT's `conversations`, whose messages have `from` and `value`
    - a dict with `prompt` and `completion`, each of which is a text or a list of messages; only the completion is trained

    Labels are the token IDs of the responses, and -100 elsewhere. A label is at the position of its token, as
    transformers' models expect. The trained part of a response begins after the header that prompts for it at inference,
    and ends with its end-of-turn token. It is found with the template's `{% generation %}` markers if it has them, else
    from the text itself. Anything that would train on other tokens than the model generates raises `DataError`. An empty
    reasoning block at the beginning of a response (`<think></think>`) is not trained.

    A message with `"weight": 0` is not trained. Messages after the last trained response are left out, as they would only
    add tokens without labels. The template adds all special tokens, so none are added twice.

    Args:
        tokenizer: Tokenizer of transformers.
        train_on: "assistant": all responses. "last": the responses after the last question, which are several if the
            model calls tools. "all": every token. Default: "assistant".
        max_length: Largest number of tokens. None: no limit.
        too_long: Treatment of longer conversations: "error" raises an error, "truncate" removes tokens from the end, and
            "drop" lets a `ChatDataset` leave the conversation out. Calls raise an error then, too. Default: "error".
        tools: Tools that the template describes to the model, as JSON schemas or functions. A row's own `tools`, a list or
            JSON text, take precedence.
        messages_column: Column of the messages. None: `messages`, `conversations` or `conversation`.
        chat_template: Chat template, or the name of one of the tokenizer's templates. None: the tokenizer's default.
        chat_template_kwargs: Additional variables of the template, such as {"enable_thinking": False}.
            None (the default): no additional variables.
        end_of_turn: Text that ends a response, such as "<|im_end|>". None: any special token of the tokenizer.

    Raises:
        ConfigError: If an argument is not allowed.
        DataError: If the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        train_on: Literal["assistant", "last", "all"] = "assistant",
        max_length: int | None = None,
        too_long: Literal["error", "drop", "truncate"] = "error",
        tools: Sequence[Any] | None = None,
        messages_column: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_of_turn: str | None = None,
    ) -> None:
        if not hasattr(tokenizer, "apply_chat_template") or not hasattr(tokenizer, "added_tokens_decoder"):
            raise ConfigError(
                f"ChatTokenizer got a {type(tokenizer).__name__}; give a tokenizer of transformers (of a processor, its .tokenizer)"
            )
        if train_on not in TRAIN_ON:
            raise ConfigError(f"train_on={train_on!r}; give one of {', '.join(map(repr, TRAIN_ON))}")
        if too_long not in TOO_LONG:
            raise ConfigError(f"too_long={too_long!r}; give one of {', '.join(map(repr, TOO_LONG))}")
        if max_length is None and too_long != "error":
            raise ConfigError(f"too_long={too_long!r} needs max_length=, the largest number of tokens")
        if max_length is not None and (
            isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1
        ):
            raise ConfigError(f"max_length={max_length!r}; give a whole number, 1 or more")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.max_length = max_length
        self.too_long = too_long
        self.tools = tools
        self.messages_column = messages_column
        self._renderer = ChatRenderer(tokenizer, chat_template, chat_template_kwargs or {}, end_of_turn)
        self._added_tokens = frozenset(tokenizer.added_tokens_decoder)

    def __call__(self, row: Any, index: int | None = None) -> dict[str, list[int]]:
        """Return {"input_ids": token IDs, "labels": labels} of a conversation.

        Args:
            row: Conversation in one of the formats above.
            index: Index of the row, for error messages. None: they show the beginning of the row.

        Raises:
            DataError: If the row is not a conversation, the template fails or does not allow the responses to be found,
                the conversation is too long, or no label is left.
        """
        sample = self.encode_unless_dropped(row, index)
        if sample is None:
            raise DataError(
                f"conversation {name_row(row, index)} has more than max_length={self.max_length} tokens; leave it out, as a "
                "ChatDataset does, or pass too_long='truncate'"
            )
        return sample

    def encode_unless_dropped(self, row: Any, index: int | None = None) -> dict[str, list[int]] | None:
        """Return the result of a call, or None if the conversation is too long and `too_long="drop"`.

        Args:
            row: Conversation in one of the formats above.
            index: Index of the row, for error messages. None: they show the beginning of the row.

        Raises:
            DataError: As for a call.
        """
        try:
            return self.encode_conversation(read_conversation(row, self.messages_column))
        except DataError as error:
            raise name_row_in_error(error, "conversation", row, index) from error

    def encode_conversation(self, conversation: Conversation) -> dict[str, list[int]] | None:
        """Return token IDs and labels, or None if the conversation is too long and `too_long="drop"`.

        Args:
            conversation: Messages, and the responses that may be trained.

        Raises:
            DataError: If the template fails or does not allow the responses to be found, the conversation is too long, or
                no label is left.
        """
        tokens, labels = self._encode(conversation)
        if self.max_length is not None and len(tokens) > self.max_length:
            if self.too_long == "drop":
                return None
            if self.too_long == "error":
                raise DataError(
                    f"it has {len(tokens)} tokens, and max_length={self.max_length}; pass too_long='drop' or 'truncate'"
                )
            tokens, labels = tokens[: self.max_length], labels[: self.max_length]
        # The first label is never used, because no token precedes it.
        if all(label == IGNORE_INDEX for label in labels[1:]):
            raise DataError(f"none of its {len(tokens)} tokens has a label, so nothing of it would be trained")
        return {TOKENS: tokens, LABELS: labels}

    def count_tokens(self, sample: Mapping[str, Any]) -> int:
        """Return the number of tokens of a sample, such as the result of a call."""
        return len(sample[TOKENS])

    def mark_trained(self, sample: Mapping[str, Any]) -> str:
        """Return the decoded tokens of a sample, with the trained parts between `[train]` and `[/train]`.

        Args:
            sample: Sample with `input_ids` and `labels`, such as the result of a call, or a sequence of a
                `PackedDataset`.
        """
        tokens, labels = list(map(int, sample[TOKENS])), list(map(int, sample[LABELS]))
        text, start = "", 0
        while start < len(tokens):
            is_trained = labels[start] != IGNORE_INDEX
            stop = start
            while stop < len(tokens) and (labels[stop] != IGNORE_INDEX) == is_trained:
                stop += 1
            part = self.tokenizer.decode(tokens[start:stop], skip_special_tokens=False)
            text += f"[train]{part}[/train]" if is_trained else part
            start = stop
        return text

    def _encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return the token IDs and labels of a conversation, without applying `max_length`.

        Messages after the last response to train on are left out, unless `train_on` is "all". Tokens outside these
        responses have the label `IGNORE_INDEX`.

        Raises:
            DataError: If the template fails, or if the responses cannot be located in its output.
        """
        tools = self.tools if conversation.tools is None else conversation.tools
        if self.train_on == "all":
            tokens, _ = self._tokenize(self._renderer.render(conversation.messages, tools))
            return tokens, list(tokens)
        responses = self._choose_responses(conversation)
        messages = conversation.messages[: responses[-1] + 1]
        text, spans = self._renderer.find_responses(messages, responses, tools)
        tokens, starts = self._tokenize(text)
        labels = [IGNORE_INDEX] * len(tokens)
        for span in spans:
            first = self._find_token(text, tokens, starts, span.start)
            end = self._find_token(text, tokens, starts, span.stop)
            labels[first:end] = tokens[first:end]
        return tokens, labels

    def _choose_responses(self, conversation: Conversation) -> list[int]:
        """Return the indices of the responses to train: all, or with `train_on="last"` those to the last question.

        Raises:
            DataError: If there are none.
        """
        responses = conversation.responses
        if responses and self.train_on == "last":
            questions = [index for index, message in enumerate(conversation.messages) if message["role"] == USER]
            last_question = max((index for index in questions if index < responses[-1]), default=-1)
            responses = [index for index in responses if index > last_question]
        if not responses:
            roles = ", ".join(message["role"] for message in conversation.messages)
            raise DataError(
                f"it has no message of the role 'assistant' that may be trained (its roles: {roles}), so nothing of it would be "
                "trained"
            )
        return responses

    def _tokenize(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return the token IDs of a text, and the index of each token's first character.

        The indices are None if the tokenizer is not a fast one. No special tokens are added, because the chat template has
        added them.
        """
        is_fast = bool(self.tokenizer.is_fast)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=is_fast, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]] if is_fast else None
        return list(encoded[TOKENS]), starts

    def _find_token(self, text: str, tokens: Sequence[int], starts: Sequence[int] | None, place: int) -> int:
        """Return the number of tokens of `text[:place]`, which must be the first ones of the whole text's tokens.

        Added tokens, such as the special ones, split a text before it is tokenized. Therefore only the part since the last
        added token before `place` is tokenized again.

        Args:
            text: Text of the conversation.
            tokens: Token IDs of the text.
            starts: Index of each token's first character, or None if unknown.
            place: Number of characters.

        Raises:
            DataError: If the tokens before and after `place` depend on each other, so that the model would see other
                tokens at inference than in training.
        """
        anchor = 0  # index of the last added token that begins before `place`
        if starts is not None:
            candidates = range(bisect_left(starts, place) - 1, 0, -1)
            anchor = next((at for at in candidates if tokens[at] in self._added_tokens), 0)
        for first in {anchor: None, 0: None}:  # from the start of the text only if the shorter part does not fit
            part, _ = self._tokenize(text[starts[first] if first and starts else 0 : place])
            if list(tokens[first : first + len(part)]) == part:
                return first + len(part)
        raise DataError(
            f"the tokenizer joins {text[max(0, place - 20) : place]!r} with {text[place : place + 20]!r}, where a response begins or "
            "ends, so the model would see other tokens at inference than in training; remove white space from the ends of the "
            "messages' content or from the end of the template's header"
        )


def name_row_in_error(error: DataError, noun: str, row: Any, index: int | None) -> DataError:
    """Return an error whose message begins with the name of the row, such as "conversation 5: ".

    Args:
        error: Error without the row.
        noun: Kind of row, such as "conversation".
        row: Row that caused the error. The message quotes its beginning if `index` is None.
        index: Index of the row, or None if it is unknown.
    """
    return DataError(f"{noun} {name_row(row, index)}: {get_bare_text(error)}")


def get_bare_text(error: DataError) -> str:
    """Return the message of an error without a link to the docs, for a new error, which appends the link itself."""
    return Exception.__str__(error)


def name_row(row: Any, index: int | None) -> str:
    """Return the index of a row, or the beginning of its text if the index is unknown."""
    return f"{str(row)[:_EXCERPT]!r}..." if index is None else str(index)
