"""Choosing the target's token from its logits: processors, filters, and noise that belongs to (seed, position, token).

The token at absolute position `p` is `argmax_v l[v]/T + g(seed, p, v)` over what the filters leave, with `g` a standard
Gumbel value. That is sampling from the softmax, and it does not depend on what was drafted, so plain and speculative
decoding with one seed agree token for token. Does not know trees, drafters or text.

Noise comes from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): key = the 64-bit
seed, counter = (token // 4, position, 0, 0), output lane = token % 4. A value is computed for a token alone, so any
subset of the vocabulary, on any machine, sees the same noise. With u = (lane + 0.5) / 2**32, g = -log(-log(u)); the
32-bit grid moves no token's probability by more than about 1e-10.
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
from foredraft.logits import row_reader

Probabilities = npt.NDArray[np.float64]
"""float64[V], none negative, with sum 1."""

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' protocol: (input_ids int64[1, n], scores float32[1, V]) -> scores float32[1, V]."""

SEED_LIMIT = 2**64
LEAST_TEMPERATURE = 1e-6
"""Below this, dividing the logits overflows float32; greedy decoding is meant."""
_BLOCKS = 64  # Philox blocks worked on together, four tokens each


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


@njit(cache=True, inline="always")
def _philox_round(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    p0 = np.uint64(0xD2511F53) * np.uint64(c0)
    p1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
    hi0, lo0 = np.uint32(p0 >> np.uint64(32)), np.uint32(p0 & np.uint64(0xFFFFFFFF))
    hi1, lo1 = np.uint32(p1 >> np.uint64(32)), np.uint32(p1 & np.uint64(0xFFFFFFFF))
    return np.uint32(hi1 ^ c1 ^ k0), lo1, np.uint32(hi0 ^ c3 ^ k1), lo0


@njit(cache=True)
def philox(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return Philox-4x32-10 of one counter, uint32[4], under a key, uint32[2], as uint32[4]."""
    c0, c1, c2, c3 = counter[0], counter[1], counter[2], counter[3]
    k0, k1 = key[0], key[1]
    for _ in range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF))
        k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85) & np.uint64(0xFFFFFFFF))
    return np.array([c0, c1, c2, c3], np.uint32)


@njit(cache=True)
def uniform_noise(seed: np.uint64, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return u(seed, position, token) in (0, 1) for each of `tokens`, float64[n]."""
    key = np.array([seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32)], np.uint64).astype(np.uint32)
    counter = np.zeros(4, np.uint32)
    counter[1] = position
    noise = np.empty(len(tokens), np.float64)
    for i in range(len(tokens)):
        counter[0] = tokens[i] // 4
        noise[i] = (np.float64(philox(counter, key)[tokens[i] % 4]) + 0.5) / 4294967296.0
    return noise


def gumbel_noise(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return g(seed, position, token) for each of `tokens`: standard Gumbel values, float64[n]."""
    return -np.log(-np.log(uniform_noise(np.uint64(seed), position, tokens)))


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


def filter_row(row: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> FloatArray:
    """Return softmax weights relative to the most probable token, float32[V], 0 where a filter drops the token.

    The order is transformers': temperature, top-k, top-p on what top-k leaves, min-p. An empty array says that the
    row cannot be used (NaN, +inf, or nothing finite).
    """
    largest = row[row.argmax()]  # NaN if there is one
    if not math.isfinite(largest):
        return row[:0]
    weights = _scaled(row, largest, np.float32(temperature))
    np.exp(weights, out=weights)  # numpy's is vectorised; numba's is not
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        _drop_filtered(weights, row, top_k, top_p, min_p)
    return weights


@njit(cache=True, error_model="numpy")
def _scaled(row: FloatArray, largest: np.float32, temperature: np.float32) -> FloatArray:
    """Return (row - largest) / temperature; -inf where a small temperature leaves nothing else."""
    scaled = np.empty(len(row), np.float32)
    for i in range(len(row)):
        scaled[i] = (row[i] - largest) / temperature
    return scaled


@njit(cache=True)
def _drop_filtered(weights: FloatArray, row: FloatArray, top_k: int, top_p: float, min_p: float) -> None:
    """Set in place to 0 the weights that top-k, top-p or min-p drops."""
    if 0 < top_k < len(row):
        smallest_kept = np.partition(row, len(row) - top_k)[len(row) - top_k]
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
def _noise_words(first: int, position: int, k0: np.uint32, k1: np.uint32, lanes: npt.NDArray[np.uint32]) -> None:
    """Set `lanes`, uint32[4, n], to Philox's output for the n blocks from `first` on; in step, as vectors go."""
    c0, c1, c2, c3 = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(len(c0)):
        c0[i], c1[i], c2[i], c3[i] = np.uint32(first + i), np.uint32(position), np.uint32(0), np.uint32(0)
    for _ in range(10):
        for i in range(len(c0)):
            c0[i], c1[i], c2[i], c3[i] = _philox_round(c0[i], c1[i], c2[i], c3[i], k0, k1)
        k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF))
        k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85) & np.uint64(0xFFFFFFFF))


