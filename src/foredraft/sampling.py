"""Choosing the target's token from its logits: processors, filters, and noise that belongs to (seed, position, token).

The token at absolute position `p` is `argmax_v l[v]/T + g(seed, p, v)` over what the filters leave (noise.py): sampling
from the softmax, by noise that does not depend on what was drafted. Does not know drafters or text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from foredraft.contracts import Chooser, Scores, TokenIds
from foredraft.errors import NumericsError, UsageError
from foredraft.graph.tree import FloatArray
from foredraft.logits import exponentials, most_probable, row_reader
from foredraft.noise import perturbed_argmax

Probabilities = npt.NDArray[np.float64]
"""float64[V], none negative, with sum 1."""

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' protocol: (input_ids int64[1, n], scores float32[1, V]) -> scores float32[1, V]."""

SEED_LIMIT = 2**64
LEAST_TEMPERATURE = 1e-6
"""Below this, dividing the logits overflows float32; greedy decoding is meant."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; names and meaning are transformers'.

    Attributes:
        do_sample: draw from the softmax; otherwise take the most probable token.
        temperature: divides the logits; above 0.
        top_k: keep the `top_k` most probable tokens (and ties with the last); 0 keeps all.
        top_p: keep the smallest set of most probable tokens with at least this mass; 1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the sequence; 1 is off.
        seed: 0 to 2**64 - 1.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured.

        Raises:
            UsageError: a value outside its range.
        """
        if not (math.isfinite(self.temperature) and self.temperature >= LEAST_TEMPERATURE):
            raise UsageError(
                f"temperature is {self.temperature}; it must be at least {LEAST_TEMPERATURE:g}. For greedy decoding "
                "use do_sample=False."
            )
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; use a positive number of tokens, or 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps all tokens).")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; it must be between 0 and 1 (0 keeps all tokens).")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UsageError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off).")
        if not 0 <= self.seed < SEED_LIMIT:
            raise UsageError(f"seed is {self.seed}; it must be between 0 and 2**64 - 1.")


@njit(cache=True)
def _weight_above(weights: FloatArray, share: float, total: float) -> float:
    """Return the largest w such that weights >= w hold at least `share` of `total`: the nucleus's last weight."""
    # weights lie in [0, 1]; bins by powers of two find the few that need sorting
    bins = np.zeros(160, np.float64)
    for weight in weights:
        if weight > 0:
            bins[min(159, int(-np.log2(weight)))] += weight
    mass = 0.0
    last = 0
    while last < 159 and mass + bins[last] < share * total:
        mass += bins[last]
        last += 1
    edge = weights[(weights > 0.5 ** (last + 1) * 0.999) & (weights < 0.5**last * 1.001)]
    inside = weights[weights >= 0.5**last * 1.001]
    mass = 0.0
    for weight in inside:
        mass += weight
    cut = 2.0
    for weight in np.sort(edge)[::-1]:
        if mass >= share * total:
            break
        mass += weight
        cut = weight
    if cut > 1.5:  # everything needed lies above the edge bin
        cut = inside.min()
    return cut


@njit(cache=True)
def _kth_largest(row: FloatArray, k: int) -> float:
    """Return the k-th largest value of float32[V], 1 <= k <= V: by the high half of its bits, then by the low half."""
    keys = row.view(np.uint32).copy()
    for token in range(len(keys)):  # negative floats run backwards: turned over, the order of the bits is the values'
        keys[token] ^= np.uint32(0xFFFFFFFF if keys[token] >> np.uint32(31) else 0x80000000)
    low, missing = np.uint32(0), k
    for shift in (16, 0):
        counts = np.zeros(1 << 16, np.int64)
        for key in keys:
            if shift == 16 or key >> np.uint32(16) == low >> np.uint32(16):
                counts[(key >> np.uint32(shift)) & np.uint32(0xFFFF)] += 1
        half = len(counts) - 1
        while counts[half] < missing:
            missing -= counts[half]
            half -= 1
        low |= np.uint32(half) << np.uint32(shift)
    token = 0
    while keys[token] != low:
        token += 1
    return float(row[token])


