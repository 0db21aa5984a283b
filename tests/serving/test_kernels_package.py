"""PyPI's package `kernels` loads ours from a folder, in a process that cannot import them by their own name."""

import json
import shutil

import hub_layout
import pytest
import serving
from sparse24_kernels.cpu import build

LOAD = """
import sys
from importlib import import_module
from pathlib import Path

import torch
from kernels import get_local_kernel

loaded = get_local_kernel(Path(sys.argv[1]), backend="cpu")
dispatch, masks, packed = (import_module(f"{loaded.__name__}.{name}") for name in sys.argv[2:])
x, weight = torch.randn(3, 32), torch.randn(16, 32)
mask = loaded.nm_mask(weight)
assert torch.equal(mask, masks.nm_mask(weight, 2, 4, 1, False)) and mask.sum() == 256
matrix = loaded.pack_nm(weight * mask)
expected = packed.packed_linear(x, *matrix, None)
torch.testing.assert_close(loaded.packed_linear(x, matrix), expected)
operators = {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if "sparse24" in name}
assert operators == {loaded.__name__}, operators
print(dispatch.choose_kernels(torch.device("cpu"), operator="packed_linear").implementation)
"""


@pytest.mark.slow
def test_a_process_without_us_computes_with_the_loaded_kernels(compiler, tmp_path):
    variants = hub_layout.lay_out(tmp_path / "hub")
    # It compiles all of these, or finds the same library in the cache.
    for source in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
        assert all((folder / "cpu/native" / source.name).read_bytes() == source.read_bytes() for folder in variants)
    environment = serving.install(tmp_path / "packages", "kernels")
    modules = ("dispatch", "reference.masks", "reference.packed")
    assert serving.run(["-c", serving.WITHOUT_US + LOAD, tmp_path / "hub", *modules], environment) == "cpu\n"


def test_operators_of_other_sources_have_other_names(tmp_path, monkeypatch):
    """torch lets a second copy take over the operators of the first, without a word."""
    first = hub_layout.lay_out(tmp_path / "first")
    shutil.copytree(hub_layout.SOURCES, tmp_path / "sparse24_kernels")
    (tmp_path / "sparse24_kernels/checks.py").write_text("# another version\n")
    monkeypatch.setattr(hub_layout, "SOURCES", tmp_path / "sparse24_kernels")
    names = [json.loads((x / "metadata.json").read_text())["id"] for x in (*first, *hub_layout.lay_out(tmp_path))]
    assert len(set(names)) == 4
    for variant, name in zip(first, names):
        code = "".join(path.read_text() for path in variant.rglob("*.py"))
        assert f'"{name}::nm_mask"' in code and "sparse24::" not in code.replace(f"{name}::", "")
