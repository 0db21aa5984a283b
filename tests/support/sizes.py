"""The size of the project: a table by folder, and the numbers that tests/project/test_size.py holds below limits.

    python tests/support/sizes.py          # of this checkout
    python tests/support/sizes.py FOLDER   # of another one, in the last column

Lines are all lines of .py, .cpp and .h files, blank ones and comments included.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

CORE = ("config", "run", "weights", "methods", "layers", "patching", "training", "checkpoints")
RING = ("pruning", "peft", "hub", "serving", "tools")
ANY, WHAT = r"\bAny\b", '"""What'
LIBRARY = {"hf_sparse24": "hf_sparse24", "sparse24_kernels": "kernels/sparse24_kernels"}
"""Folders by the names of their packages."""


def files(root: Path, *folders: str) -> list[Path]:
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return sorted(found)


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def table(root: Path = ROOT) -> dict[str, int]:
    """Lines by part of the project: folders, then sums."""
    package = root / "hf_sparse24"
    rows = {f"hf_sparse24/{name}": lines(files(package, name)) for name in (*CORE[2:], *RING)}
    rows["hf_sparse24, single files"] = lines([path for path in package.glob("*.py") if path.name != "__main__.py"])
    kernels = root / LIBRARY["sparse24_kernels"]
    inner = sorted(path.name for path in kernels.iterdir() if path.is_dir() and files(kernels, path.name))
    rows |= {f"kernels/{name}": lines(files(kernels, name)) for name in inner}
    rows["kernels, single files"] = lines(sorted(kernels.glob("*.py")))
    tests = sorted(path.name for path in (root / "tests").iterdir() if path.is_dir() and files(path, ""))
    rows |= {f"tests/{name}": lines(files(root / "tests", name)) for name in tests}
    rows["tests, single files"] = lines(sorted((root / "tests").glob("*.py")))
    recipes = [path for path in (root / "recipes").iterdir() if path.is_dir() and files(path, "")]
    rows |= {f"recipes/{path.name}": lines(files(path, "")) for path in sorted(recipes)}
    rows["recipes, single files"] = lines(sorted((root / "recipes").glob("*.py")))
    rows |= {"docs": lines(files(root, "docs"))}
    return rows | sums(root)


def sums(root: Path = ROOT) -> dict[str, int]:
    """Lines of the parts that have a limit."""
    package = root / "hf_sparse24"
    single = [path for path in package.glob("*.py") if path.name != "__main__.py"]
    return {
        "core": lines(files(package, *CORE[2:])) + lines(single),
        "outer ring": lines(files(package, *RING)),
        "kernels": lines(files(root, LIBRARY["sparse24_kernels"])),
        "library and kernels": lines(files(root, "hf_sparse24", "kernels")),
        "tests": lines(files(root, "tests")),
        "recipes and makers of pages": lines(files(root, "recipes", "docs")),
    }


def library(root: Path = ROOT) -> dict[Path, str]:
    """The text of each file of the library, kernels included, by its path from the root."""
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in files(root, *LIBRARY.values())}


def classes(root: Path = ROOT) -> Iterator[tuple[str, int, int]]:
    """Name, methods and lines of each class of the library. Inherited methods do not count."""
    for path, text in library(root).items():
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                yield f"{path}: {node.name}", methods, node.end_lineno - node.lineno + 1


def words(pattern: str, root: Path = ROOT) -> int:
    """How often a pattern stands in the library's Python, comments and docstrings included."""
    return sum(len(re.findall(pattern, text)) for path, text in library(root).items() if path.suffix == ".py")


def imports(package: str, root: Path = ROOT) -> dict[str, set[str]]:
    """The modules of a package, each with those of the package that it imports, inside functions too."""
    base = root / Path(LIBRARY[package]).parent
    paths = {}
    for path in (root / LIBRARY[package]).rglob("*.py"):
        paths[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return {name: set(_imported(name, path, paths)) - {name} for name, path in paths.items()}


def _imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*start, node.module or ""]).strip(".")
            targets = (f"{source}.{alias.name}" for alias in node.names)
            yield from (target if target in known else source for target in targets if {target, source} & known.keys())


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of a package's folders and single files, without its `__init__`."""
    parts: dict[str, set[str]] = {}
    for name, imported in graph.items():
        if "." in name:
            part = _part(name)
            parts.setdefault(part, set()).update({_part(each) for each in imported if "." in each} - {part})
    return parts


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def longest_path(graph: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports; ValueError: there is a circle."""
    found: dict[str, list[str]] = {}

    def visit(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            raise ValueError(f"a circle of imports: {' -> '.join([*above[above.index(name) :], name])}")
        if name not in found:
            below = (visit(each, (*above, name)) for each in sorted(graph[name]))
            found[name] = [name, *max(below, key=len, default=[])]
        return found[name]

    return max((visit(name, ()) for name in graph), key=len)


def main() -> None:
    ours, other = table(), table(Path(sys.argv[1])) if sys.argv[1:] else {}
    for name in [*ours, *(name for name in other if name not in ours)]:
        print(f"{name:32}{ours.get(name, 0):8,}" + (f"{other.get(name, 0):8,}" if other else ""))
    for root in [ROOT, *map(Path, sys.argv[1:])]:
        print(f"\n{root.name}: Any {words(ANY, root)} times, {words(WHAT, root)} docstrings that begin with What")
        for package in LIBRARY:
            graph = imports(package, root)
            for what, nodes in (("levels", folders(graph)), ("files", graph)):
                try:
                    path = longest_path(nodes)
                    print(f"{package}, {what}: {len(path)}, {' > '.join(each.split('.', 1)[-1] for each in path)}")
                except ValueError as error:
                    print(f"{package}, {what}: {error}")
        for path, text in library(root).items():
            if (count := text.count("\n")) > 350:
                print(f"{path}: {count} lines")
        for name, methods, length in classes(root):
            if methods > 17 or length > 200:
                print(f"{name}: {methods} methods, {length} lines")


if __name__ == "__main__":
    main()
