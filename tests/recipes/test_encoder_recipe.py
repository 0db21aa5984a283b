"""The recipe of an encoder without a head: what its JSON says of a tiny BERT."""

import json
import sys
from pathlib import Path

import pytest
import torch
import zoo
from paths import RECIPES
from transformers import AutoModel

sys.path.insert(0, str(RECIPES / "pretrained"))
import encoder


@pytest.mark.slow
def test_embeddings_before_and_after(tmp_path, tokenizer, capsys):
    config = zoo.build("bert", vocab_size=300, max_position_embeddings=64, initializer_range=0.2).config
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_text(Path(tokenizer, file).read_text())
    for name, words in (("train", "one two three"), ("validation", "four five six")):
        texts = [f"The {i} of {words} is here. And {words} {i} is there now! Yes." for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert encoder.sentences(tmp_path / "train.jsonl", 3) == [
        "The 0 of one two three is here.",
        "And one two three 0 is there now!",
        "The 1 of one two three is here.",
    ]
    flags = {name: tmp_path / f"{file}.jsonl" for name, file in (("calibrate", "train"), ("evaluate", "validation"))}
    flags |= {"model": tmp_path / "model", "output": tmp_path / "out" / "encoder.json", "sentences": 24}
    result = encoder.main([f"--{name}={value}" for name, value in flags.items()])
    assert json.loads((tmp_path / "out" / "encoder.json").read_text()) == result
    assert result["sentences"] == {"train.jsonl": 40, "validation.jsonl": 24}
    for way in (*encoder.WAYS, *encoder.ROUNDED, "16:32 by the default of oneshot, int8 values"):
        assert 0 < result[way]["cosine, lowest 5%"] <= result[way]["cosine"] <= 1
        assert 0 <= result[way]["top-10 neighbours kept"] <= 1
    assert result["2:4 by the default of oneshot"]["cosine"] > result["2:4 by magnitude, nothing else"]["cosine"]
    cosines = [
        result[f"{kind} in groups of {group}"]["cosine"] for kind, group in (("int8", 128), ("int4", 32), ("int3", 32))
    ]
    assert cosines == sorted(cosines, reverse=True) and encoder.bits_of_weights("16:32", 8, 128) == 5.125
    with pytest.raises(SystemExit):
        encoder.main([f"--model={tmp_path / 'absent'}"])
    assert "absent: not there; `make evidence`" in capsys.readouterr().err


def test_what_is_compared():
    dense = torch.nn.functional.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)))
    same = encoder.compare(dense, dense)
    assert set(same.values()) == {1.0}
    other = dense.clone()
    other[0] = -other[0]  # its own neighbours change, and those that had it
    changed = encoder.compare(dense, other)
    assert changed["cosine"] == pytest.approx(28 / 30, abs=1e-4)
    assert 0.5 < changed["top-1 neighbours kept"] < 1 and 0.5 < changed["top-10 neighbours kept"] < 1
