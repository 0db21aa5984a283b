"""SQuAD's exact match and F1 in percent, as the official evaluation of version 1.1 defines them."""

import collections
import re
import string

import datasets
import evaluate

PUNCTUATION = str.maketrans("", "", string.punctuation)


class Squad(evaluate.Metric):
    """exact_match and f1, of the best of each question's true answers, averaged over questions."""

    def _info(self):
        answers = {
            "text": datasets.List(datasets.Value("string")),
            "answer_start": datasets.List(datasets.Value("int64")),
        }
        features = {
            "predictions": {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")},
            "references": {"id": datasets.Value("string"), "answers": answers},
        }
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Rajpurkar et al. 2016, arXiv 1606.05250",
            inputs_description="predictions: id, prediction_text; references: id, answers (text, answer_start).",
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references):
        given = {row["id"]: row["prediction_text"] for row in predictions}
        matches, f1s = [], []
        for row in references:
            prediction = words(given[row["id"]])
            truths = [words(text) for text in row["answers"]["text"]]
            matches.append(max(prediction == truth for truth in truths))
            f1s.append(max(f1(prediction, truth) for truth in truths))
        return {"exact_match": 100 * sum(matches) / len(matches), "f1": 100 * sum(f1s) / len(f1s)}


def words(text):
    """Lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def f1(prediction, truth):
    """Of two lists of words; 0 without a common one."""
    common = sum((collections.Counter(prediction) & collections.Counter(truth)).values())
    return 2 * common / (len(prediction) + len(truth)) if common else 0.0
