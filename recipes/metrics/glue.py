"""GLUE's metrics of a task, as `evaluate.load(<this file>, "sst2")`, by the names of `evaluate`'s own "glue"."""

import datasets
import evaluate
import numpy

F1_TOO = ("mrpc", "qqp")
ACCURACY_ALONE = ("sst2", "mnli", "qnli", "rte", "wnli")


class Glue(evaluate.Metric):
    """accuracy; accuracy and f1 of class 1 (mrpc, qqp); matthews_correlation (cola); pearson and spearmanr (stsb)."""

    def _info(self):
        kind = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Wang et al. 2018, arXiv 1804.07461",
            inputs_description="Predicted and true class numbers; of stsb, similarities.",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions, references):
        predictions, references = numpy.asarray(predictions), numpy.asarray(references)
        if self.config_name == "stsb":
            ranks = average_ranks(predictions), average_ranks(references)
            return {"pearson": correlation(predictions, references), "spearmanr": correlation(*ranks)}
        if self.config_name == "cola":  # of two classes, this coefficient is their correlation
            return {"matthews_correlation": correlation(predictions, references)}
        if self.config_name not in (*F1_TOO, *ACCURACY_ALONE):
            tasks = ", ".join(("cola", "stsb", *F1_TOO, *ACCURACY_ALONE))
            raise ValueError(f"task={self.config_name!r}: must be one of {tasks}")
        accuracy = float((predictions == references).mean())
        if self.config_name in ACCURACY_ALONE:
            return {"accuracy": accuracy}
        hits = ((predictions == 1) & (references == 1)).sum()
        found = (predictions == 1).sum() + (references == 1).sum()
        return {"accuracy": accuracy, "f1": float(2 * hits / found) if found else 0.0}


def correlation(a, b):
    """Pearson's; 0 where one of the two is constant."""
    a, b = (x - x.mean() for x in (a.astype("float64"), b.astype("float64")))
    scale = numpy.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / scale) if scale else 0.0


def average_ranks(values):
    """Ranks from 0; equal values share the mean of theirs."""
    _, group, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum() - 1
    return (last - (counts - 1) / 2)[group]
