import shutil
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data import ImageFolder, UnreadableImageError
from recipes.data.image_folder import MEAN, STD, read_image
from tests.parity import Classifier
from tests.support import make_trainer

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def root(tmp_path):
    """PNG files of one colour: four a class to train on, two to validate, one to test; wider than high."""
    for split, count in (("train", 4), ("val", 2), ("test", 1)):
        for name, colour in COLOURS.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 30), colour).save(folder / f"{i}.png")
    return tmp_path


def folder(root, **options):
    small = {"num_classes": 3, "batch_size": 4, "num_workers": 0, "resize_size": 24, "crop_size": 16}
    return ImageFolder(root, **small | options)


def test_batches(root):
    module = folder(root)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert len(batches) == 3
    for images, labels in batches:
        colour = torch.tensor([list(COLOURS.values())[label] for label in labels]) / 255
        expected = (colour - torch.tensor(MEAN)) / torch.tensor(STD)
        assert torch.allclose(images, expected.view(4, 3, 1, 1).expand(4, 3, 16, 16), atol=1e-5)
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0] * 4 + [1] * 4 + [2] * 4

    module.setup("test")
    assert [labels.tolist() for _, labels in module.val_dataloader()] == [[0, 0, 1, 1], [2, 2]]
    assert [labels.tolist() for _, labels in module.test_dataloader()] == [[0, 1, 2]]
    assert module.classes == ["blue", "green", "red"]


