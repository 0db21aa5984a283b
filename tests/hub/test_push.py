"""Pushing to the Hub, which `fake_hub.py` stands for."""

import copy
import json
import logging
import pickle
from importlib.util import find_spec

import peft
import pytest
import torch
import zoo
from datasets import Dataset
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from sparse_models import logits, patched
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Trainer,
    export_model,
    push_to_hub,
    unpatch_model,
)
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import patched_config
from hf_sparse24.weights.sparse_weight import sparse_weights
from hf_sparse24.weights.storage import PACKED

REPO = "ada/tiny"
WEIGHTS = "model.safetensors"
FORMATS = ["dense", "packed", "training"]


@pytest.fixture
def hub(monkeypatch, tmp_path) -> FakeHub:
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr("hf_sparse24.hub.push.HfApi", lambda: hub)
    monkeypatch.setattr("transformers.utils.hub._hf_api", hub)  # the Trainer's
    logging.Logger.warning_once.cache_clear()  # Transformers warns once in a process
    return hub


def card(hub: FakeHub, repo_id: str = REPO, revision: str = "main") -> str:
    return hub.files(repo_id, revision)["README.md"].decode()


def load(hub: FakeHub, repo_id: str = REPO, revision: str = "main", **options):
    return AutoModelForCausalLM.from_pretrained(hub.folder(repo_id, revision), **options)


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_pushed_computes_the_same(hub, format):
    model = patched()
    url = model.push_to_hub("tiny", format=format, private=True).commit_url
    assert f"/{REPO}/commit/" in url and hub.private[REPO]
    loaded = load(hub)
    assert torch.equal(logits(loaded), logits(model))
    assert (patched_config(loaded) is not None) == (format == "training")
    assert bool(sparse_weights(loaded, PACKED)) == (format == "packed")
    assert is_nm_sparse(loaded.model.layers[0].mlp.up_proj.weight) == (format != "training")
    assert ("import hf_sparse24" in card(hub)) == (format != "dense")


def test_int8_values_are_pushed_by_a_model_and_by_a_trainer(hub, tmp_path):
    model = patched()
    export_model(model, tmp_path / "export", "packed", values="int8")
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
    model.push_to_hub(REPO, format="packed", values="int8")
    args = TrainingArguments(str(tmp_path / "run"), report_to="none", use_cpu=True, hub_model_id="ada/other")
    Sparse24Trainer(model, args).push_to_hub(format="packed", values="int8", blocking=True)
    for name in (REPO, "ada/other"):
        assert torch.equal(logits(load(hub, name)), expected) and "int8 values" in card(hub, name)
    with pytest.raises(ValueError, match="values='int8': with format='dense'"):
        model.push_to_hub(REPO, values="int8")


def test_a_dense_push_is_what_export_model_writes(hub, tmp_path):
    """`test_export.py` shows that this loads where hf_sparse24 cannot be imported."""
    model = patched()
    push_to_hub(model, REPO)
    export_model(model, tmp_path / "export")
    pushed = hub.files(REPO)
    pushed["README.md"] = pushed["README.md"].replace(REPO.encode(), b"export").replace(b"tiny", b"export")
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == pushed


def test_what_cannot_be_pushed_makes_no_repository(hub):
    model = patched()
    for options, error, message in (
        ({"format": "gguf"}, ValueError, "format='gguf'"),
        ({"licence": "mit"}, TypeError, "'licence'"),
    ):
        with pytest.raises(error, match=message):
            model.push_to_hub(REPO, **options)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    for format in FORMATS:
        with pytest.raises(ValueError, match=r"lm_head.weight"):
            model.push_to_hub(REPO, format=format)
    assert not hub.messages


def test_a_tokenizer_tags_and_metadata_go_along(hub):
    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "tokenizer.json").write_text("{}")

    model = patched()
    model.add_model_tags("mine")
    model.push_to_hub(REPO, processing_class=Tokenizer(), tags=["yours"], license="mit", commit_message="First")
    assert hub.files(REPO)["tokenizer.json"] == b"{}" and hub.messages[REPO] == ["First"]
    metadata = ModelCard(card(hub)).data
    assert {"hf_sparse24", "2:4-sparsity", "mine", "yours"} <= set(metadata.tags) and metadata.license == "mit"


