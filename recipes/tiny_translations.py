"""A small data set in the shape of WMT that every machine can make: English sentences and their German translations.

`python recipes/tiny_translations.py` writes `train.jsonl`, `validation.jsonl` and `test.jsonl` with the column
`translation` of `wmt/wmt14`, and a `tokenizer/`. A grammar of some 50 words makes all sentences. What to learn:

- order: the verb is second in a main clause, last after "weil", and participles and infinitives are last
  ("Heute hat der König der Frau einen Brief gegeben");
- agreement: articles, adjectives and pronouns by gender and case ("the old dog": der alte Hund, den alten Hund).

They test that recipes learn. They say nothing about translation of real texts.
"""

import os
import random
from pathlib import Path
from typing import NamedTuple

import stdlib_text
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
SPLITS = {"train": 12000, "validation": 300, "test": 300}


class Noun(NamedTuple):
    english: str
    german: str
    gender: str  # m, f, n


class Verb(NamedTuple):
    english: tuple[str, str, str]  # present, participle, infinitive
    german: tuple[str, str, str]


PEOPLE = [
    Noun("man", "Mann", "m"),
    Noun("teacher", "Lehrer", "m"),
    Noun("king", "König", "m"),
    Noun("brother", "Bruder", "m"),
    Noun("woman", "Frau", "f"),
    Noun("sister", "Schwester", "f"),
    Noun("queen", "Königin", "f"),
    Noun("child", "Kind", "n"),
]
THINGS = [
    Noun("dog", "Hund", "m"),
    Noun("apple", "Apfel", "m"),
    Noun("letter", "Brief", "m"),
    Noun("table", "Tisch", "m"),
    Noun("cat", "Katze", "f"),
    Noun("flower", "Blume", "f"),
    Noun("lamp", "Lampe", "f"),
    Noun("cup", "Tasse", "f"),
    Noun("book", "Buch", "n"),
    Noun("house", "Haus", "n"),
    Noun("horse", "Pferd", "n"),
    Noun("picture", "Bild", "n"),
]
ADJECTIVES = {
    "old": "alt",
    "young": "jung",
    "small": "klein",
    "big": "groß",
    "new": "neu",
    "beautiful": "schön",
    "good": "gut",
}
ADVERBS = {"today": "heute", "now": "jetzt", "here": "hier", "often": "oft", "perhaps": "vielleicht"}
ACTIONS = [
    Verb(("sees", "seen", "see"), ("sieht", "gesehen", "sehen")),
    Verb(("buys", "bought", "buy"), ("kauft", "gekauft", "kaufen")),
    Verb(("finds", "found", "find"), ("findet", "gefunden", "finden")),
    Verb(("loves", "loved", "love"), ("liebt", "geliebt", "lieben")),
    Verb(("paints", "painted", "paint"), ("malt", "gemalt", "malen")),
]
GIFTS = [  # these take a recipient
    Verb(("gives", "given", "give"), ("gibt", "gegeben", "geben")),
    Verb(("shows", "shown", "show"), ("zeigt", "gezeigt", "zeigen")),
    Verb(("brings", "brought", "bring"), ("bringt", "gebracht", "bringen")),
]
PRONOUNS = {"m": ("he", "er"), "f": ("she", "sie"), "n": ("it", "es")}
# By case: nominative, accusative, dative; by gender: m, f, n. Article, and the ending of an adjective after it.
ARTICLES = {
    "the": {"nom": ("der", "die", "das"), "acc": ("den", "die", "das"), "dat": ("dem", "der", "dem")},
    "a": {"nom": ("ein", "eine", "ein"), "acc": ("einen", "eine", "ein"), "dat": ("einem", "einer", "einem")},
}
ENDINGS = {
    "the": {"nom": ("e", "e", "e"), "acc": ("en", "e", "e"), "dat": ("en", "en", "en")},
    "a": {"nom": ("er", "e", "es"), "acc": ("en", "e", "es"), "dat": ("en", "en", "en")},
}


