"""Draw every figure of the README and the site: `make figures`, into docs/images.

python docs/figures/make.py             # all of them; files that are neither theirs nor frozen are removed
python docs/figures/make.py rates mvue  # these
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "recipes"), str(ROOT / "docs")]  # methods_runs.py, claims_page.py

import concepts  # noqa: E402, F401  registers its figures
import concepts_runs  # noqa: E402, F401  the same
import first_screen  # noqa: E402, F401  the same
import frontier  # noqa: E402, F401  the same
import papers  # noqa: E402, F401  the same
import results  # noqa: E402, F401  the same
import size_gap  # noqa: E402, F401  the same
from style import PICTURES, render  # noqa: E402

IMAGES = ROOT / "docs" / "images"
FROZEN = {"descent-predicted", "descent-flips", "flips-by-gap", "flips-dense"}
"""Files whose code is gone: docs/measured/analysis.md names the commit that drew them."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PICTURES)}")
    names = parser.parse_args(argv).names
    if unknown := set(names) - PICTURES.keys():
        parser.error(f"no figure is called {', '.join(sorted(unknown))}")
    IMAGES.mkdir(exist_ok=True)
    for name in names or PICTURES:
        path = IMAGES / f"{name}.svg"
        path.write_text(render(name))
        print(f"{path}  {path.stat().st_size / 1024:.0f} KB")
    for path in IMAGES.glob("*.svg"):
        if path.stem not in PICTURES.keys() | FROZEN:
            path.unlink()


if __name__ == "__main__":
    main()
