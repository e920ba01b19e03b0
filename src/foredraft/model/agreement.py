"""How likely the target is to agree with a drafted token, as a small trained predictor sees it: Cali-TS's theta_M.

EESD (Liu et al. 2024), equation 5: Sigmoid(W_p (W^i H_T, H_D)), with H_T the target's last hidden state at the token
that gave the root, H_D the head's at the i-th drafted one, and i at most 10. W_p and W^i are both linear, so that only
their product counts: a vector for each i, which is what is kept here, instead of ten matrices. Beside the states, the
head's own estimate of its token is looked at (ours): apart for greedy texts, where it is the token's probability, and
for sampled ones, where it is known which noise the target will add. Knows states; not how they come about.
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
        self.estimate = nn.Linear(3, 1, bias=False)  # its logit when greedy, its logit when sampled, whether sampled
        for weight in (self.target.weight, self.target.bias, self.draft.weight):
            nn.init.zeros_(weight)
        with torch.no_grad():
            self.estimate.weight.copy_(torch.tensor([[1.0, 1.0, 0.0]]))  # begins as the head's own estimate

    def forward(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        level: torch.Tensor,
        estimate: torch.Tensor,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Return the logits of agreement, float[R].

        Args:
            target: float[R, D], the target's last hidden states.
            draft: float[R, D], the head's.
            level: int64[R], how deep each token is drafted, 1 for the first.
            estimate: float[R], how likely the head holds its token to be, 0 to 1.
            sampled: float[R], 1 where the target samples and 0 where it is greedy.
        """
        place = level.clamp(1, POSITIONS) - 1
        seen = self.target(target).gather(1, place[:, None])[:, 0] + self.draft(draft)[:, 0]
        own = torch.logit(estimate, eps=_LEAST)
        looked_at = torch.stack([own * (1 - sampled), own * sampled, sampled], dim=-1)
        return seen + self.estimate(looked_at)[:, 0]  # type: ignore[no-any-return]  # a module's output is Any

    @torch.inference_mode()
    def chances(
        self, target: torch.Tensor, draft: torch.Tensor, level: int, estimate: torch.Tensor, *, sampled: bool
    ) -> torch.Tensor:
        """Return theta_M of each row of one level, float[R], for one state of the target's, float[D]."""
        levels = torch.full((len(draft),), level, device=draft.device)
        estimate = estimate.to(draft.device)
        how = torch.full_like(estimate, float(sampled))
        logits = self(target.float().expand(len(draft), -1), draft.float(), levels, estimate, how)
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
