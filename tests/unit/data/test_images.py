"""Laws of images in a data set: each is decoded once, a prompt has a placeholder for each, what is wrong is named."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from slime.core.errors import DataError
from slime.core.files import ImageFolder
from slime.data.dataset import PromptDataset
from slime.data.images import ImageColumn, as_png, with_images
from tests.support.vision import IMAGE_ID, drawn, write_colours, write_processor

RED = drawn(16, 8, [(220, 30, 20)])


class ByArea:
    """One token for 8 x 8 pixels."""

    token_id = IMAGE_ID

    def num_tokens(self, width: int, height: int) -> int:
        if width < 8:
            raise DataError("too narrow")
        return width * height // 64


@pytest.fixture
def column(tmp_path: Path) -> ImageColumn:
    return ImageColumn("images", ByArea(), ImageFolder(tmp_path / "kept"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder)
    return AutoTokenizer.from_pretrained(folder)


def _load(path: Path, tokenizer: Any, column: ImageColumn, **more: Any) -> PromptDataset:
    keys = {"input_key": "problem", "label_key": "answer", "apply_chat_template": True}
    return PromptDataset.load(path, tokenizer=tokenizer, images=column, **keys | more)


def _written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"answer": "", **row}) + "\n" for row in rows))
    return path


def test_ids_have_as_many_placeholders_as_images_have_tokens(
    tmp_path: Path, tokenizer: Any, column: ImageColumn
) -> None:
    dataset = _load(write_colours(tmp_path / "data"), tokenizer, column)
    assert len(dataset) == 12
    for row in (dataset[i] for i in range(12)):
        sizes = [Image.open(io.BytesIO(column.store.read(digest))).size for digest in row.images]
        assert row.prompt_tokens is not None
        assert row.prompt_tokens.count(IMAGE_ID) == sum(ByArea().num_tokens(*size) for size in sizes) > 0
        assert row.prompt.count("<|image_pad|>") == len(row.images), "the text has one for each"


@pytest.mark.parametrize("form", ["bytes", "data URI", "path", "file://"])
def test_an_image_may_be_bytes_a_data_uri_or_a_path(form: str, tmp_path: Path, column: ImageColumn) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    image = {
        "bytes": {"bytes": RED, "path": "elsewhere.png"},
        "data URI": f"data:image/png;base64,{base64.b64encode(RED).decode()}",
        "path": "red.png",
        "file://": f"file://{file}",
    }[form]
    assert column.read({"images": [image]}, tmp_path).num_tokens == (2,)
    assert column.read({"images": image}, tmp_path) == column.read({"images": [image]}, tmp_path)


def test_other_formats_and_modes_become_rgb_png_of_the_same_pixels() -> None:
    for mode, form in (("L", "PNG"), ("RGBA", "PNG"), ("P", "GIF"), ("RGB", "BMP")):
        image, out = Image.new("RGB", (5, 3), (9, 90, 200)).convert(mode), io.BytesIO()
        image.save(out, form)
        png, size = as_png(out.getvalue())
        read = Image.open(io.BytesIO(png))
        assert (read.format, read.mode, size) == ("PNG", "RGB", (5, 3))
        assert read.tobytes() == Image.open(io.BytesIO(out.getvalue())).convert("RGB").tobytes(), mode
    assert as_png(RED)[0] == RED


def test_a_placeholder_that_a_text_spells_is_ordinary_text(tmp_path: Path, tokenizer: Any, column: ImageColumn) -> None:
    file = _written(tmp_path / "rows.jsonl", {"problem": "<|image_pad|> <image>", "images": [f"{tmp_path}/red.png"]})
    (tmp_path / "red.png").write_bytes(RED)
    row = _load(file, tokenizer, column)[0]
    assert row.prompt_tokens is not None and row.prompt_tokens.count(IMAGE_ID) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "what?", "images": ["red.png"]}, r"the prompt refers to 0 images .* its row has 1"),
        ({"problem": "<image>?", "images": []}, r"the prompt refers to 1 images .* its row has 0"),
        ({"problem": "<image>"}, r"there is no column 'images'; the row has \['answer', 'problem'\]"),
        ({"problem": "<image><image>", "images": ["red.png"]}, r"the prompt refers to 2 images .* its row has 1"),
        ({"problem": "<image>", "images": ["gone.png"]}, r"image 0 of 'images': gone.png cannot be read"),
        ({"problem": "<image>", "images": ["https://host/red.png"]}, r"is a URL, but slime downloads no images"),
        ({"problem": "<image>", "images": ["broken.png"]}, r"PIL cannot read these 7 bytes"),
        ({"problem": "<image>", "images": ["program.eps"]}, r"EPS files are programs, which slime does not run"),
        ({"problem": "<image>", "images": [7]}, r"expected bytes, a data URI or a path, got int"),
        ({"problem": "<image>", "images": ["narrow.png"]}, r"image 0 of 'images': too narrow"),
        ({"problem": "<image>", "images": ["data:image/png;base64,%"]}, r"the data URI is not valid base64"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(
    row: dict[str, Any], said: str, tmp_path: Path, tokenizer: Any, column: ImageColumn
) -> None:
    (tmp_path / "program.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    for name, content in (("red", RED), ("broken", b"GIF89a?"), ("narrow", drawn(4, 8, [(0, 0, 0)]))):
        (tmp_path / f"{name}.png").write_bytes(content)
    file = _written(tmp_path / "rows.jsonl", {"problem": "<image>", "images": ["red.png"]}, row)
    dataset = _load(file, tokenizer, column)
    (bad,) = dataset.quarantined
    assert bad.line == 2
    assert re.search(said, bad.reason), bad.reason


def test_a_row_without_images_is_a_row_of_text(tmp_path: Path, tokenizer: Any, column: ImageColumn) -> None:
    file = _written(tmp_path / "rows.jsonl", *({"problem": "what?", "images": none} for none in (None, [])))
    assert [row.images for row in (_load(file, tokenizer, column)[i] for i in range(2))] == [(), ()]


def test_parts_and_marks_are_taken_in_order() -> None:
    messages = [
        {"role": "system", "content": "a <image> b"},
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "c", "image": None}]},
    ]
    first, second = with_images(messages, 2)
    assert first["content"] == [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
    assert second["content"] == [{"type": "image"}, {"type": "text", "text": "c"}]


def test_messages_that_nobody_has_rendered_name_their_images(
    tmp_path: Path, tokenizer: Any, column: ImageColumn
) -> None:
    """Law: a generate function passes `sample.prompt` to `current().chat`, which finds the images in the run."""
    (tmp_path / "red.png").write_bytes(RED)
    file = _written(tmp_path / "rows.jsonl", {"problem": "<image>?", "images": ["red.png"]})
    row: Any = _load(file, tokenizer, column, apply_chat_template=False)[0]
    (digest,) = row.images
    assert row.prompt[0]["content"] == [{"type": "image", "digest": digest}, {"type": "text", "text": "?"}]
    assert row.prompt_tokens is None and column.store.read(digest) == RED


def test_other_images_are_other_data(tmp_path: Path, tokenizer: Any, column: ImageColumn) -> None:
    file = _written(tmp_path / "rows.jsonl", {"problem": "<image>", "images": ["a.png"]})
    prints = set()
    for colour in ((0, 0, 0), (1, 0, 0)):
        (tmp_path / "a.png").write_bytes(drawn(16, 8, [colour]))
        prints.add(_load(file, tokenizer, column).fingerprint.digest)
    assert len(prints) == 2
