"""The operators of transformers' recurrent layers, for rows that form a tree: each row continues its parent's state.

One for each function that transformers' mixers call: the short convolution, the gated delta rule (Yang et al., "Gated
Delta Networks", ICLR 2025; Kimi Linear's has a decay for each channel), Mamba-2's scan (Dao and Gu, "Transformers are
SSMs", ICML 2024), Mamba's (Gu and Dao, "Mamba", 2023) and Griffin's (De et al., "Griffin", 2024). The recurrences
differ in what their keys, updates and decays are made of; the layer of the cache computes the rest. They take that
layer, and then the arguments of transformers' functions, for a batch of one. Do not know what a layer keeps, nor what a
model does with the results.
"""

from functools import reduce
from typing import Any

import torch

from foredraft.model.recurrent.layer import OperatorLayer, Reading

Result = tuple[torch.Tensor, torch.Tensor]
"""A row's outputs, and the committed state in place of the one that transformers' functions return."""


def convolution(
    layer: OperatorLayer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the causal depthwise convolution of [1, D, R] with `weight`, [D, L]: y = sum_l weight_l x_(L-1-l back)."""
    from transformers.activations import ACT2FN  # takes seconds to import

    inputs, windows = layer.convolution(weight.shape[-1], x[0].T)
    # in float32, as torch's convolution adds up products in 16 bits; one by one, so that all rows are added up alike
    taps = zip(windows.T, _wide(weight).T, strict=True)
    out: torch.Tensor = reduce(torch.add, (_wide(inputs[window]) * each for window, each in taps))
    out = out if bias is None else out + _wide(bias)
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(x.dtype).T[None]


def gated_delta_rule(
    layer: OperatorLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> Result:  # fmt: skip
    """Read [1, R, H, V] by S = exp(g) S_p + k u^T with u = beta (v - k exp(g) S_p).

    query and key are [1, R, Hk, K], with Hk a divisor of H, value is [1, R, H, V], beta [1, R, H], and g [1, R, H], or
    [1, R, H, K] with a decay for each channel.
    """
    q, k, v, gates, strengths = (_wide(each[0]) for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    gates = gates if gates.ndim == 3 else gates[..., None]
    out, state = layer.read(Reading(q * q.shape[-1] ** -0.5, k, v, gates, strengths))
    return out.to(query.dtype)[None], state


def mamba2_scan(
    layer: OperatorLayer, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int, D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> Result:  # fmt: skip
    """Read [1, R, H, P] by S = exp(A dt) S_p + B (dt x)^T, y = C S + D x.

    x is [1, R, H, P], dt [1, R, H], A and D [H], B and C [1, R, G, N], with G a divisor of H.
    """
    del chunk_size
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    steps = torch.nn.functional.softplus(steps) if dt_softplus else steps
    if tuple(dt_limit) != (0.0, float("inf")):
        # transformers limits the steps of a prompt, and not those of the tokens that it writes
        steps = torch.where(layer.in_prompt()[:, None], steps.clamp(*dt_limit), steps)
    values, steps = _wide(x[0]), _wide(steps)
    updates = values * steps[..., None]
    out, state = layer.read(Reading(_wide(C[0]), _wide(B[0]), updates, (A.to(steps) * steps)[..., None]))
    out = out if D is None else out + _wide(D)[:, None] * values
    return out[None].contiguous(), state


def mamba_scan(
    layer: OperatorLayer, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False, **_: Any,
) -> Result:  # fmt: skip
    """Read [1, D, R] by s = exp(A dt) s_p + B (dt x), y = C s + D x, gated by z: D heads with values of size 1.

    x, dt and z are [1, D, R], A is [D, N], B and C are [1, N, R], and D is [D].
    """
    steps = dt[0] if delta_bias is None else dt[0] + delta_bias.to(dt.dtype)[:, None]
    steps = _wide(torch.nn.functional.softplus(steps) if delta_softplus else steps).T
    values = _wide(x[0]).T
    k, q = (_wide(each[0]).T[:, None].expand(-1, steps.shape[1], -1) for each in (B, C))
    rates = A.to(steps)
    gates, updates = rates * steps[..., None], (steps * values)[..., None]
    out, state = layer.read(Reading(q, k, updates, gates, factors=(steps, rates)))
    out = out[..., 0]
    out = out if D is None else out + values * _wide(D)
    out = out if z is None else out * torch.nn.functional.silu(_wide(z[0]).T)
    return out.T[None].to(x.dtype), state


class _Unit:
    """RecurrentGemma's real-gated linear recurrent unit, whose own code computes the gates, with another scan."""

    def __init__(self, layer: OperatorLayer, unit: Any) -> None:
        self._layer, self._unit = layer, unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    def _rnn_scan(
        self, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **_: Any
    ) -> Result:
        """Read [1, R, D] by s = a s_p + x: D heads with keys and values of size 1."""
        del reset  # at the first token, before which the state is 0
        values, decays = _wide(hidden_states[0])[..., None], _wide(recurrent_gate[0])[..., None]
        ones = torch.ones_like(values)
        gates = decays.clamp_min(torch.finfo(decays.dtype).tiny).log()
        out, state = self._layer.read(Reading(ones, ones, values, gates))
        return out[..., 0].to(hidden_states.dtype)[None], state


def griffin_block(
    layer: OperatorLayer, block: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Return the output of RecurrentGemma's recurrent block, [1, R, D]; its own code keeps states in its modules."""
    convolved = convolution(
        layer, block.linear_x(input_states).transpose(1, 2), block.conv_1d.weight[:, 0], block.conv_1d.bias
    )
    read = type(block.rg_lru).forward(_Unit(layer, block.rg_lru), convolved.transpose(1, 2), position_ids)
    return block.linear_out(read * block.act_fn(block.linear_y(input_states))), None


def _wide(each: torch.Tensor) -> torch.Tensor:
    return each if each.dtype == torch.float64 else each.float()
