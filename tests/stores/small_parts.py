"""Reduces the part size of multipart uploads to 256 KiB in this process, so that small states need several parts."""

import sys

SIZE = 256 * 1024


def make_small() -> None:
    from headway.common import object_path

    former = object_path.PART
    for name, module in list(sys.modules.items()):
        if name.startswith("headway.") and getattr(module, "PART", None) == former:
            module.PART = SIZE  # type: ignore[attr-defined]
