"""Build the documentation site: `make docs`, into build/site. Warnings are errors.

    python docs/build_site.py           # write the generated pages, then the site
    python docs/build_site.py --serve   # the same, with a server that shows changes

Generated, and committed so that they can be read without building, are the pages that repeat what stands elsewhere: the
methods (their cards and settings), the command line, the architectures, the committed results, the version on the home
page, and the README's line of links.
"""

import argparse
import configparser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import architectures_page
import claims_page
import cpu_page
import frontier_page
import gpu_page
import pretrained_page
import scaling_page

from hf_sparse24 import __version__, describe_settings
from hf_sparse24.methods import METHODS
from hf_sparse24.tables import markdown_table
from hf_sparse24_command import make_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RESULTS = ROOT / "recipes" / "results"
SITE = ROOT / "build" / "site"


def shipped_methods() -> list[str]:
    """Names of the methods of the library, without those that somebody has registered besides."""
    return [name for name, method in METHODS.items() if method.__module__.startswith("hf_sparse24.")]


def read_card(name: str) -> tuple[str, list[tuple[str, str]]]:
    """The first line of the docstring of a method's file, and its card: labels and texts."""
    doc = sys.modules[METHODS[name].__module__].__doc__ or ""
    title, body = doc.split("\n", 1)
    rows: list[tuple[str, str]] = []
    for line in body.split("Method card\n")[1].rstrip().splitlines():
        label, text = line[4:21].strip(), line[21:].strip()
        if label:
            rows.append((label, text))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]}\n{text}")
    return title, rows


def method_page(name: str) -> str:
    title, card = read_card(name)
    rows = "\n".join(f"| **{label}** | {_cell(text)} |" for label, text in card)
    rows = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", rows)
    if name in _CLAIMS:
        link = f"[tried row by row](../measured/claims.md#{_CLAIMS[name]})"
        rows = rows.replace("\n| **Reference**", f"\n| **Its paper's claims** | {link} |\n| **Reference**")
    rows = rows.replace("recipes/results/methods.md", "[Methods side by side](../measured/methods.md)")
    rows = rows.replace("docs/measured/pretrained.md", "[A pretrained model](../measured/pretrained.md)")
    rows = re.sub(r"docs/(\w+/(\w+)\.md)", lambda page: f"[{page[2].replace('_', ' ')}](../{page[1]})", rows)
    settings = "\n".join(f"| `{key}` | {_cell(text)} |" for key, text in describe_settings(name).items())
    return f"""# `{name}`

{title}

![Training and validation loss, flip rate and step time of {name} and of the dense control](../images/method-{name}.svg)

```python
{_PRETRAINED if name == "fixed-mask" else _FROM_SCRATCH.format(name=name)}
```

## The method

| | |
|---|---|
{rows}

## Settings

| setting | meaning |
|---|---|
{settings}
"""


_CLAIMS = {"s-ste": "s-ste", "t-sr-ste": "t-sr-ste", "step": "step"}
"""Methods of the papers of the page of claims, and their headings there."""
_FROM_SCRATCH = """from transformers import AutoConfig, AutoModelForCausalLM
from hf_sparse24 import Sparse24Config, patch_model

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
print(patch_model(model, Sparse24Config(method="{name}")))"""
_PRETRAINED = """from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from hf_sparse24 import Sparse24Config, oneshot

model = AutoModelForCausalLM.from_pretrained("gpt2")
batches = DataLoader(data.with_format("torch"), batch_size=2)  # data: any tokenized dataset
print(oneshot(model, batches, Sparse24Config(method="fixed-mask")))"""


def command_line_page() -> str:
    parser = make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    shown = {"hf-sparse24": parser, **{f"hf-sparse24 {name}": command for name, command in commands.choices.items()}}
    for command in shown.values():
        command.formatter_class = partial(argparse.HelpFormatter, width=98)  # whatever terminal this runs in
    sections = [f"## `{name}`\n\n```text\n{command.format_help().rstrip()}\n```" for name, command in shown.items()]
    intro = "What `hf-sparse24 COMMAND --help` prints. The guides show the commands in use: [tuning and the doctor]"
    intro += "(../guides/tuning.md), [reading the logs](../guides/logs.md), [export and the Hub](../guides/export.md)."
    return "\n\n".join(["# Command line", intro, *sections]) + "\n"


def methods_page() -> str:
    """The committed page, with the site's pictures of the same runs."""
    text = (RESULTS / "methods.md").read_text().replace("## Methods\n\n", f"{_METHODS}\n\n## Methods\n\n")
    text = text.replace("## The search\n\n", f"## The search\n\n{_RATES}\n\n")
    text = text.replace("## How it was made\n\n", f"## By step\n\n{_CURVES}\n\n## How it was made\n\n")
    return text.replace("`recipes/results/cpu_step_time.json`", "[training on a CPU](costs.md)")


