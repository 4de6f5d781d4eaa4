"""Test images of all usual layouts, and that other programs can read the PNG files."""

import io

import numpy
import pytest
import torch
from PIL import Image

from headway.core.tracking.pictures import ImageFileNames, convert_images, number_images, write_png
from headway.errors import TrackingError


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 4), [(5, 4, 1)]), ((5, 4, 3), [(5, 4, 3)]), ((3, 5, 6), [(5, 6, 3)]), ((1, 5, 6), [(5, 6, 1)]),
        ((2, 3, 5, 6), [(5, 6, 3)] * 2), ((2, 5, 6, 4), [(5, 6, 4)] * 2), ((3, 5, 3), [(3, 5, 3)]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_every_usual_layout_becomes_height_width_channels(shape, expected, kind):
    given = torch.rand(shape) if kind == "torch" else numpy.random.default_rng(0).random(shape)
    assert [picture.shape for picture in convert_images(given, "a")] == expected


def test_values_become_bytes():
    shown = convert_images(numpy.array([[0.0, 0.5, 1.0, 2.0, -1.0, numpy.nan]]), "a")[0]
    assert shown[0, :, 0].tolist() == [0, 128, 255, 255, 0, 0]
    assert convert_images(torch.tensor([[True, False]]), "a")[0][0, :, 0].tolist() == [255, 0]
    assert convert_images(numpy.array([[300, -1, 7]]), "a")[0][0, :, 0].tolist() == [255, 0, 7]
    assert convert_images(torch.ones(2, 2, dtype=torch.bfloat16), "a")[0].max() == 255
    assert [each.shape for each in convert_images([Image.new("RGB", (4, 5)), torch.zeros(2, 2)], "a")] == [
        (5, 4, 3),
        (2, 2, 1),
    ]


@pytest.mark.parametrize(
    "values", [torch.randn(3, 9, 9), torch.rand(3, 9, 9) * 255, [[0.5, numpy.nan]], [[0, 256]], [[-1, 9]]]
)
def test_one_warning_for_values_that_are_clipped(values, caplog):
    name = f"clipped {values}"
    for _ in range(2):
        convert_images(numpy.asarray(values), name)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "shows other colors than those of 'clipped" in warning
    assert "floats must be from 0 to 1 and integers from 0 to 255" in warning


def test_no_warning_for_rounded_values(caplog):
    for values in (torch.tensor([[0.0, 1.004]]).bfloat16(), numpy.array([[0, 255]]), numpy.zeros((2, 2), bool)):
        convert_images(values, "rounded")
    assert not caplog.records


@pytest.mark.parametrize(
    "given", [torch.zeros(2), torch.zeros(5, 5, 5), numpy.zeros((0, 3)), "text", None, numpy.array([["a"]])], ids=repr
)
def test_invalid_image_is_named(given):
    with pytest.raises(TrackingError, match="'a'"):
        convert_images(given, "a")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_other_programs_read_the_files(tmp_path, channels):
    image = numpy.random.default_rng(0).integers(0, 256, (7, 5, channels), dtype=numpy.uint8)
    path = tmp_path / "deep" / "a.png"
    write_png(path, image)
    with Image.open(io.BytesIO(path.read_bytes())) as read:
        assert read.mode == {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        assert numpy.array_equal(numpy.asarray(read).reshape(7, 5, channels), image)


def test_file_names_are_valid():
    names = ImageFileNames()
    assert names.choose("eval/../über 1", "", 12) == "eval_.._über_1-00000012.png"
    assert names.choose("..", "/1", None) == "image-1.png"


def test_several_images_with_one_name_are_numbered():
    found = [(name, part) for name, part, _ in number_images({"a": torch.zeros(2, 2), "b": torch.zeros(2, 3, 4, 4)})]
    assert found == [("a", ""), ("b", "/0"), ("b", "/1")]
