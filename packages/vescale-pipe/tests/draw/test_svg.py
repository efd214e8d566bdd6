"""SVG: any XML parser reads it, and it holds what the layout does."""

import xml.etree.ElementTree as ET

from vescale_pipe._draw.bars import picture
from vescale_pipe._draw.layout import Canvas, Line, Rectangle, Text, lay_out
from vescale_pipe._draw.svg import to_svg

NAME = "{http://www.w3.org/2000/svg}"


def test_all_of_the_layout_is_there(folded):
    canvas = lay_out(picture(folded))
    root = ET.fromstring(to_svg(canvas))
    assert (float(root.get("width")), float(root.get("height"))) == (canvas.width, canvas.height)
    boxes = root.findall(NAME + "rect")[1:]  # the first one is the background
    assert len(boxes) == len(canvas.rectangles)
    for box, drawn in zip(canvas.rectangles, boxes, strict=True):
        assert abs(float(drawn.get("x")) - box.x) < 0.006
        assert abs(float(drawn.get("width")) - box.width) < 0.006
        assert drawn.get("fill") == box.fill
        title = drawn.find(NAME + "title")
        assert (title.text if title is not None else "") == box.tip
    assert [text.text for text in root.findall(NAME + "text")] == [text.text for text in canvas.texts]
    assert len(root.findall(NAME + "line")) == len(canvas.lines)


def test_signs_of_xml_in_texts():
    text = 'a < b & c > "d" \x00\x1b[0m \u00e9'
    canvas = Canvas(
        10, 10, [Rectangle(0, 0, 1, 1, "#000000", tip=text)], [Line(0, 0, 1, 1)], [Text(0, 0, text, 9, anchor="end")]
    )
    root = ET.fromstring(to_svg(canvas))
    expected = 'a < b & c > "d"   [0m \u00e9'
    assert root.find(NAME + "text").text == expected
    assert root.find(f"{NAME}rect/{NAME}title").text == expected


def test_pictures_of_many_bars_have_no_tips():
    many = Canvas(10, 10, [Rectangle(0, 0, 1, 1, "#000000", tip="0F0: 0 to 1")] * 5_001)
    assert "title" not in to_svg(many)
