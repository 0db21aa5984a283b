"""Make an ordinary checkpoint of a `sparse-24-bitmask` one, which compressed-tensors 0.9 to 0.14 wrote.

    python recipes/convert_bitmask.py checkpoint rescued

compressed-tensors 0.15 and vLLM have dropped the format. Of each sparse weight `NAME.weight` `[out, in]` its files have

    NAME.compressed  [out, in / 2]        the kept values of each row, in order, in the dtype of the weight
    NAME.bitmask     [out, ceil(in / 8)]  uint8; bit i % 8 of byte i // 8 says whether column i is kept: two of four are
    NAME.shape       [2, 1]               out and in

or these three as `NAME.weight.compressed` and so on. The result has the same weights bit for bit; quantized values
(FP8, int8) stay quantized. The new directory appears when all of it is written.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

BITMASK = "sparse-24-bitmask"
PARTS = ("compressed", "bitmask", "shape")
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def convert(source: Path, directory: Path) -> list[str]:
    """Write the checkpoint in `source` to a new `directory`; return the names of its sparse layers.

    Raises:
        ValueError: `source` has another format or damaged tensors, or `directory` exists. Nothing is written then.
        OSError: a file of `source` is missing or cut short.
    """
    config, is_bitmask = dense_config(source)
    part = directory.with_name(f"{directory.name}.part")
    for path in (directory, part):
        if path.exists():
            raise ValueError(f"{path} exists: remove it, or name a new directory")
    files, weight_map, sparse = open_files(source), {}, []
    names = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118  not a dict
    part.mkdir(parents=True)
    try:
        for path, file in files.items():  # one file of tensors is in memory at a time
            tensors: dict[str, Tensor] = {}
            for name in file.keys():  # noqa: SIM118  not a dict
                module, _, kind = name.rpartition(".")
                if not is_bitmask or kind not in PARTS:
                    tensors[name] = finite(f"{path}: {name}", file.get_tensor(name))
                elif kind == "bitmask" or f"{module}.bitmask" not in names:  # once for the three parts
                    sparse.append(module.removesuffix(".weight"))
                    tensors[f"{sparse[-1]}.weight"] = dense_weight(f"{path}: {module}", names, module)
            save_file(tensors, part / path.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, path.name)
        if is_bitmask and not sparse:
            raise ValueError(f"{source} has no weights in {BITMASK}: no tensor's name ends with .bitmask")
        if (source / INDEX).exists():
            index = {"metadata": {}, "weight_map": weight_map}
            (part / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in source.iterdir():  # of the tokenizer, and others
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (CONFIG, INDEX):
                shutil.copyfile(path, part / path.name)
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sparse


def dense_config(source: Path) -> tuple[dict[str, Any], bool]:
    """The dense checkpoint's config, and whether `source` has bitmasks."""
    path = source / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    said = [config.pop(key, None) for key in ("quantization_config", "compression_config")]
    quantization = next((each for each in said if isinstance(each, dict)), {})
    sparsity = quantization.pop("sparsity_config", None)
    if not isinstance(sparsity, dict) or not sparsity:
        raise ValueError(f"{path} has no sparsity_config of compressed-tensors, so there is nothing to convert")
    format = "marlin-24" if "marlin-24" in json.dumps(quantization) else sparsity.get("format")
    if format not in (BITMASK, "dense"):  # vLLM refuses any sparsity_config, also one of dense weights
        raise ValueError(f"{path}: its weights have the format {format!r}; only {BITMASK!r} is converted")
    if any(quantization.get(key) for key in ("config_groups", "kv_cache_scheme", "transform_config")):
        config["quantization_config"] = quantization
    return config, format == BITMASK


def open_files(source: Path) -> dict[Path, Any]:
    """The checkpoint's open safetensors files; ValueError: its index has other tensors."""
    has_index = (source / INDEX).exists()
    listed = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"] if has_index else {}
    paths = [source / Path(name).name for name in sorted(set(listed.values()))] or [source / SINGLE]
    try:
        files = {path: safe_open(path, "pt") for path in paths}
    except SafetensorError as error:
        raise OSError(f"{source}: a safetensors file is damaged or cut short ({error}); download it again") from error
    found = {name for file in files.values() for name in file.keys()}  # noqa: SIM118  not a dict
    if has_index and (wrong := sorted(listed.keys() ^ found)):
        raise ValueError(f"{source / INDEX}: {wrong[0]} is in the index or in a file, not in both")
    return files


def dense_weight(where: str, names: dict[str, Any], module: str) -> Tensor:
    """The weight `[out, in]` of a layer; ValueError, which begins with `where`, if its parts are damaged."""
    absent = [f"{module}.{part}" for part in PARTS if f"{module}.{part}" not in names]
    forms = {module.removesuffix(".weight") + end for end in (".weight", ".bitmask", ".weight.bitmask")}
    if absent or (twice := forms & names.keys() - {f"{module}.bitmask"}):
        what = f"lack {', '.join(absent)}" if absent else f"have {min(twice)} too"
        raise ValueError(f"{where}: the files {what}")
    values, bitmask, shape = (names[f"{module}.{part}"].get_tensor(f"{module}.{part}") for part in PARTS)
    rows, columns = (*values.shape, 0, 0)[:2]
    fits = shape.flatten().tolist() == [rows, 2 * columns] and bitmask.shape == (rows, (columns + 3) // 4)
    if not fits or values.dim() != 2 or columns % 2 or bitmask.dtype != torch.uint8:
        parts = f"{tuple(values.shape)}, bitmask {bitmask.dtype} {tuple(bitmask.shape)}, shape {shape.tolist()}"
        raise ValueError(f"{where}: these do not fit each other: compressed {parts}")
    return finite(where, decompress(where, values, bitmask))


def decompress(where: str, values: Tensor, bitmask: Tensor) -> Tensor:
    """The dense weight `[out, in]` of values `[out, in / 2]` and bitmask `[out, ceil(in / 8)]`; errors name `where`."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    bits = (bitmask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1).bool()
    mask = bits[:, :columns]
    if bits[:, columns:].any() or (mask.unflatten(1, (-1, 4)).sum(-1, dtype=torch.uint8) != 2).any():
        raise ValueError(f"{where}: its bitmask does not keep two of each four; download it again")
    raw = values.view(torch.uint8) if values.itemsize == 1 else values  # FP8 has no masked_scatter_
    return raw.new_zeros(rows, columns).masked_scatter_(mask, raw).view(values.dtype)


def finite(where: str, tensor: Tensor) -> Tensor:
    if not tensor.float().isfinite().all():
        raise ValueError(f"{where} has NaN or inf; download it again")
    return tensor


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="the directory of the bitmask checkpoint")
    parser.add_argument("directory", type=Path, help="a directory that is not there yet")
    options = parser.parse_args(arguments)
    try:
        sparse = convert(options.checkpoint, options.directory)
    except (OSError, ValueError, LookupError) as error:
        print(f"convert_bitmask.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.directory}: {len(sparse)} layers were in {BITMASK}, and all weights are dense tensors now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
