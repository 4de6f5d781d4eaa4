"""Read conversations from the row formats of chat data sets: messages, ShareGPT, prompt with completion, and preferences."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.errors import DataError

ASSISTANT = "assistant"
USER = "user"
CHOSEN = "chosen"
REJECTED = "rejected"
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
"""Columns in which the messages of a row are looked for, in this order."""
_SHAREGPT_ROLES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "observation": "tool"}
"""Roles that ShareGPT data name differently from chat templates."""


class Conversation(NamedTuple):
    """Messages of one row, and the responses that may be trained.

    Attributes:
        messages: Messages with `role`, as chat templates expect them.
        responses: Indices of the assistant messages that may be trained, in increasing order.
        tools: JSON schemas of the tools in the row; None if the row has no tools of its own.
    """

    messages: list[dict[str, Any]]
    responses: list[int]
    tools: list[Any] | None


def read_conversation(row: Any, messages_column: str | None = None) -> Conversation:
    """Return the conversation of a row.

    An assistant message with the entry `"weight": 0` is context only and not trained, as in OpenAI's format. Of rows
    with a prompt and a completion, only the completion is trained. Entries that are None are removed from messages, tool
    calls and tools, because tables fill missing entries with None.

    Args:
        row: List of messages, or a mapping with the messages in a column, or with the entries `prompt` and
            `completion`. The entry `tools` is optional.
        messages_column: Column of the messages. None: the first of `MESSAGE_COLUMNS` that the row has.

    Raises:
        DataError: If the row contains no messages, or a message has no role.
    """
    if isinstance(row, str | bytes) or not isinstance(row, Mapping | Sequence):
        raise DataError(f"a row is a {type(row).__name__}; give a list of messages, or a dict that contains one")
    if not isinstance(row, Mapping):
        return _build_conversation(row, 0, None)
    tools = _read_tools(row.get("tools"))
    names = MESSAGE_COLUMNS if messages_column is None else (messages_column,)
    column = next((name for name in names if row.get(name) is not None), None)
    if column is not None:
        return _build_conversation(row[column], 0, tools)
    if messages_column is None and row.get("prompt") is not None and row.get("completion") is not None:
        prompt = _wrap_text(row["prompt"], USER)
        completion = _wrap_text(row["completion"], ASSISTANT)
        return _build_conversation([*prompt, *completion], len(prompt), tools)
    expected = " or ".join(map(repr, names)) + (", or 'prompt' and 'completion'" if messages_column is None else "")
    raise DataError(
        f"a row has no {expected}, only {', '.join(map(str, row)) or 'nothing'}; name it in messages_column="
    )


def read_preference(row: Any) -> tuple[Conversation, Conversation]:
    """Return the conversations with the chosen and with the rejected response of a row.

    The prompt is the column `prompt`. If `chosen` and `rejected` begin with the prompt's messages, these are not repeated.
    Without this column, the prompt consists of the first messages that `chosen` and `rejected` have in common. Assistant
    messages of the prompt are not trained.

    Args:
        row: Mapping with the entries `chosen` and `rejected`, and optionally `prompt` and `tools`. Each is a list of
            messages or a text: a message of the user in `prompt`, and of the assistant in the other two.

    Raises:
        DataError: If an entry is missing, the prompt is unknown, or a response does not begin with an assistant message.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row is a {type(row).__name__}; give a dict with 'prompt', 'chosen' and 'rejected'")
    for side in (CHOSEN, REJECTED):
        if row.get(side) is None:
            raise DataError(f"a row has no {side!r}, only {', '.join(map(str, row)) or 'nothing'}")
    chosen, rejected = (_read_messages(row[side], ASSISTANT) for side in (CHOSEN, REJECTED))
    if chosen == rejected:
        raise DataError("'chosen' and 'rejected' are equal, so the row would train nothing")
    if row.get("prompt") is None:
        prompt = _find_common_start(chosen, rejected)
        if not prompt:
            raise DataError(
                "the row has no 'prompt', and 'chosen' and 'rejected' do not begin with the same message; add the prompt"
            )
    else:
        prompt = _read_messages(row["prompt"], USER)
    tools = _read_tools(row.get("tools"))
    conversations = []
    for side, messages in ((CHOSEN, chosen), (REJECTED, rejected)):
        response = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
        if not response or response[0]["role"] != ASSISTANT:
            found = f"begins with a message of the role {response[0]['role']!r}" if response else "has no message"
            raise DataError(f"after the prompt, {side!r} {found}; a response begins with an assistant message")
        conversations.append(_build_conversation([*prompt, *response], len(prompt), tools))
    return conversations[0], conversations[1]


def _read_messages(content: Any, role: str) -> list[dict[str, Any]]:
    """Return messages, or a text as one message, with the entries that chat templates expect."""
    return _build_conversation(_wrap_text(content, role), 0, None).messages


def _find_common_start(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return the longest list of messages with which both conversations begin."""
    common = []
    for message, other in zip(first, second, strict=False):
        if message != other:
            break
        common.append(message)
    return common


def _build_conversation(messages: Any, first_response: int, tools: list[Any] | None) -> Conversation:
    """Return the conversation of some messages. Assistant messages before `first_response` are not trained.

    Raises:
        DataError: If there are no messages, or if they are not a list of dicts with roles.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise DataError(f"the messages of a row are a {type(messages).__name__}; give a list of dicts")
    converted = [_convert_message(message) for message in messages]
    if not converted:
        raise DataError("the row has no messages")
    responses = [
        index
        for index, message in enumerate(converted)
        if index >= first_response and message["role"] == ASSISTANT and message.get("weight", 1) != 0
    ]
    return Conversation(converted, responses, tools)


def _convert_message(message: Any) -> dict[str, Any]:
    """Return a message with `role` and without entries that are None. ShareGPT's names are translated.

    Raises:
        DataError: If the message is not a dict, or has no role.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"a message is a {type(message).__name__}; give dicts with 'role' and 'content'")
    converted = {name: value for name, value in message.items() if value is not None}
    if "from" in converted and "role" not in converted:
        sender = converted.pop("from")
        converted["role"] = _SHAREGPT_ROLES.get(sender, sender)
        converted["content"] = converted.pop("value", "")
    if not isinstance(converted.get("role"), str):
        raise DataError(f"a message has no 'role', only {', '.join(map(str, converted)) or 'nothing'}")
    if "tool_calls" in converted:
        converted["tool_calls"] = _remove_missing(converted["tool_calls"])
    return converted


def _wrap_text(content: Any, role: str) -> Sequence[Any]:
    """Return a list with one message of the given role if `content` is a string, else `content` unchanged."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _read_tools(tools: Any) -> list[Any] | None:
    """Return a row's tools, which may be JSON text; None if there are none.

    Raises:
        DataError: If text is not valid JSON.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"the row's 'tools' are not JSON: {error}") from error
    return list(_remove_missing(tools)) if tools else None


def _remove_missing(value: Any) -> Any:
    """Return nested mappings and lists without the entries of mappings that are None."""
    if isinstance(value, Mapping):
        return {name: _remove_missing(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_remove_missing(each) for each in value]
    return value
