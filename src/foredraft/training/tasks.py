"""Training tasks: an early-exit head and its predictor, a draft model of the target's own layers, and Medusa's heads.

All learn the target's distribution, as recorded in the traces; weights shared with the target are frozen. Does not
depend on the training loop.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

from foredraft.errors import StoreError, UsageError
from foredraft.model import heads
from foredraft.model.heads import RankedHead, places_of
from foredraft.model.layers import LAST, model_parts, shorter, tapped_states
from foredraft.training.traces import Numbers, Traces, mapped_array

_LOSS_DECAY = 0.8  # of each further Medusa head; Medusa, section 2.2.1


class Task:
    """A module to train, and its loss on traces: it learns what the target says at each position.

    The parameters of `module` that require a gradient are trained, in float32. `lm_head`, in the module or the target's
    own, scores all tokens, or, if it is a `RankedHead`, some. UsageError unless the windows of the traces have more
    than `ahead` tokens, as many as are predicted ahead.
    """

    def __init__(self, model: Any, traces: Traces, module: nn.Module, lm_head: nn.Module, ahead: int = 0) -> None:
        if traces.window <= ahead:
            raise UsageError(
                f"The traces have windows of {traces.window} tokens, and {ahead} are predicted ahead: make traces with "
                "a larger window."
            )
        self.module: Any = module.float().eval()  # without dropout, as it drafts
        self._traces = traces
        self._ids = lm_head.ids.long() if isinstance(lm_head, RankedHead) else None
        self._places = places_of(lm_head, model.get_output_embeddings().weight.shape[0])
        self._device: torch.device = model.get_input_embeddings().weight.device

    def scores(self, windows: Numbers) -> list[torch.Tensor]:
        """Return the logits of every output, float[B, T - k, V], or N of V, for one that predicts k tokens ahead."""
        raise NotImplementedError

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean loss of these windows, a differentiable scalar."""
        losses = []
        for scores in self.scores(windows):
            ahead = self._traces.window - scores.shape[1]  # of the next token
            labels = self._traces.labels(windows, scores.device, slice(ahead, None))
            losses.append(_LOSS_DECAY**ahead * distribution_loss(scores.flatten(0, 1).float(), *labels, self._places))
        return torch.stack(losses).sum()

    def agreement(self, windows: Numbers) -> float:
        """Return the share of these windows' positions at which the (first) output's best token is the target's."""
        shares = []
        for window in windows[:, None]:
            scores = self.scores(window)[0][0]
            theirs, _ = self._traces.labels(window, scores.device, slice(self._traces.window - len(scores), None))
            shares.append((self._tokens(scores.argmax(dim=-1)) == theirs[:, 0]).float().mean())
        return float(torch.stack(shares).mean())

    def _tokens(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens, int64, of indices into the logits."""
        return places if self._ids is None else self._ids.to(places.device)[places]


class States:
    """A frozen model's states in the windows of traces: `width` numbers of each token, which `compute` returns.

    `compute` is given a model's inputs. With `file`, states that were computed are stored there in bfloat16 and read
    again. StoreError if it cannot be written.
    """

    def __init__(
        self, compute: Callable[..., torch.Tensor], width: int, device: torch.device, traces: Traces, file: Path | None
    ) -> None:
        self._compute, self._device, self._traces, self._file = compute, device, traces, None
        self._stored = np.zeros(len(traces.windows), np.bool_)  # windows whose states this run has stored
        if file is None:
            return
        shape = (len(traces.windows), traces.window, width)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = mapped_array(file, np.int16, shape)
        except OSError as error:
            raise StoreError(
                f"{file} cannot be written ({error.strerror}); it needs {2 * np.prod(shape) / 2**30:.1f} GiB."
            ) from error

    @torch.no_grad()
    def of(self, windows: Numbers) -> torch.Tensor:
        """Return the states of these windows, float32[B, T, D]."""
        if self._file is not None and self._stored[windows].all():
            return torch.from_numpy(self._file[windows]).view(torch.bfloat16).float().to(self._device)
        with torch.autocast(self._device.type, enabled=False):  # computed as when drafting
            states = self._compute(**self._traces.inputs(windows, self._device))
        if self._file is not None:
            states = states.to(torch.bfloat16)  # as it is read again
            self._file[windows] = states.view(torch.int16).cpu().numpy()
            self._stored[windows] = True
        return states.float()

    @classmethod
    def last(cls, model: Any, traces: Traces, file: Path | None) -> "States":
        """Return the last hidden states of a base model of transformers."""
        embedding, width = model.get_input_embeddings().weight, int(model.config.hidden_size)
        return cls(lambda **inputs: model(**inputs).last_hidden_state, width, embedding.device, traces, file)


class ExitTask(Task):
    """Trains an early-exit head on the frozen first `layers` (EESD, Liu et al. 2024, section 3.2).

    Only the first layers and the head stay in memory once the caller releases the model. Unlike the paper's, the head
    learns the target's distribution, not the next token. `states` names a file in which the exit's states, once
    computed, are stored; None recomputes them each time. `ids`, int64[N], are the tokens that the target's frozen LM
    head scores; None trains an LM head for all tokens.

    UsageError for layers out of range, UnsupportedModelError if the model's layers are not a plain list, StoreError if
    the states' file cannot be written.
    """

    module: heads.ExitHead

    def __init__(
        self, model: Any, layers: int, traces: Traces, *, states: Path | None = None, ids: torch.Tensor | None = None
    ) -> None:
        parts = model_parts(model)
        parts.check_exit(layers)
        head = heads.ExitHead(model, ids).requires_grad_(requires_grad=True)
        head.lm_head.requires_grad_(requires_grad=ids is None)
        super().__init__(model, traces, head, head.lm_head)
        nothing, own = nn.Identity(), dict(enumerate(model.get_submodule(parts.layers)[:layers]))
        first = shorter(model, parts, own, {parts.norm: nothing, parts.lm_head: nothing}).base_model
        self._states = States.last(first, traces, states)
        self.after = heads.headed(model, (), self.module.layer, self.module)
        self._exit = torch.empty(0)  # float[B, T, D], the exit's states, which enter the head's layer
        layer = self.after.get_submodule(parts.layers)[0]
        # until now shared with the head's own layer, which must not be given these states when it drafts
        vars(layer)["_forward_pre_hooks"] = vars(layer)["_forward_pre_hooks"].copy()
        layer.register_forward_pre_hook(lambda _layer, inputs: (self._exit, *inputs[1:]))

    def scores(self, windows: Numbers) -> list[torch.Tensor]:
        self._exit = self._states.of(windows)
        return [self.after(**self._traces.inputs(windows, self._device)).logits]


class DraftTask(Task):
    """Trains a draft model of `layers` of the target's layers; embeddings and LM head stay the target's.

    DistillSpec (Zhou et al., ICLR 2024) finds that it learns best from the target's distribution on texts like those to
    be drafted, such as the target's own. Raises as `FirstLayers`.
    """

    def __init__(self, model: Any, layers: int, traces: Traces, ids: torch.Tensor | None = None) -> None:
        first = heads.FirstLayers(model, layers, ids).requires_grad_(requires_grad=True)
        first.lm_head.requires_grad_(requires_grad=False)
        super().__init__(model, traces, first, first.lm_head)
        self._drafting = heads.draft_model(model.requires_grad_(requires_grad=False), first)

    def scores(self, windows: Numbers) -> list[torch.Tensor]:
        return [self._drafting(**self._traces.inputs(windows, self._device)).logits]


class MedusaTask(Task):
    """Trains `count` Medusa heads on the target's last hidden states (Cai et al. 2024, section 2.2.1).

    The loss of head k is weighted by 0.8 to the power k, as deeper heads are less accurate. `states` is as in
    `ExitTask`, and raises as there.
    """

    def __init__(
        self, model: Any, count: int, traces: Traces, ids: torch.Tensor | None = None, states: Path | None = None
    ) -> None:
        self._states = States.last(model.requires_grad_(requires_grad=False).base_model, traces, states)
        self._lm_head = model.get_output_embeddings() if ids is None else RankedHead(model, ids)
        module = heads.MedusaHeads(self._lm_head.weight.shape[1], count)
        super().__init__(model, traces, module, self._lm_head, count)
        self.module.to(self._device)

    @torch.no_grad()
    def measured(self, windows: Numbers) -> torch.Tensor:
        """Return how often each head's i-th best token is the target's, float32[K, heads.RANKS]."""
        found = torch.zeros_like(self.module.accuracies)
        for window in windows[:, None]:
            for head, scores in enumerate(self.scores(window)):
                theirs, _ = self._traces.labels(window, self._device, slice(head + 1, None))
                best = self._tokens(scores[0].topk(heads.RANKS, dim=-1).indices)
                found[head] += (best == theirs[:, :1]).float().mean(0)
        return found / len(windows)

    def scores(self, windows: Numbers) -> list[torch.Tensor]:
        states = self.module(self._states.of(windows)).to(self._lm_head.weight.dtype)
        return [self._lm_head(each[:, :-head]) for head, each in enumerate(states, 1)]


class AgreementTask(Task):
    """Trains Cali-TS's predictor: will the target agree with what an early-exit head drafts?

    EESD, section 3.3. The labels compare the head's token with the target's at each position of a window, for levels
    whose previous levels agreed, as the predictor is only used for those. `head` exits after `layers` layers.
    """

    def __init__(self, model: Any, head: heads.ExitHead, layers: int, traces: Traces) -> None:
        width = model.get_output_embeddings().weight.shape[1]
        super().__init__(model, traces, heads.AgreementPredictor(width), head.lm_head)
        self.module.to(self._device)
        self._model = model
        self._exit = ExitTask(model, layers, traces, ids=self._ids)
        self._exit.module.load_state_dict(head.state_dict())
        self._exit.module.eval().requires_grad_(requires_grad=False)

    def loss(self, windows: Numbers) -> torch.Tensor:
        """Return the mean cross-entropy over all levels that a draft could reach in these windows."""
        logits, labels = self._predicted(windows)
        return binary_cross_entropy_with_logits(logits, labels)

    def agreement(self, windows: Numbers) -> float:
        """Return the share of levels whose acceptance is predicted correctly."""
        logits, labels = self._predicted(windows)
        return float(((logits > 0) == (labels > 0.5)).float().mean())

    def _predicted(self, windows: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictor's logits and the labels, float[n]."""
        *inputs, labels = (torch.cat(each) for each in zip(*map(self.levels, windows.tolist()), strict=True))
        with torch.autocast(self._device.type, enabled=False):
            return self.module(*inputs), labels

    @torch.no_grad()
    def levels(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return the training examples of a window: every level that a draft would reach, from every position.

        These are the target's states and the head's, float[n, D], the level, int64[n], the head's estimate, and whether
        target and head agree, float[n].
        """
        window = np.array([number])
        with torch.autocast(self._device.type, enabled=False), tapped_states(self._exit.after, (LAST,)) as found:
            scores = self._exit.scores(window)[0][0].float()
            target = self._model.base_model(**self._traces.inputs(window, self._device)).last_hidden_state[0].float()
        best = torch.softmax(scores, -1).max(-1)
        agree = self._tokens(best.indices) == self._traces.labels(window, self._device)[0][:, 0]
        level = torch.arange(1, heads.POSITIONS + 1, device=self._device)[None]
        position = torch.arange(self._traces.window, device=self._device)[:, None] + level
        inside = position < self._traces.window
        position = position.clamp(max=self._traces.window - 1)
        agreed = torch.cat([torch.ones_like(inside[:, :1]), agree[position[:, :-1]]], 1)
        reached = torch.cumprod(agreed.int(), 1).bool()
        at, row = torch.nonzero(inside & reached, as_tuple=True)
        chosen = position[at, row]
        return target[at], found[LAST][0, chosen].float(), row + 1, best.values[chosen], agree[chosen].float()


def distribution_loss(
    logits: torch.Tensor, top_ids: torch.Tensor, top_probabilities: torch.Tensor, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy of logits, float[R, V], to a distribution whose top K, [R, K], are known.

    The remaining mass counts as one token. `places`, int64[vocabulary], has the index of each token's logit, -1 for
    tokens without one, whose probability is not part of the loss; None if all have one.
    """
    left = (1 - top_probabilities.sum(-1)).clamp_min(0)
    scored = torch.ones_like(top_ids, dtype=torch.bool)
    if places is not None:
        top_ids = places[top_ids]
        scored, top_ids = top_ids >= 0, top_ids.clamp_min(0)
    found = log_softmax(logits, dim=-1).gather(-1, top_ids)
    ours_left = (1 - (found.exp() * scored).sum(-1)).clamp_min(1e-6).log()
    return -((top_probabilities * scored * found).sum(-1) + left * ours_left).mean()
