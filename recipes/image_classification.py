"""Train an image classifier of Transformers 2:4 sparse, from scratch or from pretrained weights, and evaluate it.

    accelerate launch recipes/image_classification.py recipes/pretrain/deit-tiny.yaml             # ImageNet
    python recipes/image_classification.py recipes/pretrain/deit-tiny.yaml recipes/pretrain/deit-toy.yaml  # a minute

`--method dense` is the control run. A 2:4 checkpoint stays as it is saved: its method goes on.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import SparseArguments, UsageError, check_splits, check_toy_data, parse_arguments
from models import ImageModelArguments, load_model
from optional import require
from running import checkpoint_to_resume, leave, run, save_metrics, sparse_or_dense_trainer, train_and_save
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

datasets = require("datasets", "recipes")
evaluate = require("evaluate", "recipes")
Image = require("PIL.Image", "recipes")

METRIC = Path(__file__).resolve().parent / "metrics" / "accuracy.py"
ASPECTS = (3 / 4, 4 / 3)  # width over height of a random crop


@dataclass
class ImageArguments:
    dataset: str = field(
        default="ILSVRC/imagenet-1k",
        metadata={"help": "A name on the Hub, or a directory: Parquet files, or train/CLASS/*.png, validation/..."},
    )
    validation_split: str = field(default="validation", metadata={"help": "Split to evaluate on."})
    image_column: str = field(default="image", metadata={"help": "Column that holds the images."})
    label_column: str = field(default="label", metadata={"help": "Column that holds the classes."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many images of each split at most."})
    smallest_crop: float = field(
        default=1.0,
        metadata={"help": "Train on random crops of at least this share of an image; 1: on what evaluation sees."},
    )
    flip: bool = field(default=False, metadata={"help": "Mirror half of the images to train on."})
    mixup: float = field(default=0.0, metadata={"help": "alpha of mixup; 0: none."})
    cutmix: float = field(default=0.0, metadata={"help": "alpha of CutMix; 0: none. With mixup, in half of the steps."})

    def __post_init__(self):
        if not 0 < self.smallest_crop <= 1:
            raise UsageError(f"smallest_crop={self.smallest_crop}: must be above 0 and at most 1")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 0")


ARGUMENTS = (ImageModelArguments, ImageArguments, SparseArguments, TrainingArguments)


def make_datasets(args: ImageArguments, processor) -> tuple[datasets.Dataset, datasets.Dataset, list[str]]:
    """Images to train and to evaluate on, which become tensors when they are read, and the names of the classes."""
    splits = datasets.load_dataset(args.dataset)
    check_splits(args.dataset, splits, "train", args.validation_split)
    train, held_out = splits["train"], splits[args.validation_split]
    missing = sorted({args.image_column, args.label_column} - {*train.column_names})
    if missing:
        raise UsageError(f"{args.dataset} lacks the columns {missing}; it has {train.column_names}")
    classes = train.features[args.label_column]
    if not isinstance(classes, datasets.ClassLabel):
        raise UsageError(
            f"label_column={args.label_column!r}: holds {classes}, no classes; cast it to datasets.ClassLabel"
        )
    if args.max_samples is not None:
        train, held_out = train.take(args.max_samples), held_out.take(args.max_samples)
    size = image_size(processor)

    def tensors(images: list, labels: list[int], **how: bool) -> tuple[Tensor, Tensor]:
        images = [image.convert("RGB") for image in images]
        return processor(images, return_tensors="pt", **how)["pixel_values"], torch.tensor(labels)

    def to_evaluate(batch: dict[str, list]) -> dict[str, Tensor]:
        pixels, labels = tensors(batch[args.image_column], batch[args.label_column])
        return {"pixel_values": pixels, "labels": labels}

    def to_train(batch: dict[str, list]) -> dict[str, Tensor]:  # a whole batch: `datasets` reads its rows together
        images, labels = batch[args.image_column], batch[args.label_column]
        if args.smallest_crop < 1:
            crops = [random_crop(image, args.smallest_crop, size) for image in images]
            pixels, labels = tensors(crops, labels, do_resize=False, do_center_crop=False)
        else:
            pixels, labels = tensors(images, labels)
        if args.flip:
            mirrored = torch.rand(len(pixels)) < 0.5
            pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
        pixels, labels = mix(pixels, labels, args.mixup, args.cutmix)
        return {"pixel_values": pixels, "labels": labels}

    return train.with_transform(to_train), held_out.with_transform(to_evaluate), classes.names


def image_size(processor) -> int:
    """Height, which is the width, of the images that a processor gives to the model."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    return size["height"] or size["shortest_edge"]


