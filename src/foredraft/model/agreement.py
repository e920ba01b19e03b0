"""How likely the target is to agree with a drafted token, as a small trained predictor sees it: Cali-TS's theta_M.

EESD (Liu et al. 2024), equation 5: Sigmoid(W_p (W^i H_T, H_D)), with H_T the target's last hidden state at the token
that gave the root, H_D the head's at the i-th drafted one, and i at most 10. W_p and W^i are both linear, so that only
their product counts: a vector for each i, which is what is kept here, instead of ten matrices. Beside the states, the
head's own estimate of its token is looked at (ours). Knows states; not how they come about.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.model.heads import CONFIG_FILE, HeadCard, check_card, fill, read_head

POSITIONS = 10
FOLDER = "agreement"
"""Where, in a head's folder, its predictor lies."""
_LEAST = 1e-4
"""Estimates are kept so far from 0 and 1."""


class AgreementPredictor(nn.Module):
    """Predicts from states and an estimate.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target = nn.Linear(width, POSITIONS)
        self.draft = nn.Linear(width, 1, bias=False)
        self.estimate = nn.Linear(1, 1, bias=False)
        for weight in (self.target.weight, self.target.bias, self.draft.weight):
            nn.init.zeros_(weight)
        nn.init.ones_(self.estimate.weight)  # begins as the head's own estimate

    def forward(
        self, target: torch.Tensor, draft: torch.Tensor, level: torch.Tensor, estimate: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of agreement, float[R].

        Args:
            target: float[R, D], the target's last hidden states.
            draft: float[R, D], the head's.
            level: int64[R], how deep each token is drafted, 1 for the first.
            estimate: float[R], how likely the head holds its token to be, 0 to 1.
        """
        place = level.clamp(1, POSITIONS) - 1
        seen = self.target(target).gather(1, place[:, None])[:, 0] + self.draft(draft)[:, 0]
        return seen + self.estimate(torch.logit(estimate, eps=_LEAST)[:, None])[:, 0]  # type: ignore[no-any-return]  # a module's output is Any

    @torch.inference_mode()
    def chances(self, target: torch.Tensor, draft: torch.Tensor, level: int, estimate: torch.Tensor) -> torch.Tensor:
        """Return theta_M of each row of one level, float[R], for one state of the target's, float[D]."""
        levels = torch.full((len(draft),), level, device=draft.device)
        logits = self(target.float().expand(len(draft), -1), draft.float(), levels, estimate.to(draft.device))
        return torch.sigmoid(logits)


def load_predictor(head: Path, model: Any) -> AgreementPredictor | None:
    """Read the predictor of a head, or return None where it has none.

    Raises:
        UsageError: it was trained for another model.
        StoreError: its files are damaged.
    """
    folder = head / FOLDER
    if not (folder / CONFIG_FILE).is_file():
        return None
    card: HeadCard
    card, weights = read_head(folder, "cali")
    check_card(card, model, folder)
    predictor = AgreementPredictor(card.width)
    fill(predictor, {name: weight.float() for name, weight in weights.items()}, folder)
    return predictor.to(model.get_input_embeddings().weight.device).requires_grad_(requires_grad=False)
