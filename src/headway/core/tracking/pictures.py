"""Images for trackers: convert arrays and tensors of common shapes to uint8 arrays, and write PNG files."""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from headway.common.dtensors import is_dtensor
from headway.errors import TrackingError
from headway.log import get_logger

log = get_logger(__name__)

_CHANNELS = (1, 3, 4)
"""Allowed numbers of channels: grayscale, RGB and RGBA."""
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""Color type in a PNG header, by number of channels: grayscale, RGB and RGBA."""
_LAYOUTS = "[H, W], [H, W, C], [C, H, W], [N, H, W, C] or [N, C, H, W] with C 1, 3 or 4"
"""Allowed shapes, for error messages."""
_ROUNDING = 0.01
"""How far values may be outside of 0..1 without a warning: bf16 and interpolation round."""
Picture = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
"""Image as a uint8 array of shape [H, W, C], where C is 1, 3 or 4."""


def convert_images(value: object, name: str) -> list[Picture]:
    """Convert one or more images to uint8 arrays of shape [H, W, C].

    Args:
        value: Tensor or array of shape [H, W], [H, W, C], [C, H, W], [N, H, W, C] or [N, C, H, W]; a PIL image; or a
            list of these. Values are integers 0..255, floats 0..1 or booleans; others are clipped, with one warning. If
            the first and the last dimension could both be channels, the last one is used.
        name: Name of the image, for the error message.

    Raises:
        TrackingError: If an image's shape or type is not supported.
    """
    if isinstance(value, list | tuple):
        return [picture for item in value for picture in convert_images(item, name)]
    array = _to_array(value, name)
    if array.ndim == 4:
        return [_to_picture(each, name) for each in array]
    return [_to_picture(array, name)]


def _to_array(value: object, name: str) -> numpy.ndarray[Any, Any]:
    """Return a tensor on any device, an array or a PIL image as an array.

    Raises:
        TrackingError: If the value has another type.
    """
    if is_dtensor(value):
        raise TrackingError(
            f"log_images() got a sharded tensor for {name!r}, and only one rank logs it; give value.full_tensor(), which all "
            "ranks must call"
        )
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        array: numpy.ndarray[Any, Any] = (value.float() if value.is_floating_point() else value).numpy()
        return array
    if isinstance(value, numpy.ndarray) or hasattr(value, "__array_interface__"):
        return numpy.asarray(value)
    raise TrackingError(
        f"log_images() got {type(value).__name__} for {name!r}; allowed: arrays and tensors of {_LAYOUTS}"
    )


def _to_picture(array: numpy.ndarray[Any, Any], name: str) -> Picture:
    """Convert one image to a uint8 array of shape [H, W, C].

    Raises:
        TrackingError: If the image's shape or dtype is not supported.
    """
    shape = array.shape
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
        array = numpy.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] not in _CHANNELS or 0 in array.shape:
        raise TrackingError(f"log_images() got shape {shape} for {name!r}; allowed: {_LAYOUTS}")
    if array.dtype == numpy.bool_:
        array = array.astype(numpy.uint8) * 255
    elif numpy.issubdtype(array.dtype, numpy.floating):
        _warn_if_outside(array, -_ROUNDING, 1 + _ROUNDING, name)
        array = numpy.nan_to_num(numpy.clip(array, 0.0, 1.0)) * 255.0 + 0.5
    elif not numpy.issubdtype(array.dtype, numpy.integer):
        raise TrackingError(f"log_images() got type {array.dtype} for {name!r}; allowed: bytes 0..255 or floats 0..1")
    else:
        _warn_if_outside(array, 0, 255, name)
    return numpy.ascontiguousarray(numpy.clip(array, 0, 255).astype(numpy.uint8))


def _warn_if_outside(array: numpy.ndarray[Any, Any], smallest: float, largest: float, name: str) -> None:
    """Warn once per name if an image has NaN, or values outside of a range, which are clipped."""
    if array.dtype != numpy.uint8 and not (smallest <= array.min() and array.max() <= largest):  # false for NaN
        log.warning_once(
            "log_images() shows other colors than those of %r: floats must be from 0 to 1 and integers from 0 to 255, and other "
            "values are clipped. Undo the normalization of the data, or scale the values",
            name,
        )


def number_images(values: Mapping[str, Sequence[Picture]]) -> Iterator[tuple[str, str, Picture]]:
    """Yield triples of (name, suffix, image) for all images.

    The suffix is "/0", "/1", ... if a name has several images, else "".

    Args:
        values: Images by name, in any form that `convert_images` accepts.
    """
    for name, images in values.items():
        pictures = convert_images(images, name)
        for index, picture in enumerate(pictures):
            yield name, f"/{index}" if len(pictures) > 1 else "", picture


def drop_gray_axis(image: Picture) -> Picture:
    """Return a grayscale image as an array of shape [H, W]; return other images unchanged."""
    return image.squeeze(2) if image.shape[2] == 1 else image


def convert_to_color(image: Picture) -> Picture:
    """Return a grayscale image as an array of shape [H, W, 3]; return other images unchanged."""
    return numpy.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def encode_png(picture: Picture) -> bytes:
    """Return the contents of a PNG file with the image (https://www.w3.org/TR/png: one IDAT chunk, no row filters)."""
    height, width, channels = picture.shape
    rows = numpy.concatenate([numpy.zeros((height, 1), numpy.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = [
        _encode_chunk(b"IHDR", header),
        _encode_chunk(b"IDAT", zlib.compress(rows.tobytes())),
        _encode_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _encode_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: its length, kind, data and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_png(path: Path, picture: Picture) -> None:
    """Write a PNG file. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(picture))


class ImageFileNames:
    """File names of a tracker's images. Images with different names get different files."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # name of the images, by the part of the file name that comes from it

    def choose(self, name: str, suffix: str, step: int | None) -> str:
        """Return the file name of an image, such as "samples-00000100-0.png".

        All characters of the name except letters, digits, "-", "_", "." and "@" become "_". If another name has become
        the same text, as "eval/x" and "eval_x" do, a hash of the name is added.

        Args:
            name: Name of the image.
            suffix: Suffix from `number_images`.
            step: Step of the run; None for a file name without a step.
        """
        stem = "".join(char if char.isalnum() or char in "-_.@" else "_" for char in name).strip(".") or "image"
        if self._names.setdefault(stem, name) != name:
            stem = f"{stem}-{zlib.crc32(name.encode()):08x}"
        step_text = "" if step is None else f"-{step:08d}"
        return f"{stem}{step_text}{suffix.replace('/', '-')}.png"
