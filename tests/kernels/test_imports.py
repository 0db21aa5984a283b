"""The shape of sparse24_kernels: layers, no circles, every module importable alone, fakes without a history."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import sparse24_kernels as kernels

ROOT = Path(kernels.__file__).parent
PACKAGE = "sparse24_kernels"

# Lower layers first. A module imports from its own layer and those before it.
LAYERS = [
    ["formats", "checks", "cache_folder"],
    ["reference"],
    ["cpu", "gpu"],
    ["dispatch"],
    ["gemm.problem", "gemm.operand"],
    ["gemm.backend", "gemm.cusparselt"],
    ["gemm.measure"],
    ["gemm.autotune"],
    ["gemm.packed", "gemm.sparse_tensor_cores"],
    ["gemm.planning"],
    ["decay", "fp8", "gated", "masks", "matmul", "mvue", "packing", "prune", "scale", "transposable"],
]


def module_files() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_files()


def imported(name: str) -> set[str]:
    """Our modules that a module imports, anywhere in it, inside functions too."""
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level], *filter(None, [node.module])] if node.level else []
            source = ".".join(base) if node.level else str(node.module)
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {target if target in MODULES else source for target in names}
    return {target for target in found if target.split(".")[0] == PACKAGE}


GRAPH = {name: imported(name) for name in MODULES}


def reachable(name: str) -> set[str]:
    seen, todo = set(), list(GRAPH[name])
    while todo:
        target = todo.pop()
        if target not in seen:
            seen.add(target)
            todo += GRAPH[target]
    return seen


def test_the_graph_is_read_correctly():
    assert f"{PACKAGE}.formats" in GRAPH[f"{PACKAGE}.gpu.prune"]
    assert f"{PACKAGE}.gemm.cusparselt" in GRAPH[f"{PACKAGE}.gemm.measure"]
    assert f"{PACKAGE}.gemm.autotune" in reachable(PACKAGE)


def test_no_circles():
    assert [name for name in GRAPH if name in reachable(name)] == []


def test_layers():
    layer_of = {f"{PACKAGE}.{name}": number for number, layer in enumerate(LAYERS) for name in layer}

    def layer(name: str) -> int:
        return next(number for prefix, number in layer_of.items() if name == prefix or name.startswith(f"{prefix}."))

    listed = {name for name in GRAPH if name not in (PACKAGE, f"{PACKAGE}.gemm")}
    upwards = {(name, target) for name in listed for target in GRAPH[name] if layer(name) < layer(target)}
    assert upwards == set()
    assert not [name for name in GRAPH if PACKAGE in GRAPH[name]], "nothing imports the package root"
    assert GRAPH[f"{PACKAGE}.formats"] == set()


def test_every_module_can_be_imported_first():
    """Each in a process of its own, its parents without what they import, so that no import order is needed."""
    code = f"""
        import importlib, os, sys, types
        import torch._dynamo, triton  # what all of them import, once
        for name in {sorted(MODULES)!r}:
            if os.fork() == 0:
                parts = name.split(".")
                for i in range(1, len(parts)):
                    parent = types.ModuleType(".".join(parts[:i]))
                    parent.__path__ = [os.path.join({str(ROOT.parent)!r}, *parts[:i])]
                    sys.modules[parent.__name__] = parent
                importlib.import_module(name)
                os._exit(0)
            if os.wait()[1]:
                sys.exit(f"cannot import {{name}} alone")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