@pytest.mark.usefixtures("dense_math")
def test_shards_that_a_push_replaces_go_and_other_files_stay(hub):
    model = patched()
    push_to_hub(model, REPO, format="training", max_shard_size="60KB")
    assert "model.safetensors.index.json" in hub.files(REPO)
    (hub.folder(REPO) / "notes.txt").write_bytes(b"mine")
    for format, size in [("packed", "40KB"), ("dense", "60KB"), ("packed", "5GB")]:
        push_to_hub(model, REPO, format=format, max_shard_size=size)
        assert torch.equal(logits(load(hub)), logits(model))
    push_to_hub(model, REPO)
    assert [name for name in hub.files(REPO) if ".safetensors" in name] == [WEIGHTS]
    assert hub.files(REPO)["notes.txt"] == b"mine"
    assert torch.equal(logits(load(hub)), logits(model))


def test_a_card_on_the_hub_keeps_what_its_author_wrote(hub):
    model = patched()
    hub.create_repo(REPO)
    theirs = "---\nlicense: apache-2.0\ntags:\n- poems\n---\r\n\r\n# My poems\r\n\r\nRead them aloud.\r\n"
    (hub.folder(REPO) / "README.md").write_bytes(theirs.encode())
    model.push_to_hub(REPO)
    first = card(hub)
    assert "# My poems\r\n\r\nRead them aloud." in first and "## How to load it" in first
    metadata = ModelCard(first).data
    assert metadata.license == "apache-2.0" and metadata.tags[0] == "poems" and "hf_sparse24" in metadata.tags
    edited = first.replace("Read them aloud.", "Read them twice.") + "\nThe end.\n"
    (hub.folder(REPO) / "README.md").write_bytes(edited.encode())
    model.push_to_hub(REPO, format="training")
    second = card(hub)
    assert "Read them twice." in second and "The end." in second and "training checkpoint" in second
    assert second.count("## How to load it") == 1
    hub.errors["hf_hub_download"] = ConnectionError("try later")  # a card that cannot be read is not replaced
    with pytest.raises(ConnectionError):
        model.push_to_hub(REPO, license="mit")
    del hub.errors["hf_hub_download"]
    (hub.folder(REPO) / "README.md").write_text("---\ntags: [\n---\nhi")
    with pytest.raises(ValueError, match=r"README.md of ada/tiny cannot be read"):
        model.push_to_hub(REPO)
    assert hub.files(REPO)["README.md"].endswith(b"hi")


def test_copies_push_themselves_and_unpatched_models_push_as_ever(hub):
    model = patched()
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same.push_to_hub.args == (same,)
        unpatch_model(same)
        assert same.push_to_hub.__func__ is PreTrainedModel.push_to_hub
    assert model.push_to_hub.args == (model,)
    with pytest.raises(ValueError, match=r"not patched"):
        push_to_hub(unpatch_model(model), REPO)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_wrappers_are_looked_through_and_adapters_refused(hub):
    model = patched()
    torch.compile(model).push_to_hub("through-attribute")
    push_to_hub(torch.nn.DataParallel(model), "through-function")
    through_attribute, through_function = (hub.files(f"ada/through-{how}") for how in ("attribute", "function"))
    assert through_attribute[WEIGHTS] == through_function[WEIGHTS]
    assert b"LlamaForCausalLM.from_pretrained" in through_function["README.md"]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    with_adapter = peft.get_peft_model(model, config).eval()
    for format in ("dense", "training"):
        with pytest.raises(ValueError, match=r"the model has adapters: .*merge_and_unload"):
            push_to_hub(with_adapter, "other", format=format)
    assert "ada/other" not in hub.messages