def random_crop(image: Any, smallest: float, size: int):
    """A part of an image with a random area, shape and place, as `size` x `size` pixels (Szegedy et al. 2015)."""
    width, height = image.size
    share = torch.empty(()).uniform_(smallest, 1).item()
    aspect = math.exp(torch.empty(()).uniform_(*map(math.log, ASPECTS)).item())
    wide = min(width, round(math.sqrt(share * width * height * aspect)))
    high = min(height, round(math.sqrt(share * width * height / aspect)))
    left, top = (int(torch.randint(spare + 1, ())) for spare in (width - wide, height - high))
    box = (left, top, left + wide, top + high)
    return image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box=box)


def mix(images: Tensor, labels: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Images that are mixed with another of the batch, by mixup or CutMix, each with the label of one of the two.

    The label is drawn by the two images' shares, so that the expected loss is that of the mixed labels of the papers
    (arXiv 1710.09412, 1905.04899); a loss with mixed labels would be one of our own, and the Trainer has one.
    """
    if not (mixup or cutmix):
        return images, labels
    cut = not mixup or bool(cutmix and torch.rand(()) < 0.5)
    share = torch.distributions.Beta(*[torch.tensor(cutmix if cut else mixup)] * 2).sample().item()
    others = images.flip(0)
    if cut:
        height, width = images.shape[-2:]
        edges = []
        for length in (height, width):
            middle, half = int(torch.randint(length, ())), int(length * math.sqrt(1 - share) / 2)
            edges.append((max(middle - half, 0), min(middle + half, length)))
        (top, bottom), (left, right) = edges
        images = images.clone()
        images[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        images = share * images + (1 - share) * others
    return images, torch.where(torch.rand(len(labels)) < share, labels, labels.flip(0))


def make_metrics():
    """What a Trainer calls with predicted classes: their accuracy."""
    metric = evaluate.load(str(METRIC), keep_in_memory=True, experiment_id=str(os.getpid()))

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        return metric.compute(predictions=prediction.predictions, references=prediction.label_ids)

    return compute


def make_trainer(
    model_args: ImageModelArguments,
    image_args: ImageArguments,
    sparse_args: SparseArguments,
    training_args: TrainingArguments,
) -> Trainer:
    set_seed(training_args.seed)
    processor = AutoImageProcessor.from_pretrained(model_args.image_processor_name or model_args.model_name_or_path)
    with training_args.main_process_first(desc="loading images"):
        train, held_out, classes = make_datasets(image_args, processor)
    head: dict[str, Any] = {"id2label": dict(enumerate(classes))}
    head["label2id"] = {name: number for number, name in head["id2label"].items()}
    if model_args.model_name_or_path is not None:
        head["ignore_mismatched_sizes"] = True  # a head for other classes is a fresh one, of which Transformers warns
    fresh = {"image_size": image_size(processor)}
    config = sparse_args.make_config()
    model = load_model(model_args, AutoModelForImageClassification, training_args, config, fresh, **head)
    training_args.remove_unused_columns = False  # the images, which become tensors when they are read
    return sparse_or_dense_trainer(
        sparse_args,
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=make_metrics(),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    resume = checkpoint_to_resume(arguments[-1])  # before anything is loaded
    trainer = make_trainer(*arguments)
    train_and_save(trainer, resume)
    save_metrics(trainer, "eval", trainer.evaluate())
    return trainer


if __name__ == "__main__":
    leave(run(main))
