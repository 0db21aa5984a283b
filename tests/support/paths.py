"""Where things lie in the repository, for tests that read files or start processes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SUPPORT = ROOT / "tests" / "support"
