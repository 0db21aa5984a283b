"""Translation: the small data set, BLEU on literal texts, and the recipe."""

import random
from functools import partial

import numpy as np
import pytest
import sacrebleu
import tiny_translations
import translation
from datasets import load_dataset
from paths import RECIPES
from recipe_runs import results, toy_flags
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, EvalPrediction, Seq2SeqTrainer

from hf_sparse24 import Sparse24Seq2SeqTrainer, sparse_weights

pytestmark = pytest.mark.usefixtures("metrics_cache")
flags = partial(toy_flags, "translation")


# --- data ---


def test_tiny_translations_are_the_same_everywhere(pairs, tmp_path):
    again = tiny_translations.prepare(tmp_path / "again", vocab_size=400, train=400, validation=20, test=20)
    files = sorted(path.relative_to(pairs) for path in pairs.rglob("*.json*"))
    assert len(files) == 1 + 3 + 2  # manifest, splits, tokenizer
    for file in files:
        assert (again / file).read_bytes() == (pairs / file).read_bytes()
    splits = load_dataset(str(pairs))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 400, "validation": 20, "test": 20}
    english = [pair["en"] for rows in splits.values() for pair in rows["translation"]]
    assert len({*english}) == 440  # none in two splits
    stamp = (pairs / "manifest.json").stat().st_mtime_ns
    tiny_translations.prepare(pairs, vocab_size=400, train=400, validation=20, test=20)
    assert (pairs / "manifest.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("order", ["second", "inverted", "last"])
def test_the_verb_is_where_german_has_it(order):
    """A present clause has one verb; others have `hat` or `kann`, and the second verb last or just before."""
    present = {verb.german[0] for verb in (*tiny_translations.ACTIONS, *tiny_translations.GIFTS)}
    others = {word for verb in (*tiny_translations.ACTIONS, *tiny_translations.GIFTS) for word in verb.german[1:]}
    rng, seen = random.Random(0), set()
    for _ in range(200):
        words = tiny_translations.clause(rng, ("he", "er"), order)[1].split()
        verb = next(word for word in words if word in present | {"hat", "kann"})
        place = {"second": 1, "inverted": 0, "last": len(words) - 1}[order]
        assert words[place] == verb and words[{"inverted": 1}.get(order, 0)] == "er"
        if verb in ("hat", "kann"):
            assert words[-2 if order == "last" else -1] in others
        seen.add(verb)
    assert seen == present | {"hat", "kann"}


def test_bleu_is_that_of_the_texts(pairs):
    """Whatever the order of the rows is; pad tokens and what lies behind eos do not count."""
    tokenizer = AutoTokenizer.from_pretrained(pairs / "tokenizer")
    texts = ["Der Hund sieht das Haus heute nicht.", "Die Frau kauft das Buch und den Tisch."]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    compute = translation.make_metrics(tokenizer, {tuple(row): text for row, text in zip(ids, texts)})
    width = max(map(len, ids)) + 3
    labels = np.full((2, width), -100)
    predictions = np.full((2, width), tokenizer.pad_token_id)
    for place, row in enumerate(reversed(ids)):
        labels[place, : len(row)] = row
        predictions[place, 1 : len(row) + 1] = row  # after the token that a decoder starts with
    labels[0, len(ids[1])] = tokenizer.pad_token_id
    assert compute(EvalPrediction(predictions=predictions, label_ids=labels))["bleu"] == pytest.approx(100)
    wrong = tokenizer("Die Frau kauft das Haus und den Tisch.")["input_ids"]
    predictions[0] = -100
    predictions[0, 1 : len(wrong) + 1] = wrong
    expected = sacrebleu.corpus_bleu(["Die Frau kauft das Haus und den Tisch.", texts[0]], [texts[::-1]]).score
    assert 0 < compute(EvalPrediction(predictions=predictions, label_ids=labels))["bleu"] == expected < 100


# --- training ---


@pytest.mark.parametrize("method", ["dense", "s-ste", "step"])
def test_trains_evaluates_and_saves(pairs, tmp_path, method):
    settings = {"max_steps": 3, "method": method, "generation_num_beams": 2, "generation_max_length": 24}
    trainer = translation.main(flags(pairs, tmp_path / "out", **settings))
    assert type(trainer) is (Seq2SeqTrainer if method == "dense" else Sparse24Seq2SeqTrainer)
    found = results(tmp_path / "out")
    assert {"eval_bleu", "test_bleu", "eval_loss", "train_loss"} <= found.keys()
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(sparse_weights(saved)) == (0 if method == "dense" else 4)
    inputs = tokenizer(["The dog sees a house."], return_tensors="pt")
    generated = saved.generate(**inputs, max_length=12)
    assert generated[0, 0] == tokenizer.pad_token_id and generated[0, -1] == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "s-ste"])
def test_learns(tmp_path, method):
    pairs = tiny_translations.prepare(tmp_path / "pairs")
    yaml = [str(RECIPES / "pretrain" / f"{name}.yaml") for name in ("transformer-base", "translation-toy")]
    given = {"dataset": pairs, "tokenizer_name": pairs / "tokenizer", "output_dir": tmp_path / "out", "method": method}
    translation.main([*yaml, "--report_to=none", *(f"--{key}={value}" for key, value in given.items())])
    assert results(tmp_path / "out")["eval_bleu"] > 50


def test_longer_pairs_are_not_trained_on(pairs):
    tokenizer = AutoTokenizer.from_pretrained(pairs / "tokenizer")
    args = translation.TranslationArguments(dataset=str(pairs), max_length=16, prefix="now: ")
    splits, references = translation.make_datasets(args, tokenizer)
    assert 0 < len(splits["train"]) < 400
    for name, rows in splits.items():
        assert all(max(len(row["input_ids"]), len(row["labels"])) <= 16 for row in rows), name
        assert tokenizer.decode(rows[0]["input_ids"]).startswith("now: ")
    assert len(splits["validation"]) == 20 and {*map(tuple, splits["validation"]["labels"])} <= references.keys()
