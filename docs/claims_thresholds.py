"""The claims of S-STE and T-SR-STE: what each says, how it was tried, and what decides."""

import statistics
from functools import partial

import analysis_page as descent
from claims_page import (
    CONTRADICTED,
    ELSEWHERE,
    METHODS,
    NOT_SEEN,
    NOT_TIMED,
    SEEN,
    SHORT,
    Claim,
    Finding,
    Paper,
    Results,
    Run,
    cheap,
    comparable,
    comparable_long,
    costs,
    gaps,
    in_all,
    lower_long,
    ordered,
    shown,
    speeds,
    together,
)

ANALYSIS = "`analysis.py`, `claims.py --only descent`"


# S-STE.


def _each(measure, results: Results, variants: tuple[str, ...], form: str) -> str:
    """A measure of every run of some variants: `variant` a, b, c."""
    parts = []
    for variant in variants:
        values = [f"{measure(run):{form}}" for run in results.descent(variant).values()]
        parts.append(f"`{variant}` {', '.join(values)}")
    return "; ".join(parts)


def _incorrect_descent(results: Results) -> Finding:
    text = _each(descent.wrong, results, ("ste", "s-ste"), ".1%")
    runs = results.descent("ste").values()
    return f"steps that descend with the old mask and ascend with the new: {text}", in_all(
        descent.wrong(run) > 0.01 for run in runs
    )


def _prediction(results: Results) -> Finding:
    dense, hard = results.descent("dense"), results.descent("ste")
    text = _each(descent.correlation, results, ("dense", "ste", "s-ste"), ".3f")
    worse = [descent.correlation(hard[key]) < descent.correlation(dense[key]) - 0.005 for key in hard]
    return f"correlation of predicted and actual descent: {text}", in_all(worse)


