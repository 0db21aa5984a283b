"""Small data sets for SFT and LoRA that every machine can make, from the standard library and the pages of `help()`.

`python recipes/tiny_chats.py` writes `train.jsonl` and `validation.jsonl` into each of three directories, and a file
`chat_template.jinja` for the chats:

- `instructions`: columns `prompt` and `completion`. A prompt quotes a function, and asks for its module, its arguments,
  or what it does.
- `chats`: column `messages`, three such questions about one function.
- `english`: column `text`, a page of `help()` each.

They test that recipes learn. They say nothing about a model's knowledge.
"""

import argparse
import json
import os
import platform
import random
from pathlib import Path
from pydoc_data.topics import topics

import stdlib_text
from tiny_tasks import Function, read_functions

QUESTIONS = {
    "Which module holds it?": lambda function: function.module,
    "What does it take?": lambda function: function.arguments,
    "What does it do?": lambda function: function.sentence,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ 'Question: ' + message.content + '\nAnswer:' }}{% endif %}{% endfor %}"
)
HELD_OUT = 8  # every 8th function, or page, is validation


def prepare(directory: str | os.PathLike, max_files: int | None = None) -> Path:
    """Write the data sets and the template into `directory`, unless they are there already.

    Args:
        directory: made if absent; afterwards holds `instructions`, `chats`, `english` and the template.
        max_files: of the standard library to use; None for all.

    Returns:
        `directory`.
    """
    directory = Path(directory)
    manifest = directory / "manifest.json"
    settings = {"python": platform.python_version(), "max_files": max_files}
    if manifest.exists() and json.loads(manifest.read_text())["settings"] == settings:
        return directory
    manifest.unlink(missing_ok=True)  # written last: a directory without one is not finished
    functions = list({function.sentence: function for function in read_functions(max_files)}.values())
    random.Random(0).shuffle(functions)
    rows = {
        "instructions": [instruction(function, index) for index, function in enumerate(functions)],
        "chats": [chat(function) for function in functions],
        "english": [{"text": topics[name]} for name in sorted(topics)],
    }
    counts = {}
    for name, examples in rows.items():
        splits = {"validation": examples[::HELD_OUT], "train": [e for i, e in enumerate(examples) if i % HELD_OUT]}
        for split, chosen in splits.items():
            path = directory / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            stdlib_text.replace_file(path, "".join(json.dumps(row) + "\n" for row in chosen))
            counts[f"{name}/{split}"] = len(chosen)
    stdlib_text.replace_file(directory / "chat_template.jinja", CHAT_TEMPLATE)
    stdlib_text.replace_file(manifest, json.dumps({"settings": settings, "rows": counts}))
    return directory


def quote(function: Function) -> str:
    return f"{function.module}.{function.name}({function.arguments}): {function.sentence}."


def instruction(function: Function, index: int) -> dict:
    """One of the questions, in turn; its answer is in the prompt."""
    question, answer = list(QUESTIONS.items())[index % len(QUESTIONS)]
    return {"prompt": f"Question: {quote(function)} {question}\nAnswer:", "completion": f" {answer(function)}"}


def chat(function: Function) -> dict:
    """All of the questions; the first message quotes the function."""
    messages = []
    for question, answer in QUESTIONS.items():
        asked = question if messages else f"{quote(function)} {question}"
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer(function)})
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="runs/tiny_chats", help="default: %(default)s")
    directory = prepare(parser.parse_args().directory)
    for name, rows in json.loads((directory / "manifest.json").read_text())["rows"].items():
        print(f"{directory / name}.jsonl  {rows} rows")


if __name__ == "__main__":
    main()
