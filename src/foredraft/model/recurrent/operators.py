"""The operators of transformers' recurrent layers, for rows that form a tree: each row continues its parent's state.

One for each function that transformers' mixers call: the short convolution, the gated delta rule (Yang et al., "Gated
Delta Networks", ICLR 2025; Kimi Linear's has a decay for each channel), Mamba-2's scan (Dao and Gu, "Transformers are
SSMs", ICML 2024), Mamba's (Gu and Dao, "Mamba", 2023) and Griffin's (De et al., "Griffin", 2024). The recurrences
differ in what their keys, updates and decays are made of; `_read` computes the rest. They take the layer of the cache,
and then the arguments of transformers' functions, for a batch of one. Do not know what a model does with the results.
"""

from typing import Any

import torch
from transformers.activations import ACT2FN

from foredraft.model.recurrent.state import Recurrence, Rows, StateLayer

Result = tuple[torch.Tensor, torch.Tensor]
"""A row's outputs, and the committed state in place of the one that transformers' functions return."""


def convolution(
    layer: StateLayer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the causal depthwise convolution of [1, D, R] with `weight`, [D, L]: y = sum_l weight_l x_(L-1-l back)."""
    taps = weight.shape[-1]
    found = layer.convolution(taps, x[0].T)
    windows = layer.rows.windows(taps)
    # in float32, as torch's convolution adds up products in 16 bits
    inputs, weights = _wide(torch.cat([found.history, found.inputs])), _wide(weight)
    out = torch.stack([inputs[windows[:, tap]] * weights[:, tap] for tap in range(taps)]).sum(0)
    out = out if bias is None else out + _wide(bias)
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(x.dtype).T[None]


def gated_delta_rule(
    layer: StateLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> Result:  # fmt: skip
    """Read [1, R, H, V] by S = exp(g) S_p + k u^T with u = beta (v - k exp(g) S_p).

    query and key are [1, R, Hk, K], with Hk a divisor of H, value is [1, R, H, V], beta [1, R, H], and g [1, R, H], or
    [1, R, H, K] with a decay for each channel.
    """
    q, k, v, gates, strengths = (_wide(each[0]) for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(v.shape[1] // k.shape[1], 1) for each in (q * q.shape[-1] ** -0.5, k))
    found = layer.recurrence(k, v, gates if gates.ndim == 3 else gates[..., None])
    return _read(found, layer.rows, q, v, strengths).to(query.dtype)[None], found.state


def mamba2_scan(
    layer: StateLayer, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int, D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> Result:  # fmt: skip
    """Read [1, R, H, P] by S = exp(A dt) S_p + B (dt x)^T, y = C S + D x.

    x is [1, R, H, P], dt [1, R, H], A and D [H], B and C [1, R, G, N], with G a divisor of H.
    """
    del chunk_size
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    steps = torch.nn.functional.softplus(steps) if dt_softplus else steps
    # transformers limits the steps of a prompt, and not those of the tokens that it writes
    steps = _wide(torch.where(layer.rows.in_prompt[:, None], steps.clamp(*dt_limit), steps))
    values = _wide(x[0])
    k, q = (_wide(each[0]).repeat_interleave(x.shape[2] // each.shape[2], 1) for each in (B, C))
    updates = values * steps[..., None]
    found = layer.recurrence(k, updates, (A.to(steps) * steps)[..., None])
    out = _read(found, layer.rows, q, updates)
    out = out if D is None else out + _wide(D)[:, None] * values
    return out[None].contiguous(), found.state


def mamba_scan(
    layer: StateLayer, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
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
    updates = (steps * values)[..., None]
    found = layer.recurrence(k, updates, A.to(steps) * steps[..., None])
    out = _read(found, layer.rows, q, updates)[..., 0]
    out = out if D is None else out + values * _wide(D)
    out = out if z is None else out * torch.nn.functional.silu(_wide(z[0]).T)
    return out.T[None].to(x.dtype), found.state


class _Unit:
    """RecurrentGemma's real-gated linear recurrent unit, whose own code computes the gates, with another scan."""

    def __init__(self, layer: StateLayer, unit: Any) -> None:
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
        found = self._layer.recurrence(ones, values, decays.clamp_min(torch.finfo(decays.dtype).tiny).log())
        return _read(found, self._layer.rows, ones, values)[..., 0].to(hidden_states.dtype)[None], found.state


def griffin_block(
    layer: StateLayer, block: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Return the output of RecurrentGemma's recurrent block, [1, R, D]; its own code keeps states in its modules."""
    convolved = convolution(
        layer, block.linear_x(input_states).transpose(1, 2), block.conv_1d.weight[:, 0], block.conv_1d.bias
    )
    read = type(block.rg_lru).forward(_Unit(layer, block.rg_lru), convolved.transpose(1, 2), position_ids)
    return block.linear_out(read * block.act_fn(block.linear_y(input_states))), None


def _wide(each: torch.Tensor) -> torch.Tensor:
    return each if each.dtype == torch.float64 else each.float()


def _read(
    found: Recurrence, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what rows with these queries, [R, H, K], read after their ancestors' updates and their own, [R, H, V].

    Their updates are recorded: `v`, [R, H, V], or with `beta`, [R, H], those of the delta rule.
    """
    one_decay = found.gates.shape[-1] == 1 and v.shape[-1] > 1
    return (_read_at_once if one_decay else _read_in_order)(found, rows, q, v, beta)


def _read_at_once(
    found: Recurrence, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Do so by masked products of all rows, where each head has one decay.

    With G_i the sum of the gates on row i's path, S_i = exp(G_i) S + sum_j exp(G_i - G_j) k_j u_j^T over its ancestors
    j and itself, so the updates of the delta rule solve a triangular system of equations.
    """
    held, decays, own = rows.held, found.decays, found.decays[rows.held :]
    since = own.exp()  # the decay of the committed state
    between = (own[..., 0].T[:, :, None] - decays[..., 0].T[:, None]).masked_fill(~rows.sees, -torch.inf).exp()
    updates = v
    if beta is not None:
        keys = found.keys[held:]
        system = torch.einsum("rhk,thk->hrt", keys, found.keys) * between * beta.T[..., None]
        updates = beta[..., None] * (v - torch.einsum("rhk,hkv->rhv", keys * since, found.state))
        updates = updates - torch.einsum("hrt,thv->rhv", system[..., :held], found.updates[:held])
        lower = system[..., held:].tril(-1)  # a parent comes before its children
        solved = torch.linalg.solve_triangular(lower, updates.transpose(0, 1), upper=False, unitriangular=True)
        updates = solved.transpose(0, 1)
    found.updates = torch.cat([found.updates[:held], updates])
    weights = torch.einsum("rhk,thk->hrt", q, found.keys) * between
    committed = torch.einsum("rhk,hkv->rhv", q * since, found.state)
    return committed + torch.einsum("hrt,thv->rhv", weights, found.updates)


def _read_in_order(
    found: Recurrence, rows: Rows, q: torch.Tensor, v: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Do so row by row, each from its parent's matrices.

    That is where each channel has a decay of its own, or values are single numbers: products of all pairs of rows would
    need more memory than the matrices.
    """
    held, states, updates, outputs = rows.held, dict[int, torch.Tensor](), [found.updates[: rows.held]], []
    for at, (parent, path) in enumerate(rows.lineage, start=held):
        before = states[parent] if parent in states else found.after(path)
        state, key, update = before * found.gates[at].exp()[..., None], found.keys[at], v[at - held]
        if beta is not None:
            update = beta[at - held][:, None] * (update - (state * key[..., None]).sum(-2))
        state = state + key[..., None] * update[:, None]
        updates.append(update[None])
        outputs.append((state * q[at - held][..., None]).sum(-2))
        if at in rows.last_child:
            states[at] = state
        if rows.last_child[parent] == at:
            states.pop(parent, None)
    found.updates = torch.cat(updates)
    return torch.stack(outputs)
