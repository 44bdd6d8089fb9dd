"""Rewards by hand, and errors for invalid reward functions."""

import builtins
import sys

import numpy as np
import pytest
import torch
from make_shapes_model import draw_shapes
from PIL import Image, ImageDraw, ImageFont

from rollcorr.train.flow_grpo import rewards
from rollcorr.train.flow_grpo.images import save_grid
from rollcorr.train.flow_grpo.rewards import edit_distance, make_reward, quoted_text, text_score
from rollcorr.train.flow_grpo.shapes import (
    CLASSES,
    COLORS,
    HELD_OUT_PROMPTS,
    PROMPTS,
    SHAPES,
    TRAINED_PROMPTS,
    background_noise,
    class_of,
    likeness,
    recognized,
    render,
    shape_share,
)


def test_prompt_match_is_1_for_the_picture_0_for_a_blank_one_and_negative_for_another_color():
    center, radius = torch.tensor([[8.0, 8.0]]), torch.tensor([5.0])
    picture, other = (
        (render(torch.tensor([class_of(p)]), center, radius) + 1) / 2 for p in ("a red circle", "a green circle")
    )
    blank = torch.full_like(picture, 0.1)
    reward = make_reward("prompt_match")
    match, nothing, wrong = (float(reward(x, ["a red circle"])) for x in (picture, blank, other))
    assert match == pytest.approx(1, abs=1e-5)
    assert nothing == pytest.approx(0, abs=1e-5)
    assert wrong < -0.5


def test_every_prompt_is_matched_best_by_its_own_pictures():
    classes = torch.arange(len(CLASSES))
    pictures = (draw_shapes(classes, generator=torch.Generator().manual_seed(0)) + 1) / 2
    table = torch.stack([likeness(pictures, torch.full_like(classes, i)) for i in range(len(CLASSES))])
    assert table.argmax(0).tolist() == classes.tolist()
    assert table.diagonal().min() > 0.7
    large = torch.nn.functional.interpolate(pictures, scale_factor=4)
    torch.testing.assert_close(likeness(large, classes), likeness(pictures, classes))


def mean_of_all_shapes(color):
    """The average of the four shapes of a color, in the middle: a blob; and each of them."""
    classes = torch.tensor([class_of(f"a {color} {shape}") for shape in SHAPES])
    pictures = (render(classes, torch.full((4, 2), 8.0), torch.full((4,), 5.0)) + 1) / 2
    return pictures.mean(0, keepdim=True), pictures, classes


def test_the_average_of_all_shapes_earns_a_quarter_of_the_shape_and_a_shape_all_of_it():
    blob, pictures, classes = mean_of_all_shapes("blue")
    assert shape_share(pictures, classes).min() > 0.9
    shares = torch.cat([shape_share(blob, classes[i : i + 1]) for i in range(4)])
    assert float(shares.sum()) == pytest.approx(1, abs=1e-5)

    # Averaged over the four prompts, as in training, the blob earns far less than the shapes do.
    prompts = [f"a blue {shape}" for shape in SHAPES]
    right, average = (
        float(make_reward("color_and_shape")(x, prompts).mean()) for x in (pictures, blob.expand(4, -1, -1, -1))
    )
    assert right > 0.95
    assert average < 0.6
    assert float(make_reward("prompt_match")(blob.expand(4, -1, -1, -1), prompts).mean()) > average + 0.2


def test_the_shape_counts_in_any_color():
    _, red, _ = mean_of_all_shapes("red")
    _, _, blue = mean_of_all_shapes("blue")
    assert shape_share(red, blue).min() > 0.9


def test_fresh_pictures_are_recognized():
    classes = torch.arange(len(CLASSES)).repeat(4)
    pictures = (draw_shapes(classes, generator=torch.Generator().manual_seed(1)) + 1) / 2
    assert (recognized(pictures) == classes).double().mean() > 0.95
    large = torch.nn.functional.interpolate(pictures[:4], scale_factor=4)
    assert recognized(large).tolist() == recognized(pictures[:4]).tolist()


def test_the_noise_of_the_ground_is_that_of_the_outermost_pixels():
    pictures = (draw_shapes(torch.arange(len(CLASSES)), generator=torch.Generator().manual_seed(0)) + 1) / 2
    assert background_noise(pictures) < 0.02
    assert background_noise(torch.full((2, 3, 16, 16), 0.1)) == pytest.approx(0, abs=1e-7)
    assert background_noise(torch.full((2, 3, 16, 16), 0.4)) == pytest.approx(0.3, abs=1e-6)


def test_held_out_prompts_have_every_shape_and_no_color_or_shape_of_their_own():
    assert sorted((*HELD_OUT_PROMPTS, *TRAINED_PROMPTS)) == sorted(PROMPTS)
    assert {class_of(prompt) % len(SHAPES) for prompt in HELD_OUT_PROMPTS} == set(range(len(SHAPES)))
    trained = [CLASSES[class_of(prompt)] for prompt in TRAINED_PROMPTS]
    assert {color for color, _ in trained} == set(COLORS)
    assert {shape for _, shape in trained} == set(SHAPES)


def test_a_prompt_names_one_color_and_one_shape():
    assert [class_of(prompt) for prompt in PROMPTS] == list(range(len(CLASSES)))
    assert class_of("Draw a circle, blue.") == class_of("a blue circle")
    for prompt in ("a red thing", "a red and blue circle"):
        with pytest.raises(ValueError, match="must name one color"):
            class_of(prompt)


def test_color_by_hand():
    images = torch.zeros(2, 3, 2, 2)
    images[0, 0] = 1.0  # red
    images[1, 1, 0] = 0.5  # the upper half is dark green
    assert make_reward("color")(images, ["", ""]).tolist() == [1, -0.125]
    assert make_reward("color", color_name="yellow")(images, ["", ""]).tolist() == [0.5, 0.125]


