"""The Muon optimiser: momentum steps on weight matrices, made orthogonal before they are taken.

Knows matrices and their gradients; not which parameters of a model they are, nor the learning-rate schedule (the rate
is given to every step). Embeddings, norms and other vectors belong to AdamW instead.

The method is Keller Jordan's (https://kellerjordan.github.io/posts/muon/): a gradient's momentum has a few dominant
directions; replacing its singular values by (roughly) ones makes rare directions count, and for small models it
reaches AdamW's loss in noticeably fewer tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# The quintic x -> a x + b x^3 + c x^5 whose iteration drives singular values in (0, 1] into about [0.7, 1.2]. It is
# tuned for speed, not for a limit of exactly 1, which the optimiser does not need.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `matrix`, float[M, N], with its singular values replaced by values near 1.

    Args:
        matrix: float[M, N].
        dtype: what to calculate in; bfloat16 is enough, the iteration corrects its own rounding.

    Returns:
        `dtype`[M, N].
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(dtype)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x  # the Gram matrix below is then the smaller of the two
    x = x / (x.norm() + 1e-7)  # the Frobenius norm bounds the largest singular value
    for _ in range(ITERATIONS):
        gram: torch.Tensor = x @ x.T
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.T if transposed else x


class Muon:
    """Momentum with orthogonal steps for a fixed list of matrices."""

    def __init__(
        self,
        matrices: Sequence[torch.nn.Parameter],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Prepare for `matrices`, each float32[M, N].

        Args:
            matrices: the parameters to move; their order is the order of the saved state.
            momentum: share of the old momentum kept at each step (Nesterov's form).
            weight_decay: decoupled; the share of a weight removed per step is this times the learning rate.
            dtype: what the orthogonalisation calculates in.
        """
        if any(matrix.ndim != 2 for matrix in matrices):
            raise ValueError("Muon moves matrices only; give vectors and scalars to AdamW.")
        self._matrices = list(matrices)
        self._momentum, self._weight_decay, self._dtype = momentum, weight_decay, dtype
        self._buffers = [torch.zeros_like(matrix) for matrix in self._matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every matrix that has a gradient by one step of `learning_rate`."""
        for matrix, buffer in zip(self._matrices, self._buffers, strict=True):
            if matrix.grad is None:
                continue
            buffer.lerp_(matrix.grad, 1 - self._momentum)
            direction = orthogonalized(matrix.grad.lerp(buffer, self._momentum), self._dtype).to(matrix.dtype)
            # A tall orthogonal step changes each output less than a square one does: this makes the rate mean the same.
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.mul_(1 - learning_rate * self._weight_decay)
            matrix.add_(direction, alpha=-learning_rate * scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum buffers, in the order of the matrices."""
        return {"buffers": [buffer.clone() for buffer in self._buffers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the buffers of `state_dict()`.

        Raises:
            ValueError: they belong to other matrices.
        """
        given = state["buffers"]
        if [b.shape for b in given] != [b.shape for b in self._buffers]:
            raise ValueError("The saved Muon state belongs to matrices of other shapes.")
        for buffer, saved in zip(self._buffers, given, strict=True):
            buffer.copy_(saved)
