"""Small data sets for SFT and LoRA that every machine can make, from the standard library and the pages of `help()`.

`python recipes/tiny_chats.py` writes `train.jsonl` and `validation.jsonl` into each of three directories, and a file
`chat_template.jinja` for the chats:

- `instructions`: columns `prompt` and `completion`. A prompt quotes a function, and asks for its module, its arguments,
  or what it does.
- `chats`: column `messages`, three such questions about one function.
- `english`: column `text`, a page of `help()` each.

They test that recipes learn. They say nothing about a model's knowledge.
"""

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
    settings = {"python": platform.python_version(), "max_files": max_files}
    if stdlib_text.is_finished(directory, settings):
        return directory
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
            stdlib_text.write_rows(directory / name / f"{split}.jsonl", chosen)
            counts[f"{name}/{split}"] = len(chosen)
    stdlib_text.replace_file(directory / "chat_template.jinja", CHAT_TEMPLATE)
    stdlib_text.finish(directory, settings, counts)
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


if __name__ == "__main__":
    stdlib_text.prepare_by_flags(prepare, "runs/tiny_chats", __doc__)
