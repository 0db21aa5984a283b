"""Everything once, in a few minutes on a CPU: data, 2:4 training, plot, save, reload, exports, a sample.

`python recipes/quickstart.py` pre-trains a small Llama on the source of Python's standard library as
`quickstart.yaml` says; flags of `train.py` may follow. It fails if the saved model does not come back bit for bit, or
if the exported one is not 2:4.
"""

import subprocess
import sys
from pathlib import Path

import stdlib_text
import torch
import train
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from hf_sparse24 import export_model, is_nm_sparse, make_model_card, sparse_run, sparse_weights
from hf_sparse24.hub.picture import write_picture

RECIPES = Path(__file__).resolve().parent


def main(flags: list[str], data: str = "runs/stdlib_text", max_files: int | None = None) -> None:
    """Run it all.

    Args:
        flags: of `train.py`, on top of `quickstart.yaml`.
        data: directory for the text and its tokenizer.
        max_files: of the standard library to use; None for all.
    """
    corpus = stdlib_text.prepare(data, max_files=max_files)
    files = [f"--dataset={corpus}/train.jsonl", f"--validation_file={corpus}/validation.jsonl"]
    trainer = train.main([f"{RECIPES}/quickstart.yaml", *files, f"--tokenizer_name={corpus}/tokenizer", *flags])
    output, history = Path(trainer.args.output_dir), trainer.state.log_history
    picture = write_picture(output, history)
    sample = check_reload(trainer, output)
    zeros, sparse_zeros = check_export(trainer, output / "export")
    card = make_model_card(trainer.model, model_id=output.name, log_history=history)
    card.save(output / "export" / "README.md")
    ended = sparse_run(trainer.model).phase
    if ended == "sparse":
        check_packed(trainer, output / "packed")
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    print(f"\n--- a sample of the reloaded model ---\n{sample}\n---")
    print(f"validation loss    {losses[0]:.3f} before, {losses[-1]:.3f} after {trainer.state.global_step} steps")
    print(f"zeros              {sparse_zeros:.1%} of the 2:4 weights, {zeros:.1%} of all parameters")
    print(f"plot               {picture or 'none: pip install matplotlib'}")
    print(f"model              {output}  (import hf_sparse24, then from_pretrained; goes on training 2:4)")
    print(f"dense export       {size(output / 'export')} in {output / 'export'}  (zeros and all, loads anywhere)")
    if ended == "sparse":
        print(f"packed export      {size(output / 'packed')} in {output / 'packed'}  (no zeros; import hf_sparse24)")
    print("reload check passed: the same logits, bit for bit, in a fresh process")
    what = "every exported sparse weight is 2:4" if ended == "sparse" else "the run ended dense, and so is the export"
    print(f"export check passed: {what}")


@torch.no_grad()
def check_reload(trainer: Trainer, directory: Path) -> str:
    """Compare the model saved in `directory`, loaded by a fresh process, with the trained one; returns a sample."""
    recorded = directory / "logits.safetensors"
    input_ids = torch.tensor(trainer.eval_dataset[:2]["input_ids"])
    save_file({"input_ids": input_ids, "logits": _logits(trainer.model, input_ids)}, recorded)
    command = [sys.executable, str(RECIPES / "reload.py"), str(directory), str(recorded)]
    reloaded = subprocess.run(command, capture_output=True, text=True)
    if reloaded.returncode != 0:
        raise SystemExit(f"{reloaded.stderr}\nreload check FAILED")
    return reloaded.stdout.rstrip()


def check_export(trainer: Trainer, directory: Path) -> tuple[float, float]:
    """Export to `directory`, load that as a plain model, and check that it is 2:4 and computes the same.

    Returns:
        The share of zeros among all its parameters, and among those under the 2:4 pattern.
    """
    export_model(trainer.model, directory)
    trainer.processing_class.save_pretrained(directory)
    exported = AutoModelForCausalLM.from_pretrained(directory).eval()
    trained = {name: weight for name, weight in sparse_weights(trainer.model).items() if weight.run.phase != "dense"}
    weights = {name: exported.get_parameter(name) for name in trained}
    dense = [name for name, weight in weights.items() if not is_nm_sparse(weight, dim=trained[name].input_dim)]
    if dense:
        raise SystemExit(f"export check FAILED: not 2:4 in {directory}: {', '.join(dense)}")
    input_ids = torch.tensor(trainer.eval_dataset[:2]["input_ids"])
    difference = (_logits(exported, input_ids) - _logits(trainer.model, input_ids)).abs().max().item()
    if difference > 1e-3:  # sums in another order, no more
        raise SystemExit(f"export check FAILED: the logits of {directory} differ by up to {difference:.3g}")
    return _share_of_zeros(exported.parameters()), _share_of_zeros(weights.values())


def check_packed(trainer: Trainer, directory: Path) -> None:
    """Export to `directory` in packed form, and check that it computes the same but for the order of its sums."""
    export_model(trainer.model, directory, "packed")
    trainer.processing_class.save_pretrained(directory)
    packed = AutoModelForCausalLM.from_pretrained(directory).eval()
    input_ids = torch.tensor(trainer.eval_dataset[:2]["input_ids"])
    difference = (_logits(packed, input_ids) - _logits(trainer.model, input_ids)).abs().max().item()
    if difference > 1e-3:  # as above: kernels for packed weights sum in an order of their own
        raise SystemExit(f"packed check FAILED: the logits of {directory} differ by up to {difference:.3g}")


def size(directory: Path) -> str:
    """What the weights in a directory take."""
    return f"{sum(path.stat().st_size for path in directory.glob('*.safetensors')) / 1e3:,.0f} kB"


@torch.no_grad()
def _logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(input_ids=input_ids).logits


def _share_of_zeros(tensors) -> float:
    counts = [((tensor == 0).sum().item(), tensor.numel()) for tensor in tensors]
    return sum(zeros for zeros, _ in counts) / max(1, sum(size for _, size in counts))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ninterrupted; the next run starts afresh", file=sys.stderr)
        sys.exit(130)
