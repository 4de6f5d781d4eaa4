"""Detect collators that pack several documents into one sequence, which a model must keep separate."""

_FLATTENING = "DataCollatorWithFlattening"
"""Class of transformers that concatenates the samples of a batch into one row. It is recognized by name, so that
transformers is not imported."""


def is_flattening(collate: object) -> bool:
    """Whether a collate function is transformers' `DataCollatorWithFlattening`, or an instance of a subclass.

    Args:
        collate: Collate function of a loader.
    """
    return any(kind.__name__ == _FLATTENING for kind in type(collate).__mro__)


def requests_check(collate: object) -> bool:
    """Whether models must be checked for whether they separate the documents that a collate function packs.

    The function's attribute `check_model` decides. Without it, only `DataCollatorWithFlattening` requests the check.

    Args:
        collate: Collate function of a loader.
    """
    return getattr(collate, "check_model", is_flattening(collate)) is True
