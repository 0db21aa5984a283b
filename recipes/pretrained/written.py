"""What the dense model writes for the evidence page: answers to prompts from templates, and text from nothing.

It is sampled, so it differs between machines. A batch has its own seed and file, and what an interrupted run has
left is kept.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sparse24_kernels.cache_folder import write_json

from hf_sparse24 import own_text

BATCHES = {"train": 7, "calibration": 1, "validation": 2}
BATCH, NEW_TOKENS, TEMPERATURE, TOP_K = 32, 160, 0.8, 50

OWN_BATCHES, OWN_LENGTH = {"train": range(1, 4), "calibration": range(4, 12)}, 320
"""Seeds of batches of text from nothing, each of `BATCH` sequences."""

EXCERPT = 500
"""Characters of the passage in a prompt."""

ABOUT_PASSAGE = (
    "Summarize this passage in two sentences.",
    "Rewrite this in simple words.",
    "What is the main point of this text?",
    "List three things that we learn from this passage.",
    "Give this text a title and say why it fits.",
    "Who or what is this passage about?",
    "Continue this text with one more paragraph.",
)
ABOUT_TOPIC = (
    "Tell me about {}.",
    "Explain {} to a child of ten.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Give me three tips on how to learn more about {}.",
    "Why is {} important? Answer in a few sentences.",
    "Write a short poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a short email to a friend about {}.",
    "What should a beginner know about {}?",
)
TOPICS = """
    rain, gravity, bread, the moon, volcanoes, music, chess, bees, democracy, electricity, the heart, whales, money,
    photosynthesis, sleep, trains, the Roman Empire, gardening, vaccines, football, painting, recycling, the sea,
    computers, friendship, coffee, dinosaurs, earthquakes, libraries, bicycles, glass, mathematics, deserts, cooking,
    the brain, airplanes, winter, history, dogs, mountains, the internet, milk, planets, theatre, rivers, exercise,
    paper, forests, clocks, poetry, solar power, salt, birds, schools, magnets, tea, bridges, dreams, rice, honesty
"""


def prompts(part: str, passages: list[str]) -> list[str]:
    """Prompts of one part, half of them on its passages, and half on topics that no other part has."""
    count = BATCHES[part] * BATCH
    places = {"train": range(7), "calibration": (7,), "validation": (8, 9)}[part]
    topics = [topic for i, topic in enumerate(" ".join(TOPICS.split()).split(", ")) if i % 10 in places]
    found = []
    for i in range(count // 2):
        round_, place = divmod(i, len(topics))
        found.append(ABOUT_TOPIC[(round_ * 3 + place) % len(ABOUT_TOPIC)].format(topics[place]))
        excerpt = passages[i % len(passages)][:EXCERPT].rsplit(" ", 1)[0]
        found.append(f"{ABOUT_PASSAGE[i % len(ABOUT_PASSAGE)]}\n\n{excerpt}")
    return found


@torch.no_grad()
def answers(model: Any, tokenizer: Any, asked: list[str], seed: int) -> list[str]:
    """Each prompt with its answer in the chat template; an answer that was cut off has no mark of its end."""
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    starts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(starts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
    new = model.generate(**batch, **sampling, max_new_tokens=NEW_TOKENS)[:, batch["input_ids"].shape[1] :]
    found = []
    for start, ids in zip(starts, new.tolist()):
        ended = tokenizer.eos_token_id in ids
        ids = ids[: ids.index(tokenizer.eos_token_id)] if ended else ids
        found.append(start + tokenizer.decode(ids) + (f"{tokenizer.eos_token}\n" if ended else ""))
    return found


def chat(folder: Path, part: str, passages: list[str], checkpoint: Path) -> list[str]:
    """The chats of a part, from files in a folder, of which those that are missing are made."""
    asked = prompts(part, passages)

    def write(model: Any, tokenizer: Any, i: int) -> list[str]:
        return answers(model, tokenizer, asked[i * BATCH : (i + 1) * BATCH], seed=i)

    return _batches(folder, part, range(BATCHES[part]), checkpoint, write)


def own(folder: Path, part: str, checkpoint: Path) -> list[str]:
    """What the model writes from nothing for a part, likewise from files."""

    def write(model: Any, tokenizer: Any, i: int) -> list[str]:
        return tokenizer.batch_decode(own_text(model, tokenizer, BATCH, OWN_LENGTH, seed=i))

    return _batches(folder, f"own-{part}", OWN_BATCHES[part], checkpoint, write)


def _batches(
    folder: Path, name: str, numbers: range, checkpoint: Path, write: Callable[[Any, Any, int], list[str]]
) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found, model = [], None
    for i in numbers:
        file = folder / f"{name}-{i}.json"
        if not file.exists():
            print(f"{name}: the dense model writes batch {i - numbers[0] + 1} of {len(numbers)}", flush=True)
            if model is None:
                tokenizer = AutoTokenizer.from_pretrained(checkpoint)
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
            write_json(file, write(model, tokenizer, i))
        found += json.loads(file.read_text())
    return found
