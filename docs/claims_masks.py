"""The claims of transposable masks, MVUE and STEP: what each says, how it was tried, and what decides."""

import statistics
from functools import partial
from itertools import pairwise
from math import log10

import gpu_page
from claims_page import (
    CONTRADICTED,
    METHODS,
    NOT_SEEN,
    SEEN,
    SHORT,
    Claim,
    Finding,
    Paper,
    Results,
    Run,
    cheap,
    costs,
    gaps,
    in_all,
    lower_long,
    ordered,
    shown,
    speeds,
    together,
)
from mask_quality import mask_diversity

# Transposable masks and AdaPrune.

MASKS = ("1:2 transposable", "1:2", "2:4 transposable", "2:4", "4:8 transposable", "4:8", "8:16", "unstructured")
"""Half of the weights kept, by ways that `claims.py` tries."""


def diversity(kind: str, size: int = 256) -> float:
    """log10 of the number of masks that a block of so many weights has, counted exactly."""
    if kind == "unstructured":
        return log10(mask_diversity(size // 2, size, size))
    n, m = map(int, kind.split()[0].split(":"))
    return log10(mask_diversity(n, m, size, "transposable" in kind))


def _rank_correlation(pairs: list[tuple[float, float]]) -> float:
    ranks = ([sorted(values).index(value) for value in values] for values in zip(*pairs))
    return statistics.correlation(*ranks)


def lost_by(kind: str, when: str, results: Results) -> list[float]:
    """Loss over dense of a mask put on a trained model: at once, after AdaPrune, or after training (then of both)."""
    rows = [run["rows"] for run in results.short("one-shot").values()]
    return [row[kind][when] - row["dense"]["retrained" if when == "retrained" else "loss"] for row in rows]


def _diversity(when: str, results: Results) -> Finding:
    found = []
    for run in results.short("one-shot").values():
        found.append(_rank_correlation([(diversity(kind), run["rows"][kind][when]) for kind in MASKS]))
    lost = ", ".join(f"{kind} {statistics.mean(lost_by(kind, when, results)):+.3f}" for kind in MASKS)
    return f"rank correlation with the loss {shown(found, '+.2f')}; over dense: {lost}", in_all(
        value < -0.7 for value in found
    )


def _counts(results: Results) -> Finding:
    rows, both = mask_diversity(2, 4, 64), mask_diversity(4, 8, 64, transposable=True)
    text = f"an 8 x 8 block has {rows:.1e} row-wise 2:4 masks, and {both:.2e} of 4:8 both ways, counted exactly; the "
    text += "paper's formula gives 1.7e13, and 144 for the 90 transposable masks of a 4 x 4 tile"
    return text, SEEN if both > rows else CONTRADICTED


def _static(results: Results) -> Finding:
    runs = results.short("one-shot").values()
    found = [run["rows"]["4:8 transposable"]["retrained"] - run["rows"]["2:4"]["retrained"] for run in runs]
    return f"4:8 both ways over 2:4 along rows, AdaPrune and 100 steps with the mask kept: {shown(found)}", cheap(found)


def _dynamic(results: Results) -> Finding:
    found = {name: gaps(results.short(name), results.short("transposable-4-8")) for name in ("dense", "ste-2-4")}
    text = "; ".join(f"over `{name}` {shown(values)}" for name, values in found.items())
    return f"4:8 both ways, refreshed every 40 steps: {text}", together(cheap(values) for values in found.values())


def _finer(results: Results) -> Finding:
    names = [f"transposable-{half}" for half in ("1-2", "2-4", "4-8")]
    steps = [gaps(results.short(b), results.short(a)) for a, b in pairwise(names)]
    text = f"1:2 over 2:4 {shown(steps[0])}; 2:4 over 4:8 {shown(steps[1])}"
    return text, together(ordered(values) for values in steps)


def _flow(results: Results) -> Finding:
    solvers = results.short("kernels")[0]["solvers"]
    flow, fast = solvers["4:8 min-cost-flow"], solvers["4:8 two-approx"]
    text = f"4:8, 512 x 512 Gaussian weights: kept {flow['kept']:.3f} in {flow['ms']:.0f} ms by flow, "
    text += f"{fast['kept']:.3f} in {fast['ms']:.0f} ms by the 2-approximation, {fast['kept'] / flow['kept']:.1%} of it"
    return text, in_all([fast["kept"] >= flow["kept"] / 2, fast["ms"] < flow["ms"]])


def _converted(results: Results) -> Finding:
    """How much of what N:M costs an unstructured model AdaPrune takes back, without training."""
    texts, rests = [], []
    for kind in ("1:2", "2:4", "4:8", "8:16", "4:8 transposable"):
        rows = [run["rows"] for run in results.short("one-shot").values()]
        start = [row["unstructured"]["retrained"] for row in rows]
        cost = [row[f"from unstructured, {kind}"]["loss"] - loss for row, loss in zip(rows, start)]
        rest = [row[f"from unstructured, {kind}"]["adaprune"] - loss for row, loss in zip(rows, start)]
        texts.append(f"{kind} {statistics.mean(cost):+.3f}, then {shown(rest)}")
        rests += rest
    return f"over the unstructured model, at once and after AdaPrune: {'; '.join(texts)}", in_all(
        rest < 0.02 for rest in rests
    )


def _images(results: Results) -> Finding:
    names = ("dense", *(f"{way}-{half}" for way in ("ste", "transposable") for half in ("1-2", "2-4", "4-8")))
    accuracy = {name: results.short(f"images-{name}")[0]["accuracy"] for name in names}
    text = ", ".join(f"{name} {value:.3f}" for name, value in accuracy.items())
    behind = accuracy["dense"] - accuracy["transposable-4-8"]
    return (
        f"digits, a vision transformer of 0.2M parameters, accuracy, 1 seed: {text}",
        SEEN if behind <= 0 else NOT_SEEN,
    )


MASKS_PAPER = (
    Claim(
        "H1",
        "mask diversity correlates with accuracy: masks put on a trained model",
        SHORT.format("one-shot-seed0"),
        partial(_diversity, "loss"),
    ),
    Claim(
        "H2",
        "the same after AdaPrune and training with the mask",
        SHORT.format("one-shot-seed0"),
        partial(_diversity, "retrained"),
    ),
    Claim(
        "H3", "4:8 transposable has more diversity (1.7e13) than 2:4 along rows (2.8e12)", "`mask_quality.py`", _counts
    ),
    Claim("H4", '"no accuracy degradation" of 4:8 transposable masks, kept', SHORT.format("one-shot-seed0"), _static),
    Claim("H5", "the same, from scratch, refreshed every 40 steps", SHORT.format("masks"), _dynamic),
    Claim("H6", "coarser transposable patterns are worse: 1:2, 2:4, 4:8", SHORT.format("masks"), _finer),
    Claim("H7", "the same on images: 4:8 transposable is as accurate as dense", SHORT.format("images"), _images),
    Claim(
        "H8",
        "min-cost flow finds the optimum; the 2-approximation is fast and within half of it",
        SHORT.format("kernels-seed0"),
        _flow,
    ),
    Claim(
        "H9",
        'unstructured to N:M "with little to no training"',
        SHORT.format("one-shot-seed0"),
        _converted,
    ),
    Claim(
        "H10",
        '"2x speed-up in the matrix multiplications"',
        "none",
        "no hardware multiplies 4:8; theirs was computed too",
    ),
)


# MVUE.


def _activations(results: Results) -> Finding:
    dense = results.short("dense")
    greedy, drawn = (gaps(dense, results.short(f"activations-{way}")) for way in ("mse", "mvue"))
    text = f"over dense: two largest of four {shown(greedy)}, MVUE {shown(drawn)}"
    return text, together([cheap(greedy), ordered([b - a for a, b in zip(greedy, drawn)])])


def _fails(results: Results) -> Finding:
    dense, drawn, greedy = (results.short(name) for name in ("dense", "mvue", "greedy"))
    text = f"over dense: MVUE {shown(gaps(dense, drawn))}, two largest of four {shown(gaps(dense, greedy))}"
    sparse = gaps(results.long("s-ste"), results.long("s-ste-greedy"))
    text += f"; with 2:4 weights, 4.1M tokens: over MVUE {shown(sparse)}"
    return text, ordered([*gaps(drawn, greedy), *sparse])


def _unbiased(results: Results) -> Finding:
    """Theory is of the mean squared error, in `tests/kernels`; the error of a mean of n draws is a share 1/n of it."""
    estimates = results.short("kernels")[0]["estimates"]
    texts, facts = [], []
    for name in ("mvue", "mvue-approx", "mvue-1:2"):
        one = estimates[name]
        ratio = one["error of the mean"] * one["draws"] / one["error"]
        texts.append(f"{name} {one['error']:.3f} ({ratio:.2f})")
        facts.append(abs(ratio - 1) < 0.05)
    facts.append(estimates["mvue"]["error"] < estimates["mvue-approx"]["error"] < 2 * estimates["mvue"]["error"])
    text = f"Gaussian: squared error {', '.join(texts)}; in brackets that of a mean of draws over what no bias gives. "
    return text + f"The two largest of four: {estimates['greedy']['error']:.3f}, biased", in_all(facts)


def _two_of_four(results: Results) -> Finding:
    found = {name: gaps(results.short("dense"), results.short(name)) for name in ("mvue", "mvue-approx")}
    text = "; ".join(f"`{name}` {shown(values)}" for name, values in found.items())
    return f"over dense: {text}", cheap([value for values in found.values() for value in values])


def _on_h100(results: Results) -> str:
    gains = [cells["grad_weight"] for cells in gpu_page.large_layers(results.folder / "gpu").values()]
    return f"{min(gains):.2f} to {max(gains):.2f} at the sizes of Llama 8B's MLPs and of Llama 13B"


MVUE = (
    Claim("M1", "minimising the MSE works for **activations**", SHORT.format("mvue"), _activations),
    Claim(
        "M2",
        'for **gradients** it does worse than MVUE (theirs "catastrophically fails")',
        SHORT.format("mvue") + ", " + METHODS,
        _fails,
    ),
    Claim(
        "M3",
        "the masks are unbiased, with the least variance; approximate 2:4 within twice of it",
        SHORT.format("kernels-seed0"),
        _unbiased,
    ),
    Claim("M4", '"1:2 sparsity is sufficient for training"', SHORT.format("mvue"), partial(costs, "mvue-1-2", "dense")),
    Claim("M5", '"2:4 sparsity is usually enough" where it is not', SHORT.format("mvue"), _two_of_four),
    Claim("M6", "pruned gradients in grad_input as well", SHORT.format("mvue"), partial(costs, "mvue-both", "dense")),
    Claim(
        "M7",
        "with transposable 4:8 weights: all three GEMMs pruned",
        SHORT.format("masks"),
        partial(costs, "transposable-4-8-mvue", "transposable-4-8"),
    ),
    Claim("M8", "with 8 bits: little or no degradation", SHORT.format("mvue"), partial(costs, "mvue-fp8", "mvue")),
    Claim(
        "M9",
        "N:M doubles throughput, here of grad_weight",
        "`make gpu`; `benchmarks/cpu.py training`",
        lambda r: (
            f"over dense: on an H100, bf16, compressed before, {_on_h100(r)}; on CPUs, fp32, MVUE included, "
            f"{speeds('gemms', 'grad_weight', ('sparse',), r)}",
            NOT_SEEN,
        ),
    ),
)


# STEP.

RATIOS = ("2:4", "1:4", "1:8", "1:16")


def by_ratio(results: Results, way: str) -> dict[str, dict[int, Run]]:
    """The short runs of a way by ratio and seed: step, sr-ste, ste, asp or ste-late."""
    return {ratio: results.short(f"{way}-{ratio.replace(':', '-')}") for ratio in RATIOS}


def _accuracy_drop(results: Results) -> Finding:
    dense = results.long("dense")
    found = {name: gaps(dense, results.long(name)) for name in ("sr-ste", "ste")}
    text = "; ".join(f"`{name}` {shown(values)}" for name, values in found.items())
    return f"over dense, 4.1M tokens, Adam: {text}", ordered(found["sr-ste"])


def variance_ratio(run: Run, dense: Run, step: int = 300) -> float:
    """Geometric mean of the second moments of the MLPs' weights over that of dense training at a step."""
    mine, theirs = (next(typical for at, _, typical in r["variance"] if at == step) for r in (run, dense))
    return mine / theirs


def _variance(ratio: str, results: Results) -> Finding:
    dense, texts, far = results.short("dense"), [], []
    for way in ("ste", "sr-ste"):
        found = [variance_ratio(run, dense[seed]) for seed, run in by_ratio(results, way)[ratio].items()]
        texts.append(f"`{way}` {shown(found, '.2f')}")
        far += [abs(value - 1) > 0.1 for value in found]
    text = f"geometric mean of the second moments over that of dense training, step 300: {'; '.join(texts)}"
    return text, in_all(far)


def _frozen(results: Results) -> Finding:
    texts, verdicts = [], []
    for ratio in ("2:4", "1:16"):
        found = gaps(by_ratio(results, "step")[ratio], by_ratio(results, "ste-late")[ratio])
        texts.append(f"{ratio} {shown(found)}")
        verdicts.append(ordered(found))
    text = f"dense for the first half in both, running variance over frozen one: {'; '.join(texts)}"
    return text, SEEN if set(verdicts) == {SEEN} else CONTRADICTED if CONTRADICTED in verdicts else NOT_SEEN


def _robust(results: Results) -> Finding:
    ways = {way: by_ratio(results, way) for way in ("step", "sr-ste", "asp")}
    found = {way: gaps(runs["2:4"], runs["1:16"]) for way, runs in ways.items()}
    text = "; ".join(f"`{way}` {shown(values)}" for way, values in found.items())
    slow = {way: results.short(f"{way}-1-16-beta2-0.999", False) for way in ("dense", "step", "sr-ste")}
    if all(slow.values()):
        text += "; with Adam's beta2 of 0.999, 1:16 over dense: "
        text += ", ".join(f"`{way}` {shown(gaps(slow['dense'], slow[way]))}" for way in ("step", "sr-ste"))
    return f"loss of 1:16 over 2:4: {text}", ordered([b - a for a, b in zip(found["step"], found["sr-ste"])])


def _against(other: str, results: Results) -> Finding:
    mine, theirs = by_ratio(results, "step"), by_ratio(results, other)
    found = {ratio: gaps(mine[ratio], theirs[ratio]) for ratio in RATIOS}
    text = "; ".join(f"{ratio} {shown(values)}" for ratio, values in found.items())
    verdicts = [ordered(values) for values in found.values()]
    return f"`{other}` over `step`: {text}", CONTRADICTED if CONTRADICTED in verdicts else together(verdicts)


def _long_ratio(results: Results) -> Finding:
    step, sr_ste, dense = results.short("long-step-1-16"), results.short("long-sr-ste-1-16"), results.long("dense")
    found = gaps(step, sr_ste)
    text = f"1:16, 4.1M tokens, over dense: `step` {shown(gaps(dense, step))}, `sr-ste` {shown(gaps(dense, sr_ste))}"
    return f"{text}; `sr-ste` over `step` {shown(found)}", ordered(found)


def _switch(results: Results) -> Finding:
    """Whether AutoSwitch switched by its statistic, between its limits, and ended as low as the best fixed step."""
    texts, inside = [], []
    fixed = {share: results.short(f"step-at-{share}")[0]["eval_loss"] for share in (0.1, 0.25, 0.75)}
    own = {"eps 1e-8": "step-2-4", "eps 1e-7": "step-eps-1e-07", "eps 1e-6": "step-eps-1e-06"}
    own["geometric, 1e-8"] = "step-geometric"
    for label, name in own.items():
        run = results.short(name)[0]
        share = run["switch_step"] / run["arguments"]["max_steps"]
        texts.append(f"{label}: at {share:.0%}, {run['eval_loss']:.3f}")
        inside.append(0.1 < share < 0.5 and run["eval_loss"] < min(fixed.values()) + 0.02)
    best = ", ".join(f"{share:.0%} {loss:.3f}" for share, loss in fixed.items())
    return f"AutoSwitch {'; '.join(texts)}. Fixed: {best} (1 seed)", SEEN if any(inside) else NOT_SEEN


def _options(results: Results) -> Finding:
    one, other = results.short("step-2-4")[0], results.short("step-geometric")[0]
    both = f"I at step {one['switch_step']}, II at step {other['switch_step']} of {one['arguments']['max_steps']}"
    return f"{both}; II over I {other['eval_loss'] - one['eval_loss']:+.3f} (1 seed)", (
        SEEN if one["switch_step"] == other["switch_step"] else NOT_SEEN
    )


STEP = (
    Claim("P1", "SR-STE has a **non-trivial accuracy drop** for Adam-trained models", METHODS, _accuracy_drop),
    Claim(
        "P2",
        "masked weights give a **poorly estimated second moment**, at 2:4",
        SHORT.format("step"),
        partial(_variance, "2:4"),
    ),
    Claim("P3", "and at 1:16", SHORT.format("step"), partial(_variance, "1:16")),
    Claim("P4", "the gap **originates** there: freezing a dense variance closes it", SHORT.format("step"), _frozen),
    Claim("P5", "STEP mitigates the drop of SR-STE, 2:4", METHODS, partial(lower_long, "step", "sr-ste")),
    Claim("P6", '"robust to aggressive structured sparsity ratios" where SR-STE is not', SHORT.format("step"), _robust),
    Claim("P7", "better than SR-STE from 2:4 to 1:16", SHORT.format("step"), partial(_against, "sr-ste")),
    Claim("P8", "better than ASP from 2:4 to 1:16", SHORT.format("step"), partial(_against, "asp")),
    Claim("P9", "better than SR-STE at 1:16 in a longer run", SHORT.format("long"), _long_ratio),
    Claim("P10", '"automatically identifies the switching point"', SHORT.format("step"), _switch),
    Claim("P11", "both rules, options I and II, find it", SHORT.format("step"), _options),
    Claim(
        "P12",
        "CIFAR, machine translation, BERT and GPT-2 fine-tuned",
        "`image_classification.py`, `translation.py`, `glue.py`, `train.py` ([commands](papers.md#step))",
        "their data sets and pretrained models were not reachable; toy sizes are in [recipes](recipes.md)",
    ),
)

PAPERS = (
    Paper(
        "Transposable masks and AdaPrune",
        "Hubara et al. 2021 ([arXiv 2102.08124](https://arxiv.org/abs/2102.08124)). "
        "[Transposable masks](../concepts/transposable.md).",
        "claims-masks",
        "Loss over dense against the number of masks that 256 weights have: at once, after AdaPrune, after training",
        MASKS_PAPER,
    ),
    Paper(
        "MVUE",
        "Chmiel et al. 2022 ([arXiv 2203.10991](https://arxiv.org/abs/2203.10991)). [MVUE](../concepts/mvue.md). "
        "Weights are dense in these runs, by `dense-weight` of `recipes/ablations.py`, unless the row says otherwise.",
        "claims-mvue",
        "Validation loss over dense training with pruned gradients, pruned activations and 8 bits",
        MVUE,
    ),
    Paper(
        "STEP",
        "Lu et al. 2023 ([arXiv 2302.01172](https://arxiv.org/abs/2302.01172)). Method [`step`](../methods/step.md). "
        "`asp` is dense for the first half, then keeps one mask; `ste-late` is dense for the first half, then STE with "
        "Adam's running variance.",
        "claims-step",
        "Validation loss over dense by ratio from 2:4 to 1:16 of five ways; and the geometric mean of Adam's second "
        "moments by step, of dense training, sr-ste and step at 1:16",
        STEP,
    ),
)