_METHODS = (
    "![Validation loss over the dense control, each at its best learning rate, the methods above and their variants "
    "below: a ring for seed 0, which all have, and a dot for the mean where there are several seeds, with their range]"
    "(../images/methods.svg)"
)
_RATES = (
    "![Validation loss of seed 0 against the learning rate, for dense training, emphasised, and the methods whose rate "
    "was searched for](../images/rates.svg)"
)
_CURVES = (
    "![Training loss over the dense control, step by step, after the first quarter of the run: each method in blue, "
    "and in its panel up to two of its variants; each at its best learning rate](../images/curves.svg)"
)


def costs_page() -> str:
    costs = _costs(json.loads((RESULTS / "cpu_step_time.json").read_text()))
    training = json.loads((RESULTS / "cpu_training.json").read_text())
    made = f"`{training['command']}`, {training['date'][:10]}, with {cpu_page.made(training)}."
    parts = ["# Training on a CPU", _SPARSE, _training(training), _NOTES, made, "## GEMMs", _GEMMS, *_gemms(training)]
    return "\n\n".join([*parts, "## What pruning costs", _COSTS, costs])


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The case of each row of training, on which path and threads, and the row."""
    for name, row in result["sections"]["training"]["rows"].items():
        case, _, threads = name.rsplit(", ", 2)
        yield case, f"{row['facts']['path']}, {threads}", row


def _training(result: dict[str, Any]) -> str:
    """A row for each layer or step and way, with the speed-up on each path and number of threads."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for case, where, row in _rows(result):
        facts = row["facts"].items() if row["facts"]["part"] != "gemms" else ()
        for fact, found in facts:
            if fact.endswith(" over dense"):
                rows.setdefault((case, fact.removesuffix(" over dense")), {})[where] = cpu_page.spread(found)
    columns = list(dict.fromkeys(where for found in rows.values() for where in found))
    cells = [[*name, *(found.get(where, "") for where in columns)] for name, found in rows.items()]
    return markdown_table(["what", "method", *columns], cells)


def _gemms(result: dict[str, Any]) -> Iterator[str]:
    """A table for each path and number of threads: GFLOP/s of each way, and the ratios."""
    tables: dict[str, list[list[str]]] = {}
    ways = {"dense": "torch (MKL)", "oneDNN": "oneDNN", "OpenBLAS": "OpenBLAS", "sparse": "2:4"}
    for case, where, row in _rows(result):
        if row["facts"]["part"] == "gemms":
            work = 2 * math.prod(map(int, case.split(", ")[0].split(" x ")))
            speeds = [f"{work / row['times'][way]['us'] / 1e3:.0f}" for way in ways]
            ratios = [cpu_page.spread(row["facts"][f"sparse over {base}"]) for base in ("dense", "best")]
            tables.setdefault(where, []).append([case, *speeds, *ratios])
    head = ["tokens x in x out", *ways.values(), "2:4 over torch", "2:4 over the best dense"]
    return (f"### {where}\n\n{markdown_table(head, lines)}" for where, lines in tables.items())


def _costs(result: dict[str, Any]) -> str:
    cells = []
    for name, row in result["sections"]["pruning"]["rows"].items():
        for method, time in row["times"].items():
            most, ratio, least = (1 / x for x in row["facts"].get(f"{method} over dense", [1.0, 1.0, 1.0]))
            figures = (time["us"] / 1e6, ratio, least, most)
            cells.append([name.split(", ")[0], method, *(f"{x:.3f}" for x in figures)])
    table = markdown_table(["model", "method", "seconds", "ratio", "ratio min", "ratio max"], cells)
    return "\n".join([f"### `{result['command']}`", "", f"Made with {cpu_page.made(result)}.", "", table, ""])


