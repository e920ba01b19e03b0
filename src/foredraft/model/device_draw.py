"""The draws of sampling/chooser.py where the scores lie: the token after every row, found on the device, one each.

The same filters and the same noise (sampling/noise.py) as on the host, in operations that never wait for the device.
Knows scores and positions; not what was drafted: a row's token is the same whatever the other rows are, and the walk
down the draft reads it.
"""

import functools
from collections.abc import Callable

import torch

LAW = 6
"""Numbers that say how tokens are drawn: the seed's lower and upper 32 bits, temperature, top-k, top-p, min-p."""

_WORD = 0xFFFFFFFF
_MOST_AT_ONCE = 1 << 21  # scores; their noise takes some hundred bytes each on its way


class RowDraws:
    """Draws after the rows of passes; what is fused is compared with what is not at its first use."""

    def __init__(self) -> None:
        self._compared: set[bool] = set()  # with filters, without

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        seed: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> list[int]:
        """Return the tokens after rows, -1 where a row cannot be used.

        Args:
            logits: float[R, V].
            positions: int64[R], absolute ones of the rows.
            seed: as `foredraft.sampling.chooser.drawn` takes it, like all that follows.
            temperature: the same.
            top_k: the same.
            top_p: the same.
            min_p: the same.

        Raises:
            RuntimeError: fused, the tokens are others.
        """
        law = float(seed & _WORD), float(seed >> 32), temperature, float(top_k), top_p, min_p
        on_device = positions.to(logits.device), torch.tensor(law, dtype=torch.float64).to(logits.device)
        filters = top_k > 0 or top_p < 1.0 or min_p > 0.0
        tokens: list[int] = quickest_draw(logits.device)(logits, *on_device, filters=filters).tolist()
        if filters not in self._compared and tokens != drawn_rows(logits, *on_device, filters=filters).tolist():
            raise RuntimeError("fused into one kernel, drawing gives other tokens")
        self._compared.add(filters)
        return tokens


def quickest_draw(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return what does what `drawn_rows` does in the least time."""
    return _fused() if device.type == "cuda" else drawn_rows


@functools.cache
def _fused() -> Callable[..., torch.Tensor]:
    """Return it compiled, for any number of rows: op by op, the noise goes through memory a hundred times."""
    return torch.compile(_drawn, dynamic=True, fullgraph=True)


def drawn_rows(logits: torch.Tensor, positions: torch.Tensor, law: torch.Tensor, *, filters: bool) -> torch.Tensor:
    """Return the token that sampling puts after each row, all of it on the device.

    Args:
        logits: float[R, V].
        positions: int64[R], absolute ones of the rows; a row's token stands one further.
        law: float64[6], see `LAW`.
        filters: whether top-k, top-p or min-p drops tokens.

    Returns:
        int64[R]; -1 where a row holds NaN or +inf, or nothing finite.
    """
    together = max(1, _MOST_AT_ONCE // logits.shape[1])
    parts = zip(logits.split(together), positions.split(together), strict=True)
    return torch.cat([_drawn(*part, law, filters=filters) for part in parts])


def _drawn(logits: torch.Tensor, positions: torch.Tensor, law: torch.Tensor, *, filters: bool) -> torch.Tensor:
    rows = logits.float()
    best = rows.max(dim=-1, keepdim=True).values
    scaled = (rows - best) / law[2].to(torch.float32)
    if filters:
        scaled = scaled.masked_fill(_is_dropped(rows, scaled, law), -torch.inf)
    chosen = (scaled.double() + gumbel_rows(positions + 1, rows.shape[1], law)).argmax(dim=-1)
    return chosen.masked_fill(~best[:, 0].isfinite(), -1)


def _is_dropped(rows: torch.Tensor, scaled: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """Say which tokens transformers' filters drop, bool[R, V]: top-k, top-p of what that leaves, min-p.

    Args:
        rows: float32[R, V].
        scaled: float32[R, V], logarithms of the weights relative to the most probable token's.
        law: float64[6].
    """
    width = rows.shape[1]
    falling, order = rows.sort(dim=-1, descending=True)
    kept = law[3].to(torch.int64)
    last = torch.where((kept > 0) & (kept < width), kept, width) - 1
    by_k = falling.index_select(1, last.reshape(1))
    weights = scaled.gather(1, order).exp().double().masked_fill(falling < by_k, 0.0)
    before = weights.cumsum(dim=-1) - weights
    inside = (before < law[4] * weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True).clamp(1, width) - 1
    by_p = torch.where(law[4] < 1.0, falling.gather(1, inside), -torch.inf)
    by_min = torch.where(law[5] > 0.0, law[5].log(), -torch.inf).to(torch.float32)
    return (rows < by_k) | (rows < by_p) | (scaled < by_min)


def gumbel_rows(positions: torch.Tensor, width: int, law: torch.Tensor) -> torch.Tensor:
    """Return g(seed, position, token) of `foredraft.sampling.noise` for whole rows, float64[R, width].

    Philox's 32-bit words are held in int64, whose products wrap as they do in unsigned numbers.

    Args:
        positions: int64[R], where the tokens will stand.
        width: tokens from 0 on.
        law: float64[6], of which the first two are the seed.
    """
    c0 = torch.arange((width + 3) // 4, device=law.device).expand(len(positions), -1)
    c1 = (positions & _WORD)[:, None].expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = law[:2].to(torch.int64)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    words = torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :width]
    return -torch.log(-torch.log((words.double() + 0.5) / 4294967296.0))
