"""The size of the project: numbers that tests/project/test_size.py holds below limits.

    python tests/support/sizes.py          # lines of this checkout, by part
    python tests/support/sizes.py FOLDER   # of another one

Lines are all lines of .py, .cpp and .h files, blank ones and comments included.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
from paths import ROOT

CORE = ("weights", "methods", "layers", "patching", "training", "checkpoints")
RING = ("pruning", "peft", "hub", "serving", "tools")
ANY, WHAT = r"\bAny\b", '"""What'
KERNELS = "kernels/sparse24_kernels"
PACKAGES = ("hf_sparse24", "sparse24_kernels")


def files(root: Path, *folders: str) -> list[Path]:
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return sorted(found)


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sums(root: Path = ROOT) -> dict[str, int]:
    """Lines of the parts that have a limit."""
    package = root / "hf_sparse24"
    single = [path for path in package.glob("*.py") if path.name != "__main__.py"]
    return {
        "core": lines(files(package, *CORE)) + lines(single),
        "outer ring": lines(files(package, *RING)),
        "kernels": lines(files(root, KERNELS)),
        "library and kernels": lines(files(root, "hf_sparse24", "kernels")),
        "tests": lines(files(root, "tests")),
        "recipes and makers of pages": lines(files(root, "recipes", "docs")),
    }


def library() -> dict[Path, str]:
    """The text of each file of the library, kernels included, by its path from the root."""
    found = files(ROOT, "hf_sparse24", KERNELS)
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in found}


def classes() -> Iterator[tuple[str, int, int]]:
    """Name, methods and lines of each class of the library. Inherited methods do not count."""
    for path, text in library().items():
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                yield f"{path}: {node.name}", methods, node.end_lineno - node.lineno + 1


def words(pattern: str) -> int:
    """How often a pattern stands in the library's Python, comments and docstrings included."""
    return sum(len(re.findall(pattern, text)) for path, text in library().items() if path.suffix == ".py")


def imports(package: str) -> networkx.DiGraph:
    """The modules of a package, with edges to those of the package that each imports, inside functions too."""
    found = grimp.build_graph(package, cache_dir=None)
    return networkx.DiGraph({name: found.find_modules_directly_imported_by(name) for name in found.modules})


def folders(modules: networkx.DiGraph) -> networkx.DiGraph:
    """The graph of a package's folders and single files, without its `__init__`."""
    named = [[".".join(name.split(".")[:2]) for name in edge] for edge in modules.edges]
    return networkx.DiGraph([(one, other) for one, other in named if one != other and "." in one and "." in other])


def main() -> None:
    for part, count in sums(*map(Path, sys.argv[1:])).items():
        print(f"{part:32}{count:8,}")


if __name__ == "__main__":
    main()
