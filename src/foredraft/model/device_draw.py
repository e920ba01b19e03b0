"""Sampling on the device that holds the logits: draws one token after every row of a pass.

Applies the same filters and noise (sampling/noise.py) as sampling/chooser.py on the host, in operations that never wait
for the device. A row's token does not depend on the other rows, so the walk down the draft reads the tokens that it
needs. Does not depend on what was drafted.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from foredraft.errors import ForedraftWarning, told

SETTINGS = 6  # numbers: the seed's lower and upper 32 bits, temperature, top-k, top-p, min-p
_WORD = 0xFFFFFFFF
_MOST_AT_ONCE = 1 << 21  # logits; drawing takes some hundred bytes of device memory for each
Record = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Returns a function that repeats the given one; RuntimeError if the device cannot record it."""


class DrawnRows:
    """The tokens that sampling draws after the rows of passes of one shape.

    `logits` are set to the last pass's, float[R, V]; `positions`, int64[R], are its rows'. Both lie on the device, and
    once draws are recorded, neither may move. `record` returns a function that repeats the given one.
    """

    def __init__(self, positions: torch.Tensor, record: Record) -> None:
        self.logits = positions.new_empty(0, 0)
        self._positions, self._record = positions, record
        self._settings = torch.empty(SETTINGS, dtype=torch.float64, device=positions.device)
        self._copied: tuple[float, ...] = ()
        self._draws: dict[bool, Callable[[], torch.Tensor]] = {}  # with filters, without

    def tokens(self, settings: tuple[float, ...], *, filters: bool) -> torch.Tensor:
        """Return the tokens after all rows, int64[R], which the next call may overwrite.

        Raises RuntimeError if the first that a fused kernel draws are not those of `drawn_rows`.
        """
        if settings != self._copied:
            self._settings.copy_(torch.tensor(settings, dtype=torch.float64))
            self._copied = settings
        if filters in self._draws:
            return self._draws[filters]()
        draw: Callable[[], torch.Tensor] = partial(self._draw, filters=filters)
        draw()  # compiles, which must not happen on the stream of a recording
        with suppress(RuntimeError):  # what cannot be recorded, for example a sort, is done unrecorded each time
            draw = self._record(draw)
        tokens = draw()
        if not torch.equal(tokens, drawn_rows(self.logits, self._positions, self._settings, filters=filters)):
            raise RuntimeError("fused into one kernel, drawing gives other tokens")
        self._draws[filters] = draw
        return tokens

    def _draw(self, *, filters: bool) -> torch.Tensor:
        return quickest_draw(self.logits, self._positions, self._settings, filters=filters)


class RowDraws:
    """Draws tokens after rows, until that fails once."""

    def __init__(self) -> None:
        self._failed = False

    @torch.inference_mode()
    def draw(
        self,
        drawn: DrawnRows, count: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float,
    ) -> list[int] | None:  # fmt: skip
        """Return the tokens after the first `count` rows, as `drawn_rows` does; None, with a warning, if that fails."""
        if self._failed:
            return None
        settings = float(seed & _WORD), float(seed >> 32), temperature, float(top_k), top_p, min_p
        try:
            found: list[int] = drawn.tokens(settings, filters=top_k > 0 or top_p < 1.0 or min_p > 0.0).tolist()
        except Exception as error:  # noqa: BLE001  # compilers can raise anything, and the host can draw instead
            self._failed = True
            sentence = f"Tokens cannot be drawn on this device ({told(error)}); the host draws them."
            warnings.warn(sentence, ForedraftWarning, stacklevel=2)
            return None
        return found[:count]


def quickest_draw(logits: torch.Tensor, *rows: torch.Tensor, filters: bool) -> torch.Tensor:
    """Return what `drawn_rows` does, on CUDA devices in one kernel."""
    if logits.device.type != "cuda":
        return drawn_rows(logits, *rows, filters=filters)
    drawn: torch.Tensor = _fused()(logits, *rows, _counters(logits), filters=filters)
    return drawn


@cache
def _fused() -> Callable[..., torch.Tensor]:
    """Return `_drawn` compiled for any number of rows: unfused, the noise passes through memory a hundred times."""
    return torch.compile(_drawn, dynamic=True, fullgraph=True)


def drawn_rows(logits: torch.Tensor, positions: torch.Tensor, settings: torch.Tensor, *, filters: bool) -> torch.Tensor:
    """Return the token that sampling draws after each row, int64[R], computed on the device.

    It is -1 where a row of the logits, float[R, V], contains NaN or +inf, or nothing finite. `positions`, int64[R], are
    the rows', one before the tokens'; `settings` are float64[6]; `filters`: whether top-k, top-p or min-p is in effect.
    """
    rows = max(1, _MOST_AT_ONCE // logits.shape[1])
    parts, counters = zip(logits.split(rows), positions.split(rows), strict=True), _counters(logits)
    return torch.cat([_drawn(*part, settings, counters, filters=filters) for part in parts])


def _counters(logits: torch.Tensor) -> torch.Tensor:
    """Return Philox's counters of a row of the logits, four tokens each.

    The compiler takes the numbers of a range that it makes itself for 32-bit ones, which Philox's factors exceed.
    """
    return torch.arange((logits.shape[1] + 3) // 4, device=logits.device)


def _drawn(
    logits: torch.Tensor, positions: torch.Tensor, settings: torch.Tensor, counters: torch.Tensor, *, filters: bool
) -> torch.Tensor:
    rows = logits.float()
    best = rows.max(dim=-1, keepdim=True).values
    scaled = (rows - best) / settings[2].to(torch.float32)
    if filters:
        scaled = scaled.masked_fill(_is_dropped(rows, scaled, settings), -torch.inf)
    noise = gumbel_rows(positions + 1, counters, settings)[:, : rows.shape[1]]
    return (scaled.double() + noise).argmax(dim=-1).masked_fill(~best[:, 0].isfinite(), -1)


def _is_dropped(rows: torch.Tensor, scaled: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Return which tokens transformers' filters drop, bool[R, V]: top-k, top-p of the remaining ones, min-p."""
    width = rows.shape[1]
    falling, order = rows.sort(dim=-1, descending=True)
    kept = settings[3].to(torch.int64)
    last = torch.where((kept > 0) & (kept < width), kept, width) - 1
    by_k = falling.index_select(1, last.reshape(1))
    weights = scaled.gather(1, order).exp().double().masked_fill(falling < by_k, 0.0)
    before = weights.cumsum(dim=-1) - weights
    inside = (before < settings[4] * weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True).clamp(1, width) - 1
    by_p = torch.where(settings[4] < 1.0, falling.gather(1, inside), -torch.inf)
    by_min = torch.where(settings[5] > 0.0, settings[5].log(), -torch.inf).to(torch.float32)
    return (rows < by_k) | (rows < by_p) | (scaled < by_min)


def gumbel_rows(positions: torch.Tensor, counters: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Return g(seed, position, token) of `foredraft.sampling.noise` for whole rows, float64[R, 4 N].

    Takes the positions of the drawn tokens, int64[R], Philox's counters 0 to N - 1, int64[N], and `SETTINGS`. Philox's
    32-bit words are held in int64; its products wrap as unsigned ones do.
    """
    c0 = counters.expand(len(positions), -1)
    c1 = (positions & _WORD)[:, None].expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = settings[:2].to(torch.int64)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    words = torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)
    return -torch.log(-torch.log((words.double() + 0.5) / 4294967296.0))