_SPARSE = (
    "Training in fp32 on a CPU, as `patch_model` with its defaults gives it: layers and steps, in times as fast as "
    "dense PyTorch. Medians of the turns, and in brackets the 10 % and 90 % quantiles. Above 1 is faster. **Where a "
    "CPU has bf16 instructions, train dense in bf16**: that is faster than any of it."
)
_NOTES = """- From 512 tokens and features on, AMD's CPUs take the kernels that skip zeros. `hf-sparse24 tune MODEL`
  measures other sizes and CPUs; what is not known to be faster stays dense.
- A step has pruning, MVUE and the optimizer in it, the Trainer's fused AdamW. `python recipes/benchmarks/cpu.py
  training` measures all of it again, and `cpu.py pruning` the last table.
- Ways take turns, and a ratio is taken within a turn. The masks of `t-sr-ste` are chosen in the step that warms up;
  choosing them every 40 steps takes less than 0.1 % of the time. The dense last sixth of its run gains nothing.
- Rows with `dense math` have `backend="dense"`: what pruning costs where no sparse GEMM runs.
- `avx2` limits MKL, oneDNN, OpenBLAS, torch and our kernels alike."""
_GEMMS = (
    "GFLOP/s, zeros counted. torch multiplies by MKL, which does not use AVX-512 on AMD's CPUs. oneDNN (`to_mkldnn`) "
    "and OpenBLAS (NumPy) get their operands as they like them; pruning and packing is in the times of 2:4."
)
_COSTS = (
    "Here **above 1 is slower**: time with this library over that of the dense model, paired round by round: median, "
    "lowest and highest of the rounds. These runs have no sparse GEMMs, so this is what pruning costs. The machine is "
    "shared and noisy: see the ranges. Masks that stay for some steps (`t-sr-ste`, `ast`, `cast`) are chosen in the "
    "warm-up step, so choosing them is not in these times."
)


def _cell(text: str) -> str:
    """Text for a cell of a table: its lines joined, but for those that begin with a formula."""
    text = re.sub(r"\n(?=\w+ = )", "<br>", text).replace("\n", " ")
    return re.sub(r"<(?!br>)", "&lt;", text).replace("|", r"\|")


def links(setup: Path) -> str:
    """The README's line of links: on GitHub Pages and Colab once `project_urls` of setup.cfg names the repository."""
    config = configparser.ConfigParser()
    config.read(setup)
    urls = dict(re.findall(r"(\w+) = (\S+)", config["metadata"].get("project_urls", "")))
    colab = "https://colab.research.google.com/github/" + urls.get("Source", "").removeprefix("https://github.com/")
    notebooks = f"{colab}/blob/main/notebooks" if urls else "notebooks"
    shown = {"Documentation": urls.get("Documentation", "docs/index.md")}
    shown |= {text: f"{notebooks}/{name}.ipynb" for text, name in NOTEBOOKS.items()}
    return " · ".join(f"[{text}]({address})" for text, address in shown.items())


NOTEBOOKS = {"quick start": "01_quickstart", "pruning": "04_oneshot", "first GPU run": "05_first_gpu_run"}


def pages() -> dict[str, str]:
    """The generated pages by their path below docs/."""
    made = {f"methods/{name}.md": method_page(name) for name in shipped_methods()}
    made["index.md"] = re.sub(r"(?m)^Version [^\s,]+", f"Version {__version__}", (DOCS / "index.md").read_text())
    made["reference/cli.md"] = command_line_page()
    made["start/architectures.md"] = architectures_page.page()
    made["measured/methods.md"] = methods_page()
    made["measured/costs.md"] = costs_page()
    made["measured/cpu.md"] = cpu_page.page(RESULTS / "cpu")
    made["measured/frontier.md"] = frontier_page.page(RESULTS / "frontier")
    made["measured/gpu.md"] = gpu_page.page(RESULTS / "gpu")
    made["measured/scaling.md"] = scaling_page.page(RESULTS / "scaling")
    made["measured/claims.md"] = claims_page.page(RESULTS)
    made["measured/pretrained.md"] = pretrained_page.page(RESULTS / "pretrained")
    return made


def readme() -> str:
    return re.sub(r"(?m)^\[Documentation\]\(.*$", links(ROOT / "setup.cfg"), README.read_text())


def write_pages() -> None:
    README.write_text(readme())
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text)


def _zensical(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Zensical where it finds its extension in docs/site_markdown.py."""
    path = os.pathsep.join(filter(None, [str(DOCS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zensical", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "NO_COLOR": "1"}, text=True, **options
    )


def build_site() -> int:
    """Run Zensical; the exit status is 1 where it, or mkdocstrings in it, has a warning."""
    shutil.rmtree(SITE, ignore_errors=True)
    run = _zensical("build", "--strict", "--clean", capture_output=True)
    output = run.stdout + run.stderr
    print(output, end="")
    for path in SITE.rglob("*.html"):
        _link_home(path)
    warned = re.search(r"^(griffe|WARNING|mkdocs\w*):", output, re.MULTILINE)
    return 1 if run.returncode or warned else 0


def _link_home(path: Path) -> None:
    """Let the logo of a page lead to the start page, not to its folder, which a browser without a server would list."""
    up = "../" * (len(path.relative_to(SITE).parts) - 1)
    text = re.sub(
        r'<a href="[^"]*" title="hf_sparse24"', f'<a href="{up}index.html" title="hf_sparse24"', path.read_text()
    )
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="show the site, and changes as they are made")
    options = parser.parse_args()
    write_pages()
    if options.serve:
        return _zensical("serve").returncode
    status = build_site()
    print("failed: see the warnings above" if status else f"built: {SITE / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
