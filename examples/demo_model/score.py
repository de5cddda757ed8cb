"""How much a text looks like code rather than prose: a small naive-Bayes score in plain Python.

The model is a table of log-odds, one for each *lexeme feature* (a frequent word, a punctuation mark, the shape of a
rare word, a line's indentation), fitted by ``train.py`` on the same documents as the language model and kept in
``score.json``. It needs nothing but the standard library::

    score = CodeScore.load()
    score("    return self._items[0]")     # near 1: code
    score("The module provides a way to")  # near 0: prose

A text's log-odds is the mean over its lexemes, so that it does not grow with the text's length; the score in [0, 1] is
a logistic function of it, calibrated on excerpts about as long as what the demo generates.

``python score.py < text`` prints the score and the log-odds of standard input.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SCORE_FILE = Path(__file__).parent / "score.json"

#: An excerpt of this many lexemes is what the score is calibrated and tested on.
EXCERPT_LEXEMES = 50

#: No feature may weigh more than this, so that no single lexeme decides.
WEIGHT_LIMIT = 3.0

_LEXEME = re.compile(r"\n[ \t]*|[^\W\d]+|\d+|[^\w\s]")


def lexemes(text: str) -> list[str]:
    """Cut ``text`` into words, numbers, single punctuation marks and line starts (a newline and its indentation)."""
    return _LEXEME.findall(text)


def shape(lexeme: str) -> str:
    """Return the feature of a lexeme that is too rare to have one of its own: what kind of thing it is."""
    if lexeme[0] == "\n":
        return "<indent>" if len(lexeme) > 1 else "<newline>"
    if lexeme[0].isdigit():
        return "<number>"
    if not (lexeme[0].isalpha() or lexeme[0] == "_"):
        return "<punctuation>"
    if "_" in lexeme:
        return "<snake_case>"
    if lexeme.islower():
        return "<lower>"
    if lexeme.isupper():
        return "<UPPER>"
    if lexeme.istitle():
        return "<Title>"
    return "<camelCase>"


def excerpts(text: str, length: int = EXCERPT_LEXEMES) -> Iterator[str]:
    """Cut ``text`` into consecutive excerpts of ``length`` lexemes each; what is left over at the end is dropped."""
    starts = [match.start() for match in _LEXEME.finditer(text)]
    for first in range(0, len(starts) - length, length):
        yield text[starts[first] : starts[first + length]]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


@dataclass(frozen=True)
class CodeScore:
    """A fitted score: the log-odds of each feature, and the logistic calibration of their mean."""

    weights: dict[str, float]
    slope: float
    intercept: float

    def log_odds(self, text: str) -> float:
        """Return the mean of log p(lexeme | code) / p(lexeme | prose) over the lexemes of ``text``, or 0."""
        found = lexemes(text)
        if not found:
            return 0.0
        weights = self.weights
        return sum(weights[x] if x in weights else weights.get(shape(x), 0.0) for x in found) / len(found)

    def __call__(self, text: str) -> float:
        """Return how likely ``text`` is to be code, in [0, 1]."""
        return _sigmoid(self.slope * self.log_odds(text) + self.intercept)

    def accuracy(self, code: Iterable[str], prose: Iterable[str]) -> float:
        """Return the share of texts that fall on their own side of one half, the two kinds weighing the same."""
        right_code = [self(text) > 0.5 for text in code]
        right_prose = [self(text) <= 0.5 for text in prose]
        return (sum(right_code) / len(right_code) + sum(right_prose) / len(right_prose)) / 2

    @classmethod
    def fit(cls, code: Sequence[str], prose: Sequence[str], vocabulary: int = 1000) -> CodeScore:
        """Fit the score on documents of both kinds; the ``vocabulary`` most frequent lexemes get a weight each.

        A lexeme counts once in a document's every excerpt in which it occurs, so that a table of ten thousand commas
        says no more about code than a line of them.
        """
        pieces = {
            kind: [piece for text in texts for piece in excerpts(text)]
            for kind, texts in (("code", code), ("prose", prose))
        }
        seen = {kind: Counter(x for piece in found for x in set(lexemes(piece))) for kind, found in pieces.items()}
        total = {kind: sum(counter.values()) for kind, counter in seen.items()}
        frequency: dict[str, float] = {}
        for kind, counter in seen.items():
            for lexeme, count in counter.items():
                frequency[lexeme] = frequency.get(lexeme, 0.0) + count / total[kind]
        # Line starts always count by their shape: how deep a line is indented says nothing more.
        by_frequency = sorted(frequency, key=lambda x: (-frequency[x], x))
        kept = {x for x in by_frequency[:vocabulary] if x[0] != "\n"}
        features: dict[str, Counter[str]] = {}
        for kind, counter in seen.items():
            features[kind] = Counter()
            for lexeme, count in counter.items():
                features[kind][lexeme if lexeme in kept else shape(lexeme)] += count

        names = sorted(features["code"].keys() | features["prose"].keys())
        mass = {kind: sum(counter.values()) + len(names) for kind, counter in features.items()}
        weights = {}
        for name in names:
            odds = math.log((features["code"][name] + 1) / mass["code"])
            odds -= math.log((features["prose"][name] + 1) / mass["prose"])
            weights[name] = round(max(-WEIGHT_LIMIT, min(WEIGHT_LIMIT, odds)), 4)

        raw = cls(weights, 1.0, 0.0)
        points = [(raw.log_odds(piece), 1.0 if kind == "code" else 0.0) for kind in pieces for piece in pieces[kind]]
        share = {1.0: 0.5 / len(pieces["code"]), 0.0: 0.5 / len(pieces["prose"])}
        slope, intercept = _logistic([(x, y, share[y]) for x, y in points])
        return cls(weights, round(slope, 4), round(intercept, 4))

    def save(self, path: Path = SCORE_FILE) -> None:
        """Write the score as JSON."""
        content = {"slope": self.slope, "intercept": self.intercept, "weights": self.weights}
        path.write_text(json.dumps(content, indent=0, ensure_ascii=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path = SCORE_FILE) -> CodeScore:
        """Read a score that ``save`` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["weights"], content["slope"], content["intercept"])


def _logistic(points: Sequence[tuple[float, float, float]], ridge: float = 1e-4) -> tuple[float, float]:
    """Fit p(y) = sigmoid(slope x + intercept) to weighted points (x, y, weight) by Newton's method."""
    slope, intercept = 1.0, 0.0
    for _ in range(50):
        g0, g1, h00, h01, h11 = ridge * intercept, ridge * slope, ridge, 0.0, ridge
        for x, y, weight in points:
            p = _sigmoid(slope * x + intercept)
            error, curvature = weight * (p - y), weight * p * (1 - p)
            g0 += error
            g1 += error * x
            h00 += curvature
            h01 += curvature * x
            h11 += curvature * x * x
        determinant = h00 * h11 - h01 * h01
        step0, step1 = (h11 * g0 - h01 * g1) / determinant, (h00 * g1 - h01 * g0) / determinant
        intercept, slope = intercept - step0, slope - step1
        if abs(step0) + abs(step1) < 1e-6:
            break
    return slope, intercept


def main() -> None:
    """Print the score of standard input."""
    text = sys.stdin.read()
    score = CodeScore.load()
    print(f"score {score(text):.3f}  log-odds per lexeme {score.log_odds(text):+.3f}")


if __name__ == "__main__":
    main()
