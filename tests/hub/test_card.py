"""Model cards: whether what they say is true, and what they keep of a card that was there."""

import json

import pytest
import torch
import zoo
from huggingface_hub import EvalResult, ModelCard
from sparse_models import DENSE_METHODS, ended_dense, patched
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    export_model,
    make_model_card,
    oneshot,
    pack_model,
    patch_model,
    sparse_run,
)
from hf_sparse24.config import SavedConfig
from hf_sparse24.hub import picture
from hf_sparse24.hub.card import BEGIN, END, write_model_card
from hf_sparse24.hub.picture import by_step, last_evaluation, metrics_of
from hf_sparse24.methods import METHODS
from hf_sparse24.methods.settings import SHARED

HISTORY = [{"step": step, "loss": 5 - step / 50, "flip_rate": 0.1 / step} for step in range(1, 101)]
EVALUATED = [{"step": 50, "eval_loss": 4.2, "eval_runtime": 1.0}, {"step": 100, "eval_loss": 3.25, "eval_runtime": 1.0}]


def code(card: ModelCard, number: int) -> str:
    """A block of Python of a card."""
    return card.text.split("```python\n")[number + 1].partition("```")[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_card_with_its_paper_and_settings_to_copy(method):
    model = patched(method=method)
    card = make_model_card(model)
    assert f"Method `{method}` ([arXiv " in card.text
    settings = next(code(card, i) for i in range(4) if code(card, i).startswith("Sparse24Config("))
    assert eval(settings, {"Sparse24Config": Sparse24Config}) == sparse_run(model).config
    ModelCard(str(card))  # it can be read again


def test_the_counted_zeros_are_those_of_the_export(tmp_path):
    model = patched(target_modules=["up_proj", "o_proj"])
    export_model(model, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    sparse = [weight for name, weight in exported.named_parameters() if "up_proj" in name or "o_proj" in name]
    zeros = sum(int((weight == 0).sum()) for weight in sparse)
    total = sum(parameter.numel() for parameter in exported.parameters())
    text = make_model_card(model).text
    assert f" {zeros / total:.1%} of all {total:,} parameters are zero" in text


@pytest.mark.parametrize("format", ["dense", "packed", "training"])
def test_a_card_counts_the_layers_of_each_pattern(format, tmp_path):
    """With a pattern for each layer, the card counts them, and its code has them."""
    layers = [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
    ]
    own = dict(zip([*layers, "model.layers.0.mlp.gate_proj"], ["8:16"] * 4 + ["16:32"] * 3))
    model = patched("llama", method="fixed-mask", target_modules="all-linear", layer_patterns=own)
    if format == "training":
        model.save_pretrained(tmp_path)
    else:
        export_model(model, tmp_path, format=format)
    card = make_model_card(model, format=format)
    assert "with **N:M sparse weights**" in card.text
    assert " M - N are zero (2:4 in 7 layers, 8:16 in 4 layers, 16:32 in 3 layers)." in card.text
    assert {"2:4-sparsity", "8:16-sparsity", "16:32-sparsity"} <= {*card.data.tags}
    settings = next(code(card, i) for i in range(4) if code(card, i).startswith("Sparse24Config("))
    assert eval(settings, {"Sparse24Config": Sparse24Config}) == sparse_run(model).config


def test_a_card_says_one_pattern_of_all_layers():
    for sparse in ({"pattern": "8:16"}, {"layer_patterns": {"mlp": "8:16"}}):
        card = make_model_card(patched("llama", method="fixed-mask", **sparse))
        assert "with **8:16 sparse weights** by hf_sparse24: of every 16 consecutive weights" in card.text
        assert "8:16-sparsity" in card.data.tags and "2:4-sparsity" not in card.data.tags


@pytest.mark.parametrize("method", DENSE_METHODS)
def test_weights_that_a_run_has_ended_with_are_called_dense(method):
    model = ended_dense(method)
    sparse = make_model_card(patched(method=method))
    card = make_model_card(model, existing=sparse)
    assert "**its weights are dense**" in card.text and "fixed-mask" not in card.text and "are zero" not in card.text
    assert {*sparse.data.tags} - {*card.data.tags} == {"2:4-sparsity", "semi-structured-sparsity"}


def test_a_card_says_how_oneshot_has_pruned(tmp_path):
    """Also of a model that was loaded again; a fresh one that takes its config has not been pruned so."""
    model = zoo.build("llama")
    oneshot(model, [zoo.batch(i) for i in range(3)], passes=1)
    expected = ["| criterion | sparsegpt |", "| batches | 3 |", "| tokens | 72 |", "| reconstruct | block |"]
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    pack_model(packed)
    for one in (model, loaded):
        text = make_model_card(one).text
        assert all(line in text for line in expected)
    assert packed.config.quantization_config.facts.pruning == loaded.config.quantization_config.facts.pruning
    export_model(model, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "sparse24.json").read_text())["config"]["pruning"]["batches"] == 3
    other = zoo.build("llama")
    patch_model(other, loaded.config.quantization_config.config)
    assert "sparsegpt" not in make_model_card(other).text and "`oneshot`" not in make_model_card(patched()).text
    with pytest.raises(ValueError, match="pruning='x': must be a dict"):
        SavedConfig.from_dict({"pruning": "x"})


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("plain", {"method": "t-sr-ste", "target_modules": "all-linear", "masked_decay": 1e-4}),
        (
            "my \"best\"\nmodel\\new 'ü'",
            {"method": "fixed-mask", "weight_grad": "mvue", "layer_patterns": {"up_proj": "1:4"}},
        ),
    ],
)
def test_the_code_of_a_card_runs(folder, settings, tmp_path):
    """To load the export, and to train on with a config that has its layers and, of the same method, its settings."""
    model = patched(**settings).eval()
    export_model(model, tmp_path / folder)
    card = ModelCard(str(make_model_card(model, model_id=str(tmp_path / folder))))
    ids = zoo.batch()["input_ids"]
    names: dict = {}
    exec(code(card, 0), names)
    assert type(names["model"]) is LlamaForCausalLM and torch.equal(names["model"](ids).logits, model(ids).logits)
    exec(code(card, 1), names | {"Sparse24Config": Sparse24Config}, names)
    again = LlamaForCausalLM.from_pretrained(tmp_path / folder, quantization_config=names["quantization_config"])
    assert torch.equal(again(ids).logits, model(ids).logits)
    kept = {} if settings["method"] == "t-sr-ste" else settings
    shared = {name: getattr(sparse_run(model).config, name) for name in SHARED} | {"method": "fixed-mask"} | kept
    assert sparse_run(again).config == Sparse24Config(**shared) and "None" not in code(card, 1)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_an_export_has_a_card_that_keeps_what_its_author_wrote(format, tmp_path):
    model = patched()
    (tmp_path / "README.md").write_text("# Poems\n\nRead them.\n")
    export_model(model, tmp_path, "dense")
    export_model(model, tmp_path, format)
    text = (tmp_path / "README.md").read_text()
    assert "# Poems\n\nRead them.\n" in text and text.count(BEGIN) == 1
    assert ("import hf_sparse24  # tells" in text) == (format == "packed")
    (tmp_path / "README.md").write_text("---\na: [\n---\n")
    with pytest.raises(ValueError, match=r"README.md cannot be read, correct it first"):
        export_model(model, tmp_path)