def test_only_the_first_process_pushes(hub, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert patched().push_to_hub(REPO) is None and not hub.calls


def names_the_library(text: str) -> bool:
    """Whether a card says how to load a training checkpoint, once, and has the tag."""
    says = text.count("import hf_sparse24  # without this line") == text.count(f'from_pretrained("{REPO}")') == 1
    return says and "hf_sparse24" in ModelCard(text).data.tags


def trainer(tmp_path, kind=Sparse24Trainer, **overrides) -> Trainer:
    rows = Dataset.from_dict({name: tensor.tolist() for name, tensor in zoo.batch(rows=16).items()})
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 1}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    hub = {"push_to_hub": True, "hub_strategy": "end"}
    arguments = TrainingArguments(str(tmp_path / "tiny"), **(steps | quiet | hub | overrides))
    return kind(patched(), arguments, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize("steps", [2, 10])
def test_the_end_of_a_training_draws_it(steps, tmp_path):
    """Where there is something to draw."""
    run = trainer(tmp_path, max_steps=steps, push_to_hub=False)
    run.train()
    assert (tmp_path / "tiny" / "training.png").exists() == (steps == 10 and find_spec("matplotlib") is not None)


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_a_plain_trainer_says_that_it_pushes_a_training_checkpoint(strategy, hub, tmp_path, caplog):
    run = trainer(tmp_path, Trainer, hub_strategy=strategy)
    Sparse24Callback.add_to(run)
    run.train()
    assert ("README.md" in hub.files(REPO)) == (strategy == "every_save")
    assert strategy == "end" or names_the_library(card(hub))
    run.push_to_hub()
    assert names_the_library(card(hub)) and "generated_from_trainer" in card(hub)
    assert caplog.text.count("this pushes a training checkpoint") == 1
    assert patched_config(load(hub)) is not None


@pytest.mark.parametrize(
    "push",
    [
        lambda model, folder: model.save_pretrained(folder, push_to_hub=True, repo_id=REPO),
        lambda model, folder: PreTrainedModel.push_to_hub(model, REPO),
    ],
    ids=["save_pretrained", "push_to_hub"],
)
def test_what_transformers_pushes_is_called_a_training_checkpoint(push, hub, tmp_path, caplog):
    model = patched()
    push(model, tmp_path / "saved")
    push(model, tmp_path / "saved")
    assert names_the_library(card(hub)) and caplog.text.count("this pushes a training checkpoint") == 1
    push(unpatch_model(model), tmp_path / "dense")
    assert "quantization_config" not in json.loads(hub.files(REPO)["config.json"])


def test_a_trainer_pushes_the_export_when_asked(hub, tmp_path, caplog):
    run = trainer(tmp_path)
    run.train()
    assert hub.messages[REPO] == []
    run.evaluate()
    commit = run.push_to_hub(dense_control={"eval_loss": 4.0}, dataset_tags="wikitext", language="en", tasks="x")
    assert commit.commit_message == "End of training" and "training checkpoint" not in caplog.text
    assert torch.equal(logits(load(hub)), logits(run.model))
    files = hub.files(REPO)
    assert {"config.json", WEIGHTS, "README.md"} <= set(files)
    assert not [name for name in files if "/" in name or name.endswith((".bin", ".pt"))]
    assert "quantization_config" not in json.loads(files["config.json"])
    text = card(hub)
    assert "| learning rate | 5e-05 |" in text and ModelCard(text).data.datasets == "wikitext"
    assert f"| loss | {run.state.log_history[-1]['eval_loss']:.4g} | 4 |" in text
    # What it saved is the training checkpoint, as without the Hub.
    assert patched_config(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")) is not None


def test_pushes_at_saves_are_the_trainers_and_the_export_replaces_them(hub, tmp_path, caplog):
    run = trainer(tmp_path, hub_strategy="every_save", hub_private_repo=True)
    run.train()
    assert caplog.text.count("hub_strategy='end'") == 1 and names_the_library(card(hub))
    assert hub.private[REPO] and "Training in progress, step 1" in hub.messages[REPO]
    assert patched_config(load(hub)) is not None
    run.push_to_hub(format="packed")
    assert sparse_weights(load(hub), PACKED) and WEIGHTS not in hub.files(REPO)


def test_a_model_without_sparsity_is_pushed_as_by_transformers(hub, tmp_path):
    run = trainer(tmp_path)
    unpatch_model(run.model)
    run.push_to_hub()
    assert "generated_from_trainer" in card(hub) and "hf_sparse24" not in card(hub)
