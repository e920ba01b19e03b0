"""Tensors as transformers' modules hold them, from the order in which llama.cpp's conversions store them.

One function a kind of rearrangement, the inverse of the conversion's, but for dimensions of one. Arithmetic is done on
vectors only, so that other tensors keep the numbers that the file has. Does not read files.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

Change = Callable[[torch.Tensor, Any], torch.Tensor]
"""A tensor of a file, rows first, and the configuration -> the tensor of the module, whose dtype is set later."""


def _parted(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with a dimension parted into several; torch does not annotate its own."""
    found: torch.Tensor = tensor.unflatten(dim, sizes)
    return found


def _halves(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the first numbers of a head's rotary pairs before the second ones, as Llama's rotation of halves has them."""
    width = config.head_dim
    return _parted(tensor, 0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


def _by_heads(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the query, key and value of each head beside each other."""
    heads = config.num_attention_heads
    return _parted(tensor, 0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def _by_groups(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the key and the value behind the queries of their group, for each group."""
    groups = config.num_kv_heads
    width = config.hidden_size // config.num_attention_heads
    query, key, value = _parted(tensor, 0, (-1, width)).split([config.num_attention_heads, groups, groups])
    grouped = _parted(query, 0, (groups, -1))
    return torch.cat([grouped, key.unsqueeze(1), value.unsqueeze(1)], dim=1).flatten(0, 2)


def _experts_by_turns(tensor: torch.Tensor, _config: Any) -> torch.Tensor:
    """Turn gates, then ups of experts into columns, a gate and an up by turns: float[E, 2F, D] or [E, 2F] of biases."""
    by_turns = _parted(tensor, 1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return by_turns if tensor.ndim == 2 else by_turns.transpose(1, 2)


def _to_key_heads(tensor: torch.Tensor, config: Any, dim: int = 0) -> torch.Tensor:
    """Put the value heads of each key head beside each other; in the file, all first ones come first."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return _parted(tensor, dim, (values // keys, keys, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _delta_rows(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Order rows of value heads, behind those of queries and keys if there are some."""
    values = config.linear_value_head_dim * config.linear_num_value_heads
    before, rows = tensor[:-values], tensor[-values:]
    return torch.cat([before, _to_key_heads(rows, config)])


def _by_key_heads(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Put the query, key, values and gates of each key head beside each other."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = tensor.split([keys * width, keys * width, values, values])
    return torch.cat([_parted(part, 0, (keys, -1)) for part in parts], dim=1).flatten(0, 1)


CHANGES: Mapping[str, Change] = {
    "halves": _halves,
    "minus_one": lambda tensor, _config: tensor - 1,
    "transposed": lambda tensor, _config: tensor.T if tensor.ndim == 2 else tensor,
    "vector": lambda tensor, _config: tensor.flatten(),
    "by_heads": _by_heads,
    "by_groups": _by_groups,
    "by_key_heads": _by_key_heads,
    "experts_by_turns": _experts_by_turns,
    "experts_across": lambda tensor, _config: tensor.transpose(1, 2) if tensor.ndim == 3 else tensor,
    "log_of_minus": lambda tensor, _config: torch.log(-tensor),  # of decays, which the file has as they are, negative
    "delta_rows": _delta_rows,
    "delta_vector": _to_key_heads,
    "delta_columns": lambda tensor, config: _to_key_heads(tensor, config, 1),
    "delta_decays": lambda tensor, config: torch.log(-_to_key_heads(tensor, config)),
}
"""Names in the table of architectures -> functions."""