def test_results_stand_beside_the_dense_control():
    model = patched()
    card = make_model_card(
        model, log_history=HISTORY + EVALUATED, dense_control={"eval_loss": 3.0, "epoch": 1.0}, datasets="wikitext"
    )
    assert "| loss | 3.25 | 3 | +0.25 |" in card.text and not any(x in card.text for x in ("runtime", "epoch"))
    assert card.data.datasets == "wikitext"
    assert "| perplexity | 9 |" in make_model_card(model, results={"perplexity": 9.0}).text
    assert "## Results" not in make_model_card(model).text


def test_wrong_arguments_are_named():
    model = patched()
    with pytest.raises(ValueError, match="format='zip': must be one of"):
        make_model_card(model, format="zip")
    with pytest.raises(TypeError, match="'lisence' is neither an argument nor metadata"):
        make_model_card(model, lisence="mit")
    with pytest.raises(ValueError, match="not patched"):
        make_model_card(zoo.build("llama"))


def test_what_is_read_of_a_log():
    assert by_step(HISTORY + EVALUATED)[50] == {"loss": 4, "flip_rate": 0.002, "eval_loss": 4.2, "eval_runtime": 1.0}
    assert metrics_of(last_evaluation(by_step(EVALUATED))) == {"eval_loss": 3.25}
    assert by_step([{"train_runtime": 1.0, "step": 3}, {"loss": "4", "step": 3}]) == {}