def phrase(rng: random.Random, noun: Noun, case: str) -> tuple[str, str]:
    """An article, an adjective in half of the cases, and the noun, in both languages."""
    article, gender = rng.choice(("the", "a")), "mfn".index(noun.gender)
    english, german = [article], [ARTICLES[article][case][gender]]
    if rng.random() < 0.5:
        adjective, stem = rng.choice(list(ADJECTIVES.items()))
        english = ["an" if article == "a" and adjective[0] == "o" else article, adjective]
        german.append(stem + ENDINGS[article][case][gender])
    elif article == "a" and noun.english[0] == "a":
        english = ["an"]
    return " ".join([*english, noun.english]), " ".join([*german, noun.german])


def clause(rng: random.Random, subject: tuple[str, str], order: str) -> tuple[str, str]:
    """A clause in both languages; the order of the German one is `second` for its verb, `inverted` or `last`."""
    gift = rng.random() < 0.4
    verb = rng.choice(GIFTS if gift else ACTIONS)
    objects = [phrase(rng, rng.choice(PEOPLE), "dat")] if gift else []
    objects.append(phrase(rng, rng.choice(THINGS), "acc"))
    # The verb that agrees with the subject, and the other that follows it.
    english, german, other_english, other_german = rng.choice(
        [
            (verb.english[0], verb.german[0], "", ""),
            ("has", "hat", verb.english[1], verb.german[1]),
            ("can", "kann", verb.english[2], verb.german[2]),
        ]
    )
    said = [subject[0], english, other_english, *(both[0] for both in objects)]
    rest = [*(both[1] for both in objects), other_german]
    orders = {
        "second": [subject[1], german, *rest],
        "inverted": [german, subject[1], *rest],
        "last": [subject[1], *rest, german],
    }
    return tuple(" ".join(filter(None, words)) for words in (said, orders[order]))


def sentence(rng: random.Random) -> dict[str, str]:
    """A sentence in English and German: a main clause, after an adverb or not, and a reason or none."""
    someone = rng.choice(PEOPLE)
    subject = phrase(rng, someone, "nom")
    if rng.random() < 0.5:
        adverb = rng.choice(list(ADVERBS.items()))
        parts = [adverb, clause(rng, subject, "inverted")]
    else:
        parts = [clause(rng, subject, "second")]
    english, german = (" ".join(words) for words in zip(*parts))
    if rng.random() < 0.4:
        reason = clause(rng, PRONOUNS[someone.gender], "last")
        english, german = f"{english} because {reason[0]}", f"{german}, weil {reason[1]}"
    return {"en": f"{english[0].upper()}{english[1:]}.", "de": f"{german[0].upper()}{german[1:]}."}


def prepare(directory: str | os.PathLike, vocab_size: int = 512, **rows: int) -> Path:
    """Write the data set and the tokenizer into `directory`, unless they are there already.

    Args:
        directory: made if absent; afterwards holds `train.jsonl`, `validation.jsonl`, `test.jsonl` and `tokenizer`.
        vocab_size: of the tokenizer, at most.
        rows: of a split, where not those of `SPLITS`.

    Returns:
        `directory`.
    """
    directory = Path(directory)
    counts = SPLITS | rows
    settings = {"vocab_size": vocab_size, "rows": counts}
    if stdlib_text.is_finished(directory, settings):
        return directory
    rng = random.Random(0)
    pairs: dict[str, dict[str, str]] = {}  # by their English: no sentence is in two splits
    while len(pairs) < sum(counts.values()):
        pair = sentence(rng)
        pairs.setdefault(pair["en"], pair)
    remaining = iter(pairs.values())
    splits = {split: [next(remaining) for _ in range(count)] for split, count in counts.items()}
    for split, chosen in splits.items():
        stdlib_text.write_rows(directory / f"{split}.jsonl", [{"translation": pair} for pair in chosen])
    texts = [text for pair in splits["train"] for text in pair.values()]
    train_tokenizer(texts, vocab_size).save_pretrained(directory / "tokenizer")
    stdlib_text.finish(directory, settings, counts)
    return directory


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of both languages that puts `<eos>` after a text."""
    trained = stdlib_text.train_tokenizer(texts, vocab_size, SPECIAL_TOKENS)
    inner = trained.backend_tokenizer
    eos = ("<eos>", trained.eos_token_id)
    inner.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[eos])
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **SPECIAL_TOKENS)


if __name__ == "__main__":
    stdlib_text.prepare_by_flags(prepare, "runs/tiny_translations", __doc__)