def test_what_compresses_well_is_worth_more():
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    flat, busy = make_reward("jpeg_compressibility")(torch.cat([torch.full_like(noise, 0.5), noise]), ["", ""])
    assert busy < flat < 0
    assert busy < -1.5  # kB: about one byte per pixel


def test_text_is_scored_by_edit_distance_without_case_and_spaces():
    assert [edit_distance(a, b) for a, b in (("kitten", "sitting"), ("", "abc"), ("abc", "abc"))] == [3, 3, 0]
    assert text_score("say HE LLO", "hello") == 1
    assert text_score("hallo", "hello") == pytest.approx(0.8)
    assert text_score("", "hello") == 0
    assert text_score("something else altogether", "hello") == 0


def test_the_text_to_read_stands_in_quotation_marks():
    assert quoted_text('a sign that says "Open late"') == "Open late"
    assert quoted_text("a sign “Open” here") == "Open"
    with pytest.raises(ValueError, match="no text in quotation marks"):
        quoted_text("a sign")


def test_ocr_reads_what_is_written(monkeypatch):
    """Use the real reader with the extra; without it, a fake that reads the same."""
    picture = Image.new("RGB", (256, 96), "white")
    ImageDraw.Draw(picture).text((20, 20), "HELLO 42", fill="black", font=ImageFont.load_default(size=44))
    try:
        import rapidocr_onnxruntime  # noqa: F401
    except ImportError:
        monkeypatch.setattr(
            rewards, "_ocr_reader", lambda: lambda image: ([[None, "HELLO 42", 0.9]] * int(image.min() < 9), 0)
        )
    drawn = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255
    read = make_reward("ocr")(
        torch.stack([drawn, torch.ones_like(drawn), drawn]), ['"Hello 42"', '"Hello"', '"Jello 42"']
    )
    assert read.tolist() == pytest.approx([1, 0, 6 / 7])


def test_ocr_without_its_extra_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "rapidocr_onnxruntime":
            raise ImportError(name)
        return real(name, *rest)

    rewards._ocr_reader.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"rollcorr\[ocr\]"):
        make_reward("ocr")(torch.zeros(1, 3, 8, 8), ['"x"'])


def test_a_function_of_your_own_by_module_or_file(tmp_path, monkeypatch):
    file = tmp_path / "my_reward.py"
    file.write_text("def bright(images, prompts):\n    return images.mean((1, 2, 3))\nnumber = 3\n")
    images = torch.tensor([0.25, 0.75]).view(2, 1, 1, 1).expand(2, 3, 2, 2)
    assert make_reward("function", function=f"{file}:bright")(images, ["", ""]).tolist() == [0.25, 0.75]
    monkeypatch.syspath_prepend(tmp_path)
    assert make_reward("function", function="my_reward:bright")(images, ["", ""]).tolist() == [0.25, 0.75]
    sys.modules.pop("my_reward")
    for where, message in (
        ("bright", "must be package.module:name or file.py:name"),
        (f"{tmp_path / 'none.py'}:bright", "No such file"),
        (f"{file}:dark", "cannot be loaded: .*dark"),
        ("no_such_package:f", "cannot be loaded"),
        (f"{file}:number", "is int, not a function"),
    ):
        with pytest.raises(ValueError, match=message):
            make_reward("function", function=where)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0]", r"returned \(1,\) for 2 pictures"),
        ("[1.0, float('nan')]", "of 'b' is nan; return a finite number"),
    ],
)
def test_a_reward_is_one_finite_number_a_picture(tmp_path, body, message):
    file = tmp_path / "bad_reward.py"
    file.write_text(f"def judge(images, prompts):\n    return {body}\n")
    with pytest.raises(ValueError, match=message):
        make_reward("function", function=f"{file}:judge")(torch.zeros(2, 3, 2, 2), ["a", "b"])


def test_a_grid_shows_pictures_row_by_row(tmp_path):
    images = torch.stack([torch.full((3, 96, 96), value) for value in (0.0, 0.2, 0.4)])
    save_grid(images, ["", "", ""], tmp_path / "new" / "grid.png")
    with Image.open(tmp_path / "new" / "grid.png") as saved:
        assert saved.size == (2 * 100, 2 * 112)
        assert [saved.getpixel(place)[0] for place in ((30, 30), (130, 30), (30, 142), (130, 142))] == [0, 51, 102, 255]


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (7, 3, 3), (24, 4, 6)])
def test_a_grid_is_about_square_and_enlarges_small_pictures(tmp_path, count, columns, rows):
    save_grid(torch.zeros(count, 3, 16, 16), [""] * count, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as saved:
        assert saved.size == (columns * 100, rows * 112)


def test_a_caption_stands_below_its_picture_and_is_cut_to_its_width(tmp_path):
    images = torch.zeros(2, 3, 16, 16)
    save_grid(images, ["", ""], tmp_path / "plain.png")
    save_grid(images, ["a red circle\nheld out", "a word " * 50], tmp_path / "grid.png")
    with Image.open(tmp_path / "plain.png") as plain, Image.open(tmp_path / "grid.png") as saved:
        assert plain.size == (200, 112)
        assert saved.size == (200, 124)
        pixels = np.asarray(saved.convert("L"))
        blank = np.asarray(plain.convert("L"))
    assert (pixels[2:98, 2:98] == 0).all(), "the picture"
    assert (blank[100:] == 255).all()
    assert (pixels[100:, :98] < 128).any()
    assert (pixels[100:, -2:] == 255).all(), "a long caption ends before the edge"