def test_the_base_model_is_one_of_the_hub(tmp_path):
    model = patched()
    for name, expected in {
        "openai-community/gpt2": "openai-community/gpt2",
        "me/tiny": None,
        str(tmp_path): None,
    }.items():
        model.config._name_or_path = name
        card = make_model_card(model, model_id="me/tiny")
        assert card.data.base_model == expected
        assert card.data.get("base_model_relation") == (expected and "finetune")
        assert ("made from openai" in card.text) == (expected is not None)
    assert make_model_card(model, base_model="a/b", base_model_relation="quantized").data.base_model == "a/b"


def test_what_the_author_wrote_is_kept_and_what_the_caller_gives_wins():
    model = patched()
    theirs = ModelCard("---\nlicense: mit\ntags: [poems]\nlibrary_name: mine\nodd: [1]\n---\n# Poems\n\nRead them.\n")
    metric = EvalResult("text-generation", "wikitext", "WikiText", "loss", 4.0)
    card = make_model_card(model, existing=theirs, results={"eval_loss": 4.0}, eval_results=[metric], tags="t")
    assert card.text.startswith("# Poems\n\nRead them.\n") and card.text.endswith(f"{END}\n")
    data = card.data.to_dict()
    assert data["license"] == "mit" and data["library_name"] == "mine" and data["odd"] == [1]
    assert data["tags"] == ["poems", "hf_sparse24", "2:4-sparsity", "semi-structured-sparsity", "t"]
    assert str(theirs).startswith("---\nlicense: mit\ntags:\n- poems\nlibrary")  # untouched
    again = make_model_card(model, existing=card, results={"eval_loss": 3.0}, license="apache-2.0")
    assert again.data.license == "apache-2.0" and "| loss | 3 |" in again.text and "| loss | 4 |" not in again.text
    assert ModelCard(str(again)).data.eval_results == [metric]
    assert again.text.count(BEGIN) == again.text.count(END) == 1
    broken = ModelCard(f"# Poems\n\n{BEGIN}\n\nRead them.\n")  # its author has deleted the end of our part
    assert "Read them." in make_model_card(model, existing=broken).text


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_the_picture_is_there_where_matplotlib_is(tmp_path, monkeypatch, caplog, has_matplotlib):
    if not has_matplotlib:
        monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with caplog.at_level("WARNING"):
        write_model_card(patched(), tmp_path, log_history=HISTORY + EVALUATED)
    named = "](training.png)" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "training.png").exists() == named == has_matplotlib != ("install matplotlib" in caplog.text)
    if has_matplotlib:
        assert (tmp_path / "training.png").stat().st_size < 60_000
        (tmp_path / "again").mkdir()
        again = picture.write_picture(tmp_path / "again", HISTORY + EVALUATED)
        assert again.read_bytes() == (tmp_path / "training.png").read_bytes()


def test_cells_do_not_end_early():
    text = make_model_card(patched(), hyperparameters={"target": "(up|down)"}).text
    rows = [line for line in text.splitlines() if line.startswith("| target")]
    assert rows == ["| target | (up&#124;down) |"]
