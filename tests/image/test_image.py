"""Pictures from files to prompts, and the command that takes them."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from PIL import Image
from words import word_tokenizer

import flaxen
from flaxen.cli import main
from flaxen.core.errors import CheckpointError, InputError
from flaxen.image import image_processor, open_picture, pictured_prompt

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for p in m.content %}"
    "{% if p.type == 'image' %}w120 {% else %}{{ p.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
SQUARE = {"size": {"height": 16, "width": 16}}
PROCESSORS = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 512,
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 4, "width": 4},
        "size": {"longest_edge": 32},
    },
}


def seeing_folder(name, path):
    """A golden case with a tokenizer, a chat template and an image processor beside it."""
    folder = golden.write_folder(golden.case(name), path)
    tok = word_tokenizer(128)
    words = ["w120", "w121", "w122", "[IMG_BREAK]", "[IMG_END]"]
    tok.add_special_tokens({"additional_special_tokens": words})
    template = TEMPLATE.replace("w120", "w121") if name == "gemma3" else TEMPLATE
    tok.chat_template = template
    tok.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder


def test_grey_levels_of_16_bits_are_scaled_and_of_32_refused(tmp_path):
    levels = np.array([[0, 257, 32896, 65535]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    got = np.asarray(open_picture(tmp_path / "grey.png"))
    np.testing.assert_array_equal(got, np.array([0, 1, 128, 255])[None, :, None].repeat(3, 2))
    for kind in (np.int32, np.float32):
        Image.fromarray(levels.astype(kind)).save(tmp_path / "grey.tiff")
        with pytest.raises(InputError, match="32-bit numbers"):
            open_picture(tmp_path / "grey.tiff")


@pytest.fixture
def picture(tmp_path):
    pixels = (np.random.default_rng(0).random((20, 28, 3)) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_a_picture_is_read_upright_and_in_colour(tmp_path):
    grey = Image.new("L", (4, 2))
    exif = grey.getexif()
    exif[0x0112] = 6  # turned by a quarter
    grey.save(tmp_path / "grey.jpg", exif=exif)
    found = open_picture(tmp_path / "grey.jpg")
    assert found.mode == "RGB" and found.size == (2, 4)


def test_what_is_no_picture_is_refused(tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(InputError, match="is no picture"):
        open_picture(tmp_path / "text.png")
    with pytest.raises(InputError, match="No such file"):
        open_picture(tmp_path / "absent.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:60])
    with pytest.raises(InputError, match="cannot be read as a picture"):
        open_picture(tmp_path / "cut.png")


def test_a_folder_that_says_nothing_of_pictures(tmp_path):
    with pytest.raises(CheckpointError, match="says nothing of pictures"):
        image_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="No image processor can be made"):
        image_processor(tmp_path)


EXPECTED = {"llava": 16, "gemma3": 4, "qwen2_vl": 2 * 4, "mistral3": 3 * 4}
"""How many places one picture of 20 x 28 pixels has."""


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_prompt_has_places_for_what_the_model_makes_of_its_pictures(name, tmp_path, picture):
    folder = seeing_folder(name, tmp_path / name)
    model, tok = flaxen.load(folder), flaxen.tokenizer(folder)
    processor, images = image_processor(folder), [open_picture(picture)] * 2
    ids, given = pictured_prompt(model, tok, processor, images, "a b")
    assert ids.count(120) == 2 * EXPECTED[name]
    assert ids[-1] == 8 and ids[-3:-1] == [4, 5]
    sight, count = model.module.see(np.array([ids]), None, given, model.runtime)
    assert count == ids.count(120) and sight.which.max() == count - 1
    if name == "gemma3":
        assert ids.count(121) == ids.count(122) == 2
    if name == "mistral3":
        assert ids.count(tok.convert_tokens_to_ids("[IMG_BREAK]")) == 2 * (3 - 1)
        assert ids.count(tok.convert_tokens_to_ids("[IMG_END]")) == 2
    raw, _ = pictured_prompt(model, tok, processor, images[:1], "a b", raw=True)
    assert raw.count(120) == EXPECTED[name] and raw[-2:] == [4, 5]


def test_a_template_that_knows_no_pictures_is_refused(tmp_path, picture):
    folder = seeing_folder("llava", tmp_path / "llava")
    model, tok = flaxen.load(folder), flaxen.tokenizer(folder)
    tok.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(InputError, match="0 places for pictures"):
        pictured_prompt(model, tok, image_processor(folder), [open_picture(picture)], "a")


def test_the_command_sees(tmp_path, picture, capsys):
    folder = seeing_folder("llava", tmp_path / "llava")
    ask = ["generate", str(folder), "a b", "--max-tokens", "3", "--json"]
    assert main([*ask, "--image", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prompt_tokens"] == 1 + 16 + 2 + 1
    model, tok = flaxen.load(folder), flaxen.tokenizer(folder)
    processor, images = image_processor(folder), [open_picture(picture)]
    ids, given = pictured_prompt(model, tok, processor, images, "a b")
    want = model.generate(np.array([ids]), **given, max_new_tokens=3)[0, len(ids) :]
    assert told["text"].split() == [f"w{i}" for i in want]
    assert main([*ask, "--image", str(tmp_path / "absent.png")]) == 2
    assert "absent.png" in capsys.readouterr().err


def test_the_command_says_that_a_model_takes_no_pictures(tmp_path, picture, capsys):
    folder = golden.write_folder(golden.case("qwen3"), tmp_path / "qwen3")
    word_tokenizer(128).save_pretrained(folder)
    assert main(["generate", str(folder), "a", "--raw", "--image", str(picture)]) == 2
    assert "takes no pictures" in capsys.readouterr().err
