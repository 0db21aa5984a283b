"""Pushing to the Hub and loading from it: the real client against a server on this machine (`hub_server.py`)."""

import copy
import json
import pickle
import time
import types

import huggingface_hub
import peft
import pytest
import torch
import zoo
from datasets import Dataset
from hub_server import Cut, HTTPError, HubServer
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Trainer, export_model, patch_model, push_to_hub, unpatch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import patched_config
from hf_sparse24.weights.sparse_weight import sparse_weights
from hf_sparse24.weights.storage import PACKED

# The client's own: it passes the files of Git LFS to its HTTP library in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

REPO = "ada/tiny"
WEIGHTS = "model.safetensors"
FORMATS = ["dense", "packed", "training"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server, and the client set up for it as HF_ENDPOINT and the other variables do where they are set at import."""
    with HubServer().running() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        monkeypatch.setattr("transformers.utils.hub._hf_api", HfApi(endpoint=server.url))
        for module in ("utils._http", "file_download"):  # they wait before they try again
            clock = types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)
            monkeypatch.setattr(f"huggingface_hub.{module}.time", clock)
        huggingface_hub.utils.disable_progress_bars()
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


def patched(method: str = "s-ste", **overrides):
    model = zoo.build("llama", **overrides)
    patch_model(model, Sparse24Config(method=method))
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(zoo.batch()["input_ids"]).logits


def card(hub: HubServer, repo_id: str = REPO, revision: str = "main") -> str:
    return hub.files(repo_id, revision)["README.md"].decode()


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_pushed_computes_the_same(hub, format):
    model = patched()
    url = model.push_to_hub("tiny", format=format, private=True).commit_url
    assert url.startswith(f"{hub.url}/{REPO}/commit/") and hub.repos[REPO].private
    loaded = AutoModelForCausalLM.from_pretrained(REPO)
    assert torch.equal(logits(loaded), logits(model))
    assert (patched_config(loaded) is not None) == (format == "training")
    assert bool(sparse_weights(loaded, PACKED)) == (format == "packed")
    assert is_nm_sparse(loaded.model.layers[0].mlp.up_proj.weight) == (format != "training")


def test_int8_values_are_pushed_by_a_model_and_by_a_trainer(hub, tmp_path):
    model = patched()
    export_model(model, tmp_path / "export", "packed", values="int8")
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
    model.push_to_hub(REPO, format="packed", values="int8")
    args = TrainingArguments(str(tmp_path / "run"), report_to="none", use_cpu=True, hub_model_id="ada/other")
    Sparse24Trainer(model, args).push_to_hub(format="packed", values="int8")
    for name in (REPO, "ada/other"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(name)), expected)
        assert "their int8 values, a scale for each row and 128 weights" in card(hub, name)
    with pytest.raises(ValueError, match="values='int8': with format='dense'"):
        model.push_to_hub(REPO, values="int8")


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_training_checkpoint_beside_the_export(hub, format):
    model = patched()
    for size in ("60KB", "5GB"):
        model.push_to_hub(REPO, format=format, checkpoint=True, max_shard_size=size)
    loaded, to_train = (AutoModelForCausalLM.from_pretrained(REPO, subfolder=name) for name in ("", "checkpoint"))
    assert patched_config(loaded) is None and patched_config(to_train) is not None
    assert torch.equal(logits(loaded), logits(model)) and torch.equal(logits(to_train), logits(model))
    assert sum(".safetensors" in name for name in hub.files(REPO)) == 2  # no shards of the first push
    assert f'from_pretrained("{REPO}", subfolder="checkpoint")' in card(hub)
    model.push_to_hub(REPO, format=format)
    assert "checkpoint/model.safetensors" in hub.files(REPO) and "subfolder" not in card(hub)


def test_a_dense_push_is_what_export_model_writes(hub, tmp_path):
    """`test_export.py` shows that this loads where hf_sparse24 cannot be imported."""
    model = patched()
    push_to_hub(model, REPO)
    export_model(model, tmp_path / "export")
    pushed = hub.files(REPO)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == {
        name: content for name, content in pushed.items() if name not in (".gitattributes", "README.md")
    }


def test_the_card_of_a_training_checkpoint_says_what_to_import(hub):
    push_to_hub(patched(), REPO, format="training")
    assert "**Import hf_sparse24 before you load it**" in card(hub) and "import hf_sparse24  #" in card(hub)
    push_to_hub(patched(), REPO)
    assert "import hf_sparse24\n" not in card(hub) and "training checkpoint" not in card(hub)


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_that_is_not_finite_is_not_pushed(hub, format):
    model = patched()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"NaN or inf in the weights of lm_head.weight"):
        model.push_to_hub(REPO, format=format)
    assert not hub.repos


def test_a_tokenizer_tags_and_metadata_go_along(hub):
    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "tokenizer.json").write_text("{}")

    model = patched()
    model.add_model_tags("mine")
    model.push_to_hub(REPO, processing_class=Tokenizer(), tags=["yours"], license="mit", commit_message="First")
    assert hub.files(REPO)["tokenizer.json"] == b"{}" and hub.repos[REPO].messages[-1] == "First"
    metadata = ModelCard(card(hub)).data
    assert {"hf_sparse24", "2:4-sparsity", "mine", "yours"} <= set(metadata.tags) and metadata.license == "mit"
    with pytest.raises(TypeError, match=r"'licence' is neither an argument nor metadata"):
        model.push_to_hub(REPO, licence="mit")
    with pytest.raises(TypeError, match=r"'tokenizer' is no argument .*: write processing_class=tokenizer"):
        model.push_to_hub(REPO, tokenizer=Tokenizer())


def test_the_same_push_again_makes_no_commit(hub):
    model = patched()
    model.push_to_hub(REPO)
    commits = len(hub.repos[REPO].commits)
    model.push_to_hub(REPO)
    assert len(hub.repos[REPO].commits) == commits


@pytest.mark.usefixtures("dense_math")
def test_shards_that_a_push_replaces_go_and_other_files_stay(hub):
    model = patched()
    push_to_hub(model, REPO, format="training", max_shard_size="60KB")
    assert "model.safetensors.index.json" in hub.files(REPO)
    HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=REPO)
    for format, size in [("packed", "40KB"), ("dense", "60KB"), ("packed", "5GB")]:
        push_to_hub(model, REPO, format=format, max_shard_size=size)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPO)), logits(model))
    push_to_hub(model, REPO)
    assert [name for name in hub.files(REPO) if ".safetensors" in name] == [WEIGHTS]
    assert hub.files(REPO)["notes.txt"] == b"mine"
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(REPO)), logits(model))


def test_branches_and_pull_requests(hub):
    model = patched()
    model.push_to_hub(REPO, revision="sparse")
    assert WEIGHTS in hub.files(REPO, "sparse") and WEIGHTS not in hub.files(REPO)
    hub.users["hf_guest"] = "bob"
    commit = model.push_to_hub(REPO, create_pr=True, token="hf_guest")
    assert commit.pr_url == f"{hub.url}/{REPO}/discussions/1"
    assert WEIGHTS in hub.files(REPO, "refs/pr/1") and WEIGHTS not in hub.files(REPO)
    loaded = AutoModelForCausalLM.from_pretrained(REPO, revision="sparse")
    assert torch.equal(logits(loaded), logits(model))


def test_an_upload_that_broke_off_goes_on_where_it_was(hub):
    """Two shards: the second one is cut, so that the second push sends it alone."""
    model = patched()
    with (
        hub.broken("^PUT /lfs/", Cut(), first=1),
        pytest.raises(Exception, match=r"model-0"),
    ):
        push_to_hub(model, REPO, format="training", max_shard_size="60KB")
    assert list(hub.files(REPO)) == [".gitattributes"] and len(hub.objects) == 1
    sent = set(hub.objects)
    hub.requests.clear()
    push_to_hub(model, REPO, format="training", max_shard_size="60KB")
    assert len(hub.objects) > 1 and not any(oid in request for request in hub.requests for oid in sent)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPO)), logits(model))


def test_a_commit_that_failed_is_made_by_the_same_call(hub):
    model = patched()
    with hub.broken("/commit/", Cut()), pytest.raises(Exception, match=r"Server disconnected"):
        push_to_hub(model, REPO)
    hub.requests.clear()
    push_to_hub(model, REPO)
    assert WEIGHTS in hub.files(REPO) and not any(request.startswith("PUT") for request in hub.requests)


def test_errors_are_those_of_the_client_and_no_repository_is_made(hub, monkeypatch):
    model = patched()
    with pytest.raises(HfHubHTTPError, match=r"401"):
        model.push_to_hub(REPO, token="hf_wrong")
    with pytest.raises(HfHubHTTPError, match=r"(?s)403.*rights.*grace"):
        model.push_to_hub("grace/tiny")
    with pytest.raises(ValueError, match=r"must be one of"):
        model.push_to_hub(REPO, format="gguf")
    with pytest.raises(ValueError, match=r"repo_id|Repo id"):
        model.push_to_hub("a/b/c")
    with (
        hub.broken("/repos/create", HTTPError(500, "out of order")),
        pytest.raises(HfHubHTTPError, match="out of order"),
    ):
        model.push_to_hub(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(ConnectionError, match=r"offline mode is enabled.*unset .*HF_HUB_OFFLINE"):
        model.push_to_hub(REPO)
    assert not hub.repos


def test_a_card_that_cannot_be_read_from_the_hub_is_not_replaced(hub):
    model = patched()
    model.push_to_hub(REPO)
    with hub.broken("resolve/main/README.md", HTTPError(500, "try later")), pytest.raises(LocalEntryNotFoundError):
        model.push_to_hub(REPO, license="mit")
    assert "license" not in card(hub)


def test_a_card_on_the_hub_keeps_what_its_author_wrote(hub):
    HfApi().create_repo(REPO)
    theirs = (
        "---\nlicense: apache-2.0\nlanguage:\n- de\ntags:\n- poems\n---\r\n\r\n# My poems\r\n\r\nRead them aloud.\r\n"
    )
    HfApi().upload_file(path_or_fileobj=theirs.encode(), path_in_repo="README.md", repo_id=REPO)
    model = patched()
    model.push_to_hub(REPO)
    first = card(hub)
    assert "# My poems\r\n\r\nRead them aloud." in first and "## How to load it" in first
    metadata = ModelCard(first).data
    assert metadata.license == "apache-2.0" and metadata.language == ["de"]
    assert metadata.tags[0] == "poems" and "hf_sparse24" in metadata.tags and metadata.library_name == "transformers"
    edited = first.replace("Read them aloud.", "Read them twice.") + "\nThe end.\n"
    HfApi().upload_file(path_or_fileobj=edited.encode(), path_in_repo="README.md", repo_id=REPO)
    model.push_to_hub(REPO, format="training")
    second = card(hub)
    assert "Read them twice." in second and "The end." in second and "training checkpoint" in second
    assert second.count("## How to load it") == 1


def test_a_card_with_broken_metadata_is_named(hub):
    HfApi().create_repo(REPO)
    HfApi().upload_file(path_or_fileobj=b"---\ntags: [\n---\nhi", path_in_repo="README.md", repo_id=REPO)
    with pytest.raises(ValueError, match=r"metadata of README.md of ada/tiny cannot be read, correct or remove it"):
        patched().push_to_hub(REPO)


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
def test_wrappers_are_looked_through_and_adapters_merged(hub):
    model = patched()
    torch.compile(model).push_to_hub("through-attribute")
    push_to_hub(torch.nn.DataParallel(model), "through-function")
    through_attribute, through_function = (hub.files(f"ada/through-{how}") for how in ("attribute", "function"))
    assert through_attribute[WEIGHTS] == through_function[WEIGHTS]
    assert b"LlamaForCausalLM.from_pretrained" in through_function["README.md"]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    with_adapter = peft.get_peft_model(model, config).eval()
    push_to_hub(with_adapter, REPO)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPO)), logits(with_adapter.merge_and_unload()))
    with pytest.raises(ValueError, match=r"a training checkpoint has no PEFT adapters"):
        push_to_hub(peft.get_peft_model(patched(), config), "other", format="training")
    assert "ada/other" not in hub.repos


def test_only_the_first_process_pushes(hub, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert patched().push_to_hub(REPO) is None and not hub.requests


def trainer(tmp_path, **overrides) -> Sparse24Trainer:
    rows = Dataset.from_dict({name: tensor.tolist() for name, tensor in zoo.batch(rows=16).items()})
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "push_to_hub": True,
    }
    arguments = TrainingArguments(str(tmp_path / "tiny"), **(defaults | overrides))
    return Sparse24Trainer(zoo.build("llama"), arguments, train_dataset=rows, eval_dataset=rows)


def test_strategy_end_pushes_the_export_when_asked(hub, tmp_path):
    run = trainer(tmp_path, hub_strategy="end")
    run.train()
    assert len(hub.repos[REPO].commits) == 1  # the one that made the repository
    run.evaluate()
    commit = run.push_to_hub(dense_control={"eval_loss": 4.0}, dataset_tags="wikitext", language="en")
    assert commit.commit_message == "End of training"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPO)), logits(run.model))
    files = hub.files(REPO)
    assert {"config.json", WEIGHTS, "README.md", "loss.png"} <= set(files)
    assert not [name for name in files if "/" in name or name.endswith((".bin", ".pt"))]
    assert "quantization_config" not in json.loads(files["config.json"])
    text = card(hub)
    assert "| metric | this model | dense control | difference |" in text and "![Losses by the step](loss.png)" in text
    assert "| learning rate | 5e-05 |" in text and "language: en" in text
    assert ModelCard(text).data.datasets == "wikitext"
    assert f"| loss | {run.state.log_history[-1]['eval_loss']:.4g} | 4 |" in text
    # What it saved is the training checkpoint, as without the Hub.
    assert patched_config(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")) is not None
    run.push_to_hub(checkpoint=True)
    assert patched_config(AutoModelForCausalLM.from_pretrained(REPO, subfolder="checkpoint")) is not None


def test_pushes_at_saves_are_the_trainers_and_the_export_replaces_them(hub, tmp_path, caplog):
    run = trainer(tmp_path, hub_always_push=True, hub_private_repo=True)
    assert "hub_strategy='end'" in caplog.text
    run.train()
    run._finish_current_push()
    assert hub.repos[REPO].private and "Training in progress, step 1" in hub.repos[REPO].messages
    assert patched_config(AutoModelForCausalLM.from_pretrained(REPO)) is not None
    run.push_to_hub(format="packed")
    assert sparse_weights(AutoModelForCausalLM.from_pretrained(REPO), PACKED) and WEIGHTS not in hub.files(REPO)


def test_a_failed_push_of_the_trainer_loses_nothing(hub, tmp_path):
    run = trainer(tmp_path, hub_strategy="end")
    run.train()
    with hub.broken("^PUT /lfs/", Cut()), pytest.raises(Exception, match=r"Error while uploading"):
        run.push_to_hub()
    assert patched_config(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")) is not None
    assert run.push_to_hub().oid == hub.repos[REPO].refs["main"] and WEIGHTS in hub.files(REPO)


def test_no_rights_are_told_before_training(hub, tmp_path):
    with pytest.raises(HfHubHTTPError, match=r"(?s)403.*grace"):
        trainer(tmp_path, hub_model_id="grace/tiny")


def test_a_model_without_sparsity_is_pushed_as_by_transformers(hub, tmp_path):
    run = trainer(tmp_path, hub_strategy="end")
    unpatch_model(run.model)
    run.push_to_hub()
    assert "generated_from_trainer" in card(hub) and "hf_sparse24" not in card(hub)
    assert AutoConfig.from_pretrained(REPO).model_type == "llama"