def test_any_kind_of_image_has_three_channels_of_8_bits(tmp_path):
    grey = np.array([[0, 256, 0x7FFF], [0x8000, 0xFF00, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey16.png")
    Image.fromarray(grey).save(tmp_path / "grey16.tiff")
    for name in ("grey16.png", "grey16.tiff"):
        image = read_image(tmp_path / name)
        assert image.mode == "RGB"
        assert np.asarray(image)[..., 1].tolist() == [[0, 1, 127], [128, 255, 255]]
    Image.new("CMYK", (4, 2), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100)
    assert np.asarray(read_image(tmp_path / "print.jpg"))[0, 0].tolist() == pytest.approx([255, 0, 0], abs=3)
    red, blue = (Image.new("RGB", (4, 2), COLOURS[name]) for name in ("red", "blue"))
    red.save(tmp_path / "film.gif", save_all=True, append_images=[blue])
    assert read_image(tmp_path / "film.gif").getpixel((0, 0)) == COLOURS["red"]
    Image.new("LA", (4, 2), (100, 0)).save(tmp_path / "glass.png")
    assert read_image(tmp_path / "glass.png").getpixel((0, 0)) == (100, 100, 100)

    Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(UnreadableImageError, match=r"float.tiff cannot be read .* pixels of 32 bits, mode 'F'"):
        read_image(tmp_path / "float.tiff")


def test_evaluation_resizes_the_shorter_side_then_crops_the_centre(root):
    flag = Image.new("RGB", (40, 20), COLOURS["red"])
    flag.paste(COLOURS["blue"], (0, 0, 16, 20))
    flag.save(root / "val" / "red" / "0.png")
    module = folder(root, resize_size=10, crop_size=10, mean=(0, 0, 0), std=(1, 1, 1))
    module.setup("validate")

    image, label = module.splits["val"][4]
    assert label == 2
    assert image[2, :, :2].min() > 0.9  # seen are columns 10 to 29 of 40
    assert image[0, :, 4:].min() > 0.9


def test_predict_needs_no_classes_and_numbers_the_images(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split)
    flat = root / "flat"
    (flat / ".thumbs").mkdir(parents=True)
    for name in ("b.png", "a.JPG", ".hidden.png", ".thumbs/c.png", "notes.txt"):
        Image.new("RGB", (40, 30)).save(flat / name, format="png")
    for place, expected in ((root, ["blue/0.png", "green/0.png", "red/0.png"]), (flat, ["a.JPG", "b.png"])):
        module = folder(place)
        module.setup("predict")
        (batch,) = module.predict_dataloader()
        assert batch[1].tolist() == list(range(len(expected)))
        paths = [path for path, _ in module.splits["predict"].samples]
        assert [path.endswith(name) for path, name in zip(paths, expected, strict=True)] == [True] * len(expected)
        assert module.classes == []


@pytest.mark.parametrize("has_train", [True, False])
def test_fraction_is_held_out_of_each_class(root, has_train):
    for split in ("val", "test"):
        shutil.rmtree(root / split)
    module, again = (folder(root if has_train else root / "train", val_fraction=0.25) for _ in range(2))
    module.setup("fit")
    again.setup("validate")
    train, val = module.splits["train"].samples, module.splits["val"].samples
    assert (len(train), [label for _, label in val]) == (9, [0, 1, 2])
    assert len({path for path, _ in train + val}) == 12
    assert again.splits["val"].samples == val
    if has_train:
        with pytest.raises(FileNotFoundError, match="test"):
            module.setup("test")
    else:
        module.setup("test")
        assert module.splits["test"].samples == val


def test_class_may_have_the_name_of_a_split(root):
    vehicles = root / "vehicles"
    for name in ("train", "plane"):
        shutil.copytree(root / "train" / "red", vehicles / name)
    module = folder(vehicles, num_classes=None)
    module.setup("fit")
    assert module.classes == ["plane", "train"]


def test_folders_and_settings_that_do_not_fit_are_refused(root):
    def refuses(message, place=root, stage="fit", **options):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            folder(place, **options).setup(stage)

    refuses("no class folders", root / "val" / "red")
    refuses(r"num_classes is 10.*data.num_classes=3", num_classes=10)
    refuses("val_fraction=1", val_fraction=1)
    refuses("on_error='ignore', expected 'raise' or 'skip'", on_error="ignore")
    for image in (green := root / "val" / "green").iterdir():
        image.unlink()
    refuses("val has no images of green")
    green.rename(root / "val" / "pink")
    refuses(r"missing \['green'\], unknown \['pink'\]")
    shutil.rmtree(root / "test")
    refuses(f"There is no folder {root / 'test'}", stage="test")


# --- files that are no images ---------------------------------------------------------------------------------


def noise(kind):
    file = BytesIO()
    Image.effect_noise((40, 30), 50).convert("RGB").save(file, kind, quality=95)
    return bytearray(file.getvalue())


TEXT, CUT_SHORT, BROKEN_PNG = b"<html>404 Not Found</html>", noise("jpeg")[:400], noise("png")
BROKEN_PNG[len(BROKEN_PNG) // 2] ^= 0xFF


@pytest.mark.parametrize("content", [CUT_SHORT, b"", TEXT, BROKEN_PNG], ids=["cut short", "empty", "text", "broken"])
def test_unreadable_image_is_named_or_skipped(root, content):
    bad = root / "val" / "green" / "bad.jpg"
    bad.write_bytes(content)
    module = folder(root)
    module.setup("validate")
    with pytest.raises(UnreadableImageError) as caught:
        list(module.val_dataloader())
    assert str(bad) in str(caught.value)
    module = folder(root, on_error="skip")
    module.setup("validate")
    assert [labels.tolist() for _, labels in module.val_dataloader()] == [[0, 0, 1, 1], [2, 2]]


def test_batch_of_unreadable_images_raises(root):
    for i in range(2):
        (root / "val" / "blue" / f"{i}.png").write_bytes(TEXT)
    module = folder(root, on_error="skip", batch_size=2)
    module.setup("validate")
    with pytest.raises(UnreadableImageError, match="None of the 2 files of a batch"):
        list(module.val_dataloader())


def test_errors_of_the_system_always_raise(root):
    module = folder(root, on_error="skip")
    module.setup("validate")
    (root / "val" / "green" / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"green/0\.png"):
        list(module.val_dataloader())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_run_lists_once_which_were_left_out(root, num_workers):
    bad = [root / "train" / "blue" / "3.png", root / "train" / "red" / "1.png", root / "val" / "green" / "x.jpg"]
    for path, content in zip(bad, (TEXT, TEXT, CUT_SHORT), strict=True):
        path.write_bytes(content)
    sizes = []
    module = Classifier()
    module.loss = lambda batch: sizes.append(len(batch[1])) or module.net[0].weight.sum()
    trainer = make_trainer(root, max_epochs=2, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="cannot be read") as caught:
        trainer.fit(module, datamodule=folder(root, on_error="skip", num_workers=num_workers))
    lines = [str(one.message) for one in caught if "cannot be read" in str(one.message)]
    assert len(lines) == 1
    assert lines[0].startswith("3 of 19 images cannot be read")
    assert lines[0].endswith(f": {bad[0]}, {bad[1]}, {bad[2]}.")
    assert sum(sizes) == 2 * (10 + 6)  # trained, and validated