def _oscillation(results: Results) -> Finding:
    def last_third(run: Run) -> float:
        rates = run["points"]["flip_rate"]
        return statistics.mean(rates[-len(rates) // 3 :])

    hard, soft = results.descent("ste"), results.descent("s-ste")
    text = _each(last_third, results, ("dense", "ste", "s-ste"), ".4f")
    return f"mean flip rate of the last third: {text}", in_all(
        last_third(hard[key]) > 1.1 * last_third(soft[key]) for key in hard
    )


def _continuous(results: Results) -> Finding:
    hard, soft = results.descent("ste"), results.descent("s-ste")
    text = _each(descent.by_flips, results, ("ste", "s-ste"), ".1%")
    return f"share of the descent that comes from flips: {text}", in_all(
        descent.by_flips(soft[key]) < descent.by_flips(hard[key]) / 10 for key in hard
    )


def _moving_scale(results: Results) -> Finding:
    moving, frozen = results.short("s-ste-moving"), results.short("s-ste")
    pairs = [(run, frozen[seed]) for seed, run in moving.items() if seed in frozen]
    grown = [statistics.mean(run["scales"]) / statistics.mean(other["scales"]) for run, other in pairs]
    last = [[statistics.mean(run["flip_rate"][-10:]) for run in pair] for pair in pairs]
    text = f"the scale ends at {', '.join(f'{one:.2f}' for one in grown)} times the frozen one; mean flip rate of the "
    text += f"last third {', '.join(f'{ours:.4f} (frozen {theirs:.4f})' for ours, theirs in last)}; loss "
    text += shown(gaps(frozen, moving))
    if min(grown) > 1.5 and all(ours > 2 * theirs for ours, theirs in last):
        return text, SEEN
    return text, CONTRADICTED if max(grown) < 1 and all(ours < theirs for ours, theirs in last) else NOT_SEEN


def _best_rule(results: Results) -> Finding:
    found = {rule: gaps(results.short("s-ste"), results.short(f"s-ste-{rule}")) for rule in ("none", "l1")}
    found["none, 4.1M tokens"] = gaps(results.long("s-ste"), results.short("long-s-ste-none", False))
    text = "; ".join(f"{rule} {shown(values)}" for rule, values in found.items())
    return f"over least squares: {text}", together(ordered(values) for values in found.values())


def by_scale(results: Results) -> dict[float, float]:
    """Loss of seed 0 by fixed scale; that of the least-squares rule is the mean of the layers' scales."""
    own = results.short("s-ste")[0]
    losses = {statistics.mean(own["scales"]): own["eval_loss"], 1.0: results.short("s-ste-none")[0]["eval_loss"]}
    return losses | {scale: results.short(f"s-ste-scale-{scale:g}")[0]["eval_loss"] for scale in (0.5, 2.0, 3.0)}


def _best_scale(results: Results) -> Finding:
    own, losses = results.short("s-ste")[0], by_scale(results)
    text = ", ".join(f"{scale:.2f} {loss:.3f}" for scale, loss in sorted(losses.items()))
    best = min(losses.values())
    behind = own["eval_loss"] - best
    return f"loss by scale, 1 seed: {text}", SEEN if behind == 0 else CONTRADICTED if behind > 0.02 else NOT_SEEN


def _surpasses(results: Results) -> Finding:
    found = {name: gaps(results.long("s-ste"), results.long(name)) for name in ("ste", "sr-ste", "t-sr-ste", "step")}
    text = "; ".join(f"`{name}` {shown(values)}" for name, values in found.items())
    return f"over `s-ste`, 4.1M tokens: {text}", together(ordered(values) for values in found.values())


def _mvue(results: Results) -> Finding:
    short = gaps(results.short("s-ste-no-mvue"), results.short("s-ste"))
    long = gaps(results.long("s-ste-no-mvue"), results.long("s-ste"))
    return f"over the whole gradient {shown(short)}; 4.1M tokens {shown(long)}", cheap([*short, *long])


def _fine_tuning(results: Results) -> Finding:
    rows = [run["rows"] for run in results.short("fine-tuning").values()]
    hard = [row["s-ste"]["ste"] - row["s-ste"]["s-ste"] for row in rows]
    fixed = [row["s-ste"]["fixed-mask"] - row["s-ste"]["s-ste"] for row in rows]
    text = f"after `s-ste`, over fine-tuning by `s-ste`: `ste` {shown(hard)}, `fixed-mask` {shown(fixed)}"
    return text, ordered(hard)


S_STE = (
    Claim("S1", '"incorrect descending direction" of hard thresholds', ANALYSIS, _incorrect_descent),
    Claim("S2", '"inability to predict the amount of descent"', ANALYSIS, _prediction),
    Claim("S3", '"sparse mask oscillation" with hard thresholds, more than with S-STE', ANALYSIS, _oscillation),
    Claim("S4", "S-STE projects weights **continuously**: flips carry no jump of the loss", ANALYSIS, _continuous),
    Claim(
        "S5",
        "the scale must be **fixed**: recomputed, it grows and masks flip more (Fig. 4)",
        SHORT.format("s-ste"),
        _moving_scale,
    ),
    Claim("S6", "least squares is the best rule for the scale (Table 2)", SHORT.format("s-ste"), _best_rule),
    Claim("S7", "and no other fixed scale is better (Fig. 4)", SHORT.format("s-ste"), _best_scale),
    Claim("S8", "gamma = 0 is the best threshold (Table 1)", METHODS, partial(lower_long, "s-ste", "s-ste-gamma-0.5")),
    Claim(
        "S9",
        "MVUE on the gradient costs little (Table 3)",
        SHORT.format("s-ste"),
        _mvue,
    ),
    Claim(
        "S10",
        "MVUE on the weight of grad_input does worse (theirs a **huge loss**, Table 3)",
        METHODS,
        lambda r: lower_long("s-ste", "s-ste-mvue-weight", r),
    ),
    Claim("S11", "FP8 for the whole process costs little", SHORT.format("s-ste"), partial(costs, "s-ste-fp8", "s-ste")),
    Claim("S12", '"surpasses previous 2:4 pre-training recipes"', METHODS, _surpasses),
    Claim("S13", '"comparable even with full parameter models"', METHODS, partial(comparable_long, "s-ste")),
    Claim(
        "S14",
        "a model that S-STE pre-trained is best fine-tuned by it (Table 7)",
        SHORT.format("fine-tuning-seed0"),
        _fine_tuning,
    ),
    Claim(
        "S15",
        "FFN 1.31 times as fast in training, 1.54 in inference (RTX 3090)",
        "`make gpu`; `benchmarks/cpu.py training`",
        lambda r: (
            f"over dense: {r.h100_step('s-ste')}; on CPUs, fp32, a layer "
            f"{speeds('layers', '1024', ('s-ste',), r)}, a step of a Llama "
            f"{speeds('steps', 'd = 1024', ('s-ste',), r)}",
            ELSEWHERE,
        ),
    ),
)


# T-SR-STE.

DECAYS = (0.0, 6e-5, 6e-4, 6e-3, 2e-2, 6e-2, 2e-1)
ON_WEIGHT = (6e-3, 1e-1, 1.0, 10.0)


def by_decay(results: Results, on: str = "gradient") -> dict[float, Run]:
    """The short runs of `t-sr-ste` of seed 0 by masked decay; that of 6e-5 on the gradient is the default."""
    decays = DECAYS if on == "gradient" else ON_WEIGHT
    names = {decay: "t-sr-ste" if decay == 6e-5 else f"t-sr-ste-{on}-{decay:g}" for decay in decays}
    return {decay: results.short(name)[0] for decay, name in names.items()}


def rate_at(run: Run, step: int) -> float:
    """The flip rate that a run logged at a step, of its last mask refresh."""
    return run["flip_rate"][run["steps"].index(step)]


WARM, LATE = 80, 480
"""The first refresh after the warm-up of 60 steps, and the last before the dense tail."""


def _healthy(results: Results) -> Finding:
    facts, texts = [], []
    for run in results.short("dense").values():
        rates = [rate for rate in run["flip_rate"] if rate is not None]
        facts.append(descent.fades(rates))
        texts.append(f"from {rates[0]:.3f} to {max(rates):.3f} to {rates[-1]:.3f}")
    return f"dense, virtual masks, per 40 steps: {'; '.join(texts)}", in_all(facts)


def _explosion(results: Results) -> Finding:
    dense = results.short("dense")[0]
    runs = by_decay(results)
    rates = {decay: rate_at(run, LATE) for decay, run in runs.items()}
    text = ", ".join(f"{decay:g} {rate:.3f}" for decay, rate in rates.items())
    peak = max(rate for rate in runs[0.0]["flip_rate"] if rate)
    more = all(rate_at(runs[0.0], step) > rate_at(dense, step) for step in range(WARM, LATE + 1, 40))
    calmer = [*rates.values()] == sorted(rates.values(), reverse=True)
    text = (
        f"flip rate at step {LATE} by decay: {text}; dense {rate_at(dense, LATE):.3f}. Without decay it is above dense "
    )
    text += f"at {'every' if more else 'some'} refresh, and fades from {peak:.2f} all the same"
    return text, in_all([more, calmer])


def _on_gradient(results: Results) -> Finding:
    best = {}
    for on in ("gradient", "weight"):
        losses = {decay: run["eval_loss"] for decay, run in by_decay(results, on).items()}
        decay = min(losses, key=losses.get)
        best[on] = (losses[decay], f"{on}: best {losses[decay]:.3f} at {decay:g}, worst {max(losses.values()):.3f}")
    difference = best["weight"][0] - best["gradient"][0]
    return f"{best['gradient'][1]}; {best['weight'][1]} (1 seed)", ordered([difference])


def _feasible(results: Results) -> Finding:
    dense = rate_at(results.short("dense")[0], WARM)
    runs = by_decay(results)
    mu = {decay: rate_at(run, WARM) / dense for decay, run in runs.items()}
    best = min(run["eval_loss"] for run in runs.values())
    text = ", ".join(f"{decay:g}: {mu[decay]:.2f}, {run['eval_loss']:.3f}" for decay, run in runs.items())
    inside = [run["eval_loss"] for decay, run in runs.items() if 0.6 <= mu[decay] <= 0.95]
    outside = [run["eval_loss"] for decay, run in runs.items() if not 0.6 <= mu[decay] <= 0.95]
    ahead = min(outside) - min(inside) if inside else None
    verdict = NOT_SEEN if ahead is None else ordered([ahead])
    return f"decay: flips over dense after warm-up, loss: {text} (1 seed; best {best:.3f})", verdict


RULE = "t-sr-ste-gradient-0.006"
"""With the masked decay that the paper's rule finds for this model (`recipes/LOG.md`, 2026-11-23)."""


def _tail(results: Results) -> Finding:
    """A tail at a learning rate that falls to zero, as ours, and to a fifteenth of its peak, as the authors'."""
    found = {
        "decay 6e-3": gaps(results.short(RULE), results.short("t-sr-ste-6e-3-no-tail")),
        "and a rate that ends at a fifteenth": gaps(
            results.short("t-sr-ste-6e-3-min-lr"), results.short("t-sr-ste-6e-3-min-lr-no-tail")
        ),
        "decay 6e-5": gaps(results.short("t-sr-ste"), results.short("t-sr-ste-no-tail")),
        "4.1M tokens, decay 6e-5": gaps(results.long("t-sr-ste"), results.long("t-sr-ste-no-tail")),
    }
    text = "; ".join(f"{label} {shown(values)}" for label, values in found.items())
    by_rule = [value for values in [*found.values()][:2] for value in values]
    return f"without the tail, over with it: {text}", ordered(by_rule)


def _start(results: Results) -> Finding:
    found = {
        "decay 6e-3": gaps(results.short(RULE), results.short("t-sr-ste-6e-3-dense-start")),
        "decay 6e-5": gaps(results.short("t-sr-ste"), results.short("t-sr-ste-dense-start")),
    }
    text = "; ".join(f"{label} {shown(values)}" for label, values in found.items())
    return f"dense at the start, over dense at the end: {text}", together(ordered(values) for values in found.values())


def _convergence(results: Results) -> Finding:
    """By the decay of the paper's rule, if that run is there."""
    dense = results.long("dense")
    by_default = gaps(dense, results.long("t-sr-ste"))
    by_rule = gaps(dense, results.short("long-t-sr-ste-6e-3", False))
    text = f"over dense, 4.1M tokens: decay 6e-5, the default, {shown(by_default)}; 6e-3, by the paper's rule, "
    return text + shown(by_rule), comparable(by_rule or by_default, dense)


def _transposable_kept(results: Results) -> Finding:
    kept = {name: row["kept"] for name, row in results.short("kernels")[0]["solvers"].items()}
    text = f"share of the L1 norm: {kept['2:4 exact']:.4f}, by min-cost flow {kept['2:4 min-cost-flow']:.4f}"
    return text, SEEN if kept["2:4 exact"] == kept["2:4 min-cost-flow"] else CONTRADICTED


T_SR_STE = (
    Claim("T1", "the flip rate of a healthy run rises and fades, as dense training's", SHORT.format("dense"), _healthy),
    Claim(
        "T2",
        "without enough decay masks flip more than in dense training (an explosion), with more less",
        SHORT.format("t-sr-ste"),
        _explosion,
    ),
    Claim("T3", "masked decay belongs **on gradients**, not on weights", SHORT.format("t-sr-ste"), _on_gradient),
    Claim(
        "T4",
        '"determine a feasible decay factor in warm-up": flips over dense of 0.60 to 0.95 mark the good decays',
        SHORT.format("t-sr-ste"),
        _feasible,
    ),
    Claim(
        "T5",
        '"dense fine-tuning near the end" enhances quality',
        SHORT.format("t-sr-ste"),
        _tail,
    ),
    Claim(
        "T6",
        "dense at the end beats dense at the beginning",
        SHORT.format("t-sr-ste"),
        _start,
    ),
    Claim(
        "T7",
        "MVUE on the gradient costs little",
        SHORT.format("t-sr-ste"),
        partial(costs, RULE, "t-sr-ste-6e-3-no-mvue"),
    ),
    Claim("T8", '"similar convergence to dense training"', SHORT.format("long") + ", " + METHODS, _convergence),
    Claim("T9", "transposable masks by convolution are the optimum", SHORT.format("kernels-seed0"), _transposable_kept),
    Claim("T10", "their search is faster than the 2-approximation (GB/s)", "`make gpu`", NOT_TIMED),
    Claim("T11", "gated activations with fewer L2 misses are up to 5 times as fast", "`make gpu`", NOT_TIMED),
    Claim(
        "T12",
        '"actual acceleration on different shapes of transformer block": FFN up to 1.63, block 1.31 (24 GB cards)',
        "`make gpu`; `benchmarks/cpu.py training`",
        lambda r: (
            f"over dense: {r.h100_step('t-sr-ste')}; on CPUs, fp32, a layer "
            f"{speeds('layers', '1024', ('t-sr-ste',), r)}, a step of a Llama "
            f"{speeds('steps', 'd = 1024', ('t-sr-ste',), r)}",
            ELSEWHERE,
        ),
    ),
)

PAPERS = (
    Paper(
        "S-STE",
        "Hu et al. 2024 ([arXiv 2409.09099](https://arxiv.org/abs/2409.09099)). Method [`s-ste`](../methods/s-ste.md).",
        "claims-s-ste",
        "Validation loss of s-ste by its fixed scale, and over s-ste of what changes one thing: rule of the scale, "
        "MVUE, FP8",
        S_STE,
    ),
    Paper(
        "T-SR-STE",
        "Hu et al. 2024 ([arXiv 2404.01847](https://arxiv.org/abs/2404.01847)). Method "
        "[`t-sr-ste`](../methods/t-sr-ste.md).",
        "claims-t-sr-ste",
        "Flip rate by step of dense training with virtual masks and of t-sr-ste with four decays; and validation loss "
        "by decay on gradients and on weights",
        T_SR_STE,
    ),
)
