"""A small data set of images that scikit-learn ships, as files that `image_classification.py` reads like any other.

`python recipes/tiny_images.py` writes `train.parquet` and `validation.parquet`, 1,797 handwritten digits of 8 x 8
pixels (UCI Optical Recognition of Handwritten Digits), and a `processor/`, which says how a model reads them. They test
that recipes learn.
"""

import json
import os
from pathlib import Path

import stdlib_text
from optional import require
from PIL import Image
from transformers import AutoImageProcessor

datasets = require("datasets", "recipes")
sklearn = require("sklearn", "recipes")
from sklearn.datasets import load_digits  # noqa: E402

HELD_OUT = 5  # every 5th image is validation
# The columns of ILSVRC/imagenet-1k.
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*"0123456789"])})
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 8, "width": 8},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def prepare(directory: str | os.PathLike) -> Path:
    """Write `train.parquet`, `validation.parquet` and `processor` into `directory`, made if absent, and return it,
    unless they are there already."""
    directory = Path(directory)
    settings = {"sklearn": sklearn.__version__}
    if stdlib_text.is_finished(directory, settings):
        return directory
    digits = load_digits()
    rows = [
        # Pixels are from 0 to 16.
        {"image": Image.fromarray((pixels * 255 / 16).round().astype("uint8")), "label": int(label)}
        for pixels, label in zip(digits.images, digits.target)
    ]
    splits = {"validation": rows[::HELD_OUT], "train": [row for i, row in enumerate(rows) if i % HELD_OUT]}
    for split, chosen in splits.items():
        datasets.Dataset.from_list(chosen, features=FEATURES).to_parquet(directory / f"{split}.parquet")
    (directory / "processor").mkdir(exist_ok=True)
    stdlib_text.replace_file(directory / "processor" / "preprocessor_config.json", json.dumps(PROCESSOR))
    AutoImageProcessor.from_pretrained(directory / "processor").save_pretrained(directory / "processor")
    counts = {split: len(chosen) for split, chosen in splits.items()}
    stdlib_text.finish(directory, settings, counts)
    return directory


if __name__ == "__main__":
    stdlib_text.prepare_by_flags(prepare, "runs/tiny_images", __doc__)
