"""Image classification: the small data set, crops and mixed images on literal numbers, and the recipe."""

from functools import partial

import image_classification
import pytest
import torch
from datasets import ClassLabel, load_dataset
from PIL import Image
from recipe_runs import results, toy_flags
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer

from hf_sparse24 import Sparse24Trainer, sparse_weights

pytestmark = pytest.mark.usefixtures("metrics_cache")
flags = partial(toy_flags, "image_classification")


def test_random_crops_have_the_size_and_hold_the_area():
    image = Image.new("L", (40, 30))
    for x in range(40):
        for y in range(30):
            image.putpixel((x, y), x)  # a pixel says in which column it is
    torch.manual_seed(0)
    widths = []
    for _ in range(50):
        crop = image_classification.random_crop(image, 0.25, 16)
        assert crop.size == (16, 16) and crop.mode == "RGB"
        columns = [crop.getpixel((x, 8))[0] for x in (0, 15)]
        widths.append(columns[1] - columns[0])
    # A quarter to all of 1200 pixels, 3:4 to 4:3: 15 to 40 columns, less the halves of 16 that are wide at both ends.
    assert 12 <= min(widths) < 20 and 33 < max(widths) <= 40


def test_mixed_images_have_labels_by_their_shares():
    torch.manual_seed(0)
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8)
    labels = torch.arange(4)
    shares, own = [], []
    for _ in range(2000):
        mixed, mixed_labels = image_classification.mix(images, labels, 0.8, 0.0)
        # Of images 0 and 3, share * 0 + (1 - share) * 3.
        shares.append(1 - mixed[0, 0, 0, 0].item() / 3)
        assert mixed[0].unique().numel() == 1 and {*mixed_labels.tolist()} <= {0, 1, 2, 3}
        assert mixed_labels[0] in (0, 3) and mixed_labels[1] in (1, 2)
        own.append((mixed_labels == labels).float().mean().item())
    shares, own = torch.tensor(shares), torch.tensor(own)
    assert shares.min() >= 0 and shares.max() <= 1 and abs(shares.mean() - 0.5) < 0.03
    assert torch.corrcoef(torch.stack([shares, own]))[0, 1] > 0.7 and abs((own - shares).mean()) < 0.02
    assert image_classification.mix(images, labels, 0.0, 0.0) == (images, labels)


@pytest.mark.parametrize("method", ["dense", "s-ste", "step"])
def test_trains_evaluates_and_saves(digits, tmp_path, method):
    settings = {"max_steps": 3, "max_samples": 64, "per_device_train_batch_size": 16, "flip": True}
    trainer = image_classification.main(flags(digits, tmp_path / "out", method=method, **settings))
    assert type(trainer) is (Trainer if method == "dense" else Sparse24Trainer)
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == dict(enumerate("0123456789")) and saved.config.image_size == 8
    assert len(sparse_weights(saved)) == (0 if method == "dense" else 2)
    found = results(tmp_path / "out")
    assert {"eval_accuracy", "eval_loss", "train_loss"} <= found.keys() and 0 <= found["eval_accuracy"] <= 1
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixels = processor(load_dataset(str(digits))["validation"][0]["image"].convert("RGB"), return_tensors="pt")
    assert saved(**pixels).logits.shape == (1, 10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "s-ste"])
def test_learns(digits, tmp_path, method):
    """A tenth of the digits are of each class."""
    trainer = image_classification.main(flags(digits, tmp_path / "out", method=method, num_train_epochs=20))
    assert trainer.state.epoch == 20 and results(tmp_path / "out")["eval_accuracy"] > 0.6


def test_goes_on_from_a_checkpoint_with_other_classes(digits, tmp_path):
    """Its method goes on, and its head is a fresh one."""
    image_classification.main(flags(digits, tmp_path / "first", max_samples=64, max_steps=1))
    rows = load_dataset(str(digits))["train"].take(64)
    rows = rows.map(lambda row: {"label": row["label"] % 3}).cast_column("label", ClassLabel(names=["a", "b", "c"]))
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "other" / f"{split}.parquet")
    again = [
        f"--model_name_or_path={tmp_path / 'first'}",
        f"--dataset={tmp_path / 'other'}",
        f"--output_dir={tmp_path / 'out'}",
        *("--max_steps=1", "--use_cpu=true", "--report_to=none", "--disable_tqdm=true", "--save_strategy=no"),
    ]
    trainer = image_classification.main(again)
    assert trainer.model.classifier.out_features == 3 and len(sparse_weights(trainer.model)) == 2