@njit(cache=True)
def filter_row(row: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Return softmax weights relative to the most probable token, float32[V], 0 where a filter drops the token.

    The order is transformers': temperature, top-k, top-p on what top-k leaves, min-p. An empty array says that the
    row cannot be used (NaN, +inf, or nothing finite).
    """
    best = most_probable(row)
    if best < 0:
        return np.empty(0, np.float32)
    weights = exponentials(row, row[best], temperature)
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        _drop_filtered(weights, row, top_k, top_p, min_p)
    return weights


@njit(cache=True)
def _drop_filtered(weights: FloatArray, row: FloatArray, top_k: int, top_p: float, min_p: float) -> None:
    """Set in place to 0 the weights that top-k, top-p or min-p drops."""
    if 0 < top_k < len(row):
        smallest_kept = _kth_largest(row, top_k)
        for token in range(len(row)):
            if row[token] < smallest_kept:
                weights[token] = 0.0
    if top_p < 1.0:
        total = 0.0
        for weight in weights:
            total += weight
        cut = _weight_above(weights, top_p, total)
        for token in range(len(row)):
            if weights[token] < cut:
                weights[token] = 0.0
    if min_p > 0.0:
        for token in range(len(row)):
            if weights[token] < min_p:
                weights[token] = 0.0


@njit(cache=True)
def drawn(
    row: FloatArray, seed: np.uint64, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:  # fmt: skip
    """Return the token that a row, float32[V], puts at a position; -1 where the row cannot be used.

    A temperature of 0 takes the most probable one; the filters are those of `filter_row`.
    """
    if temperature == 0.0:
        return most_probable(row)
    weights = filter_row(row, temperature, top_k, top_p, min_p)
    return perturbed_argmax(weights, seed, position) if len(weights) else -1


def penalize(row: FloatArray, seen: TokenIds, penalty: float) -> None:
    """Apply transformers' repetition penalty in place to `row float32[V]` for the token ids `seen`."""
    seen = np.unique(seen)
    values = row[seen]
    row[seen] = np.where(values < 0, values * penalty, values / penalty)


def distribution(row: FloatArray, options: SamplingOptions) -> Probabilities:
    """Return the law by which `options` choose a token, float64[V]; greedy decoding's is one-hot.

    Args:
        row: float32[V], logits behind the penalty and the processors.
        options: temperature and filters apply; the penalty needs a prefix and is not applied here.

    Returns:
        float64[V] with sum 1; an empty array for a row that cannot be used (NaN, +inf, or nothing finite).
    """
    if options.do_sample:
        weights = filter_row(row, options.temperature, options.top_k, options.top_p, options.min_p).astype(np.float64)
    else:
        weights = np.zeros(len(row) if math.isfinite(row.max()) else 0, np.float64)
        weights[row.argmax() : row.argmax() + 1] = 1.0
    return weights / weights.sum() if len(weights) else weights


class Sampler:
    """How one sequence's tokens are chosen: options, processors, and the sequence's own prefix.

    Args:
        options: how to choose.
        processors: called in order with the node's own path, once for every emitted position, as plain decoding would.
        prefix: returns the emitted ids, int64[n], the root last.
    """

    def __init__(
        self, options: SamplingOptions, processors: Sequence[LogitsProcessor], prefix: Callable[[], TokenIds]
    ) -> None:
        self._options = options
        self._processors = tuple(processors)
        self._prefix = prefix
        self._seed = np.uint64(options.seed)
        temperature = options.temperature if options.do_sample else 0.0
        self._filters = (temperature, options.top_k, options.top_p, options.min_p)  # as `drawn` takes them
        self._needs_prefix = bool(self._processors) or options.repetition_penalty != 1.0

    def chooser(self, scores: Scores, at: int) -> Chooser:
        """Return what chooses the token after each row of `scores`, whose root stands at position `at`."""
        on_device = scores.best is not None or scores.logits.device.type != "cpu"
        told = self._tokens_after_rows(scores) if on_device and not self._needs_prefix else None
        if told is None:
            read = row_reader(scores.logits)

        def choose(row: int, path: Sequence[int]) -> int:
            position = at + len(path) + 1
            if told is not None:
                token = told[row]
            else:
                scored = self._row(read(row), scores.logits.device, path)
                token = drawn(scored, self._seed, position, *self._filters)
            if token < 0:
                raise NumericsError(_unusable(position))
            return int(token)

        return choose

    def _tokens_after_rows(self, scores: Scores) -> list[int] | None:
        """Return the token after every row where scores lie elsewhere, fetched in one go; None where rows are read."""
        if self._options.do_sample:
            return None if scores.draw is None else scores.draw(self._options.seed, *self._filters)
        if scores.best is not None:
            return list(scores.best.tolist())
        values, largest = (each.tolist() for each in scores.logits.max(dim=-1))
        return [token if math.isfinite(value) else -1 for value, token in zip(values, largest, strict=True)]

    def distribution(self, logits: torch.Tensor, at: int, path: Sequence[int]) -> Probabilities:
        """Return the law of the token after a row of `logits`, float[V], behind the emitted `path`, as float64[V].

        It is the law by which the chooser's token is drawn; greedy decoding's is one-hot. Processors are called.

        Raises:
            NumericsError: scores from which no token can be chosen.
        """
        law = distribution(self._row(row_reader(logits[None])(0), logits.device, path), self._options)
        if not len(law):
            raise NumericsError(_unusable(at + len(path) + 1))
        return law

    def _row(self, row: FloatArray, device: torch.device, path: Sequence[int]) -> FloatArray:
        """Return the scores of a row, float32[V], after the penalty and the processors."""
        if not self._needs_prefix:
            return row
        row, prefix = row.copy(), np.concatenate([self._prefix(), np.array(path, np.int64)])
        if self._options.repetition_penalty != 1.0:
            penalize(row, prefix, self._options.repetition_penalty)
        if self._processors:
            input_ids = torch.from_numpy(prefix).unsqueeze(0).to(device)  # processors may hold tensors there
            scores = torch.from_numpy(row).unsqueeze(0).to(device)
            for processor in self._processors:
                scores = processor(input_ids, scores)
            row = scores[0].float().cpu().numpy()
        return row


def _unusable(position: int) -> str:
    return (
        f"No token can be chosen at position {position}: the scores are NaN or infinite, or a filter left none. "
        "Check the model's weights and dtype, and the logits processors."
    )
