"""Lays the kernels out as PyPI's package `kernels` loads them from a folder or from the Hub.

    python kernels/hub_layout.py build/hub
    python -c "from pathlib import Path; from kernels import get_local_kernel as get; print(get(Path('build/hub')))"

The layout is that of Hugging Face's kernel-builder for a `[torch-noarch]` project, `build/torch-cpu` and so on.
Two versions may be loaded in one process, so their operators are named after a hash of the sources, not `sparse24`.
"""

import argparse
import hashlib
import json
import shutil
import tomllib
from base64 import b64encode
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES = ROOT / "sparse24_kernels"
OPERATORS = '"sparse24::'


def lay_out(folder: Path) -> list[Path]:
    """The folders of the variants, one for each backend of build.toml. Those in `folder` are replaced."""
    with (ROOT / "build.toml").open("rb") as file:
        project = tomllib.load(file)
    general, suffixes = project["general"], project["torch-noarch"]["pyext"]
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix[1:] in suffixes)
    digest = hashlib.sha256(b"".join(str(path.relative_to(SOURCES)).encode() + path.read_bytes() for path in files))
    variants = []
    for backend in general["backends"]:
        name = f"_{SOURCES.name}_{backend}_{digest.hexdigest()[:7]}"
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        hashes = {}
        for path in files:
            relative = path.relative_to(SOURCES)
            content = path.read_text().replace(OPERATORS, f'"{name}::').encode()
            (variant / relative).parent.mkdir(parents=True, exist_ok=True)
            (variant / relative).write_bytes(content)
            hashes[str(relative)] = b64encode(hashlib.sha256(content).digest()).decode()
        about = {key: general[key] for key in ("name", "version", "license")}
        about |= {"id": name, "backend": {"type": backend}, "python-depends": []}
        about["digest"] = {"algorithm": "sha256", "files": hashes}
        (variant / "metadata.json").write_text(json.dumps(about, indent=1) + "\n")
        variants.append(variant)
    return variants


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(*lay_out(parser.parse_args().folder), sep="\n")
