"""Detect shuffle buffers of streamed Hugging Face datasets, whose saved state lacks the samples in the buffer.

If a `datasets.IterableDataset` continues from such a state, the samples that were in the buffer are lost. So a
resumed run reads these datasets again from the start instead.
"""

from typing import Any

_MAX_DEPTH = 30


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a dataset is an iterable dataset of the `datasets` library that shuffles its samples in a buffer.

    False for other datasets, even if they wrap such a dataset.
    """
    return _holds_buffer(getattr(dataset, "_ex_iterable", None), 0)


def _holds_buffer(node: Any, depth: int) -> bool:
    """Whether a node of a Hugging Face iterable dataset, or a node that it reads from, has a shuffle buffer.

    Args:
        node: Node, recognized by the name of its class, because `datasets` is not imported here.
        depth: Nesting depth of the node.
    """
    if node is None or depth > _MAX_DEPTH or not type(node).__module__.startswith("datasets."):
        return False
    if type(node).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or ())]
    return any(_holds_buffer(each, depth + 1) for each in inner)
