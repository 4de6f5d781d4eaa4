"""Find the parts of a rendered conversation that the model would generate: the text of each response and its end."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from headway.errors import DataError
from headway.language_data.chat.rows import ASSISTANT

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Marker with which a chat template encloses what the model generates, as transformers recognizes it."""
_EMPTY_REASONING = re.compile(r"\s*(?:<think>\s*</think>|<thinking>\s*</thinking>|\[THINK\]\s*\[/THINK\])\s*")
_ROLE_HEADER = re.compile(r"\W*(?:assistant|model)\W*", re.IGNORECASE)
_EXCERPT = 40
"""Number of characters of a text that an error message shows."""


class Span(NamedTuple):
    """Part of a rendered conversation, in characters: `text[start:stop]`."""

    start: int
    stop: int


class ChatRenderer:
    """Renders conversations with a chat template, and finds the responses in the text.

    If the template has `{% generation %}` markers, the responses are what they enclose. Otherwise each response is found
    with two prefixes of the conversation. The text that prompts for the response must be a prefix of the whole text.
    So must the text that ends with the response, up to its end-of-turn token. What lies between the two ends is what
    the model would generate, given the same tokens as in training.

    Args:
        tokenizer: Tokenizer of transformers.
        chat_template: Template, or the name of one of the tokenizer's templates. None: the tokenizer's default.
        template_variables: Additional variables of the template, such as `enable_thinking`.
        end_of_turn: Text that ends a response. None: any special token.

    Raises:
        DataError: If the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        template_variables: Mapping[str, Any],
        end_of_turn: str | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._variables = dict(template_variables)
        self._get_template(None)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(filter(None, tokenizer.all_special_tokens))
        if end_of_turn is not None:
            special.add(end_of_turn)
        # The longest first, because one token's text may begin with another's. Sorted, so that pickles are equal.
        alternatives = "|".join(map(re.escape, sorted(special, key=lambda text: (-len(text), text)))) or r"(?!)"
        self._special = re.compile(alternatives)
        self._ends = re.compile(f"(?:{alternatives})+" if end_of_turn is None else re.escape(end_of_turn))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, adds_prompt: bool = False
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages, at least one.
            tools: Tools that the template describes to the model, or None.
            adds_prompt: Whether to append the header that prompts the model for a response. Default: False.

        Raises:
            DataError: If the template fails, for example because it does not allow the order of the roles.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self._chat_template,
                add_generation_prompt=adds_prompt,
                tokenize=False,
                **self._variables,
            )
        except ImportError:
            raise
        except Exception as error:  # templates raise jinja2's errors, and any that their expressions cause
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template fails for messages of the roles {roles}: {error}") from error
        return text

    def find_responses(
        self, messages: Sequence[Mapping[str, Any]], responses: Sequence[int], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans in it that are to be trained.

        A span ends with the end-of-turn token. It contains neither the header of the response, nor an empty reasoning
        block at its beginning, nor anything of the next message.

        Args:
            messages: Messages of the conversation.
            responses: Indices of the assistant messages to train, in increasing order.
            tools: Tools that the template describes to the model, or None.

        Raises:
            DataError: If the template fails, or a response cannot be found, has no end-of-turn token, or is preceded by
                another text than the one that prompts for it.
        """
        if _GENERATION_MARKER.search(self._get_template(tools)):
            text, spans = self._find_marked(messages, responses, tools)
        else:
            text = self.render(messages, tools)
            spans = [self._find_between_prefixes(text, messages, index, tools) for index in responses]
        return text, [_skip_empty_reasoning(text, span) for span in spans]

    def _get_template(self, tools: Sequence[Any] | None) -> str:
        """Return the chat template, a Jinja template as text.

        Raises:
            DataError: If the tokenizer has no chat template.
        """
        try:
            template: str = self._tokenizer.get_chat_template(self._chat_template, tools)
        except ValueError as error:
            raise DataError(
                f"the tokenizer has no chat template; set tokenizer.chat_template, or pass chat_template= ({error})"
            ) from error
        return template

    # ------------------------------------------------------------------------------ templates with markers

    def _find_marked(
        self, messages: Sequence[Mapping[str, Any]], responses: Sequence[int], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans of the responses that the chat template marks.

        A span is the text that one `{% generation %}` block renders. A response may have several spans, and several
        consecutive assistant messages may share one.

        Args:
            messages: Messages of the conversation.
            responses: Indices of the assistant messages to train.
            tools: Tools that the template describes to the model, or None.

        Raises:
            DataError: If the template fails, spans cannot be assigned to responses, or a span that must end a turn has
                no end-of-turn token.
        """
        text, marked = self._render_marked(messages, tools)
        is_response = [message["role"] == ASSISTANT for message in messages]
        num_turns = sum(this and not before for before, this in zip([False, *is_response], is_response))
        if len(marked) == sum(is_response):
            # One span per assistant message. The number of assistant messages before a response is the index of its span.
            chosen = [marked[sum(is_response[:index])] for index in responses]
            spans_that_end_turns = chosen
        elif len(responses) == sum(is_response) and len(marked) >= num_turns:
            # All assistant messages are trained, so all spans are. Only the last one is known to end a turn.
            chosen, spans_that_end_turns = marked, marked[-1:]
        else:
            raise DataError(
                f"the chat template marks {len(marked)} spans with {{% generation %}} for {sum(is_response)} assistant messages, "
                "so it is unknown which ones belong to the trained messages; mark each response once"
            )
        for span in spans_that_end_turns:
            marked_text = text[span.start : span.stop].rstrip()
            if not any(match.end() == len(marked_text) for match in self._ends.finditer(marked_text)):
                raise DataError(
                    f"the {{% generation %}} block of the chat template ends with {marked_text[-_EXCERPT:]!r}, before the end-of-"
                    f"turn token (then follows {text[span.stop : span.stop + _EXCERPT]!r}), so the model would not learn to stop; "
                    "move {% endgeneration %} behind the token, or name the text that ends a response in end_of_turn="
                )
        return text, chosen

    def _render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and all spans that the template marks.

        The tokenizer's own `return_assistant_tokens_mask` is not used. It knows only tokens, needs a fast tokenizer, and
        marks everything up to the end of the conversation if the last character of a span is in no token.

        Raises:
            DataError: If the template fails, or renders the conversation differently in two calls.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.render(messages, tools)  # also explains errors of the template
        (marked_text,), (marked,) = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=self._get_template(tools),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._variables},
        )
        if marked_text != text:
            raise DataError(
                "the chat template renders the conversation differently in two calls; remove its randomness"
            )
        return text, [Span(start, stop) for start, stop in marked]

    # --------------------------------------------------------------------------- templates without markers

    def _find_between_prefixes(
        self, text: str, messages: Sequence[Mapping[str, Any]], index: int, tools: Sequence[Any] | None
    ) -> Span:
        """Return the span of a response, from the end of its prompt to the end of its end-of-turn token.

        Args:
            text: Text of all messages.
            messages: Messages of the conversation.
            index: Index of the assistant message.
            tools: Tools that the template describes to the model, or None.

        Raises:
            DataError: If a prefix of the conversation is rendered differently in the whole text, or the end-of-turn token
                is missing.
        """
        if index == 0:
            raise DataError(
                "the conversation begins with an assistant message, so no prompt precedes this response; give the message "
                "'weight': 0 to use it only as context"
            )
        prompt = self.render(messages[:index], tools, adds_prompt=True)
        is_last = index == len(messages) - 1
        text_to_end = text if is_last else self.render(messages[: index + 1], tools)  # ends with this response
        for rendered in (text, text_to_end):
            if not rendered.startswith(prompt):
                _raise_changed(index, rendered, prompt, "when it prompts for this response")
        start = len(prompt)
        body_end = self._find_body_end(text_to_end, start)
        if not text.startswith(text_to_end[:body_end]):
            _raise_changed(index, text, text_to_end, "when this response is the last message")
        stop = self._find_end(text_to_end, body_end, bool(messages[index].get("tool_calls")))
        if stop is None:
            raise DataError(
                f"the chat template ends message {index} with {text_to_end[-_EXCERPT:]!r}, without a special token that belongs to "
                "the response, so the model would not learn to stop; add one to the template, or name the text that ends a response "
                "in end_of_turn="
            )
        if not text.startswith(text_to_end[body_end:stop], body_end):
            _raise_changed(index, text, text_to_end, "when this response is the last message")
        self._check_surroundings(text[start:body_end], messages[index], index)
        return Span(start, stop)

    def _find_body_end(self, text: str, start: int) -> int:
        """Return the end of a response's text, after which only white space and special tokens follow.

        Args:
            text: Text of the conversation up to and including the response.
            start: Start of the response.
        """
        tokens = list(self._special.finditer(text, start))
        end = start + len(text[start:].rstrip())
        while tokens and tokens[-1].end() == end:
            last_token = tokens.pop()
            end = start + len(text[start : last_token.start()].rstrip())
        return end

    def _find_end(self, text: str, body_end: int, has_tool_calls: bool) -> int | None:
        """Return the end of the end-of-turn token that follows a response, or None if there is none.

        Special tokens without white space between them are one end-of-turn token. What follows white space is not part
        of it: some templates write the end-of-text token after the last message. However, tool calls may themselves end
        with special tokens, so that the last one ends the turn.

        Args:
            text: Text of the conversation up to and including the response.
            body_end: End of the response's own text in `text`. Only white space and special tokens follow.
            has_tool_calls: Whether the response contains tool calls.
        """
        ends = self._ends.finditer(text, body_end)
        if has_tool_calls:
            return max((match.end() for match in ends), default=None)
        return next((match.end() for match in ends), None)

    def _check_surroundings(self, body: str, message: Mapping[str, Any], index: int) -> None:
        """Check that a response neither begins with its own role header nor has text of the template after its content.

        Nothing is checked if the content is not text or does not appear unchanged in `body`. Text after the content is
        allowed if the message has tool calls.

        Args:
            body: Text of the response without the special tokens at its end.
            message: The assistant message.
            index: Index of the message, for the error.

        Raises:
            DataError: If there is such a header or text, because the model would be trained on it.
        """
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        position = body.rfind(content) if content else -1
        if position < 0:
            return
        header = self._special.sub("", body[:position])
        if _ROLE_HEADER.fullmatch(header):
            raise DataError(
                f"the chat template ignores add_generation_prompt, so the model would be trained on the header {body[:position]!r} "
                f"of message {index}; let the template append the header if add_generation_prompt is true"
            )
        rest = self._special.sub("", body[position + len(content) :]).strip()
        if rest and not message.get("tool_calls"):
            raise DataError(
                f"the chat template adds {body[position + len(content) :]!r} to message {index}, and the model would be trained on "
                "it; remove it from the template, or enclose the response in {% generation %} and {% endgeneration %}"
            )


def _skip_empty_reasoning(text: str, span: Span) -> Span:
    """Return a span without an empty reasoning block at its beginning, which may begin in the prompt.

    The model need not generate such a block: if reasoning is turned off, the prompt contains it.
    """
    for block in _EMPTY_REASONING.finditer(text, max(0, span.start - _EXCERPT), span.stop):
        if block.start() <= span.start < block.end():
            return Span(block.end(), span.stop)
    return span


def _count_equal(first: str, second: str, start: int = 0) -> int:
    """Return the number of characters in the longest common prefix of two texts whose first `start` are equal."""
    length = min(len(first), len(second))
    return next((place for place in range(start, length) if first[place] != second[place]), length)


def _raise_changed(index: int, text: str, prefix: str, occasion: str) -> NoReturn:
    """Raise a `DataError` that shows where the rendered conversation differs from the text of its first messages.

    Args:
        index: Index of the response.
        text: Text of the whole conversation.
        prefix: Text of the first messages, rendered alone.
        occasion: When the template rendered `prefix`, such as "when it prompts for this response".
    """
    place = _count_equal(text, prefix)
    raise DataError(
        f"the chat template changes earlier messages: {occasion} (message {index}), it writes "
        f"{prefix[place : place + _EXCERPT]!r}, and in the full conversation {text[place : place + _EXCERPT]!r}, so the model would "
        "be trained on other text than it generates. Templates that remove earlier reasoning do this: pass train_on='last', or make "
        "one conversation for each response, which ends with it. If reasoning is off, pass the template's switch, such as "
        "chat_template_kwargs={'enable_thinking': False}"
    )