@njit(cache=True)
def _may_win(weights: FloatArray, lanes: npt.NDArray[np.uint32], bar: float) -> bool:
    """Say whether one of some weights, float32[4n], may exceed `bar`, without a branch for each, as vectors go."""
    hits = 0
    for lane in range(4):
        words = lanes[lane]
        for i in range(len(words)):
            u = (np.float64(words[i]) + 0.5) / 4294967296.0
            hits += 1 if np.float64(weights[4 * i + lane]) >= bar * (1.0 - u) else 0
    return hits > 0


@njit(cache=True)
def perturbed_argmax(weights: FloatArray, seed: np.uint64, position: int) -> int:
    """Return argmax over tokens of log(weight) + g(seed, position, token).

    A token can only win if its weight exceeds (1 - u) times the best exp(score) so far, because -log(u) >= 1 - u;
    that leaves a logarithm to take for a handful of tokens, and no noise where a filter left nothing.
    """
    k0, k1 = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    best_token, best_score, bar = -1, -np.inf, 0.0
    blocks = min(_BLOCKS, (len(weights) + 3) // 4)
    lanes = np.empty((4, blocks), np.uint32)
    for start in range(0, len(weights), max(4 * blocks, 1)):
        stop = min(start + 4 * blocks, len(weights))
        alive = False
        for token in range(start, stop):
            alive = alive | (weights[token] > 0)
        if not alive:
            continue
        _noise_words(start // 4, position, k0, k1, lanes)
        if bar > 0 and stop - start == 4 * blocks and not _may_win(weights[start:stop], lanes, bar):
            continue
        for token in range(start, stop):
            weight = np.float64(weights[token])
            u = (np.float64(lanes[token % 4, (token - start) // 4]) + 0.5) / 4294967296.0
            if weight <= 0 or weight < bar * (1.0 - u):
                continue
            score = np.log(weight) - np.log(-np.log(u))
            if score > best_score:
                best_token, best_score = token, score
                bar = np.exp(score) * (1.0 - 1e-9)
    return best_token


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
        self._needs_prefix = bool(self._processors) or options.repetition_penalty != 1.0

    def chooser(self, scores: Scores, at: int) -> Chooser:
        """Return what chooses the token after each row of `scores`, whose root stands at position `at`."""
        on_device = scores.best is not None or scores.logits.device.type != "cpu"
        if on_device and not self._options.do_sample and not self._needs_prefix:
            return self._greedy_chooser(scores, at)
        read, device = row_reader(scores.logits), scores.logits.device
        return lambda row, path: self._choose(self._row(read(row), device, path), at + len(path) + 1)

    def _greedy_chooser(self, scores: Scores, at: int) -> Chooser:
        """Return what chooses greedily where scores lie elsewhere: the best of all rows are fetched in one go."""
        if scores.best is not None:
            tokens = scores.best.tolist()
        else:
            values, largest = (each.tolist() for each in scores.logits.max(dim=-1))
            tokens = [token if math.isfinite(value) else -1 for value, token in zip(values, largest, strict=True)]

        def choose(row: int, path: Sequence[int]) -> int:
            if tokens[row] < 0:
                raise NumericsError(_unusable(at + len(path) + 1))
            return int(tokens[row])

        return choose

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

    def _choose(self, row: FloatArray, position: int) -> int:
        options = self._options
        if not options.do_sample:
            token = int(row.argmax())
            if not math.isfinite(row[token]):
                raise NumericsError(_unusable(position))
            return token
        weights = filter_row(row, options.temperature, options.top_k, options.top_p, options.min_p)
        if not len(weights):
            raise NumericsError(_unusable(position))
        token = int(perturbed_argmax(weights, self._seed, position))
        if token < 0:
            raise NumericsError(_unusable(position))
        return token

    def _row(self, row: FloatArray, device: torch.device, path: Sequence[int]) -> FloatArray:
        """Return the scores of a row, float32[V], after the processors."""
        if not self._needs_prefix:
            return row
        return self._processed(row.copy(), np.concatenate([self._prefix(), np.array(path, np.int64)]), device)

    def _processed(self, row: FloatArray, prefix: TokenIds, device: torch.device) -> FloatArray:
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
