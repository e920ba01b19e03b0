"""Training EAGLE-3's head: what is trained is what drafts."""

import numpy as np
import pytest
import torch

from foredraft.contracts import SequenceView
from foredraft.model.eagle3 import load_eagle3
from foredraft.model.speculators import save_eagle3
from foredraft.model.state_heads import HeadModel
from foredraft.model.state_rollout import StateRollout
from foredraft.training.eagle3 import AHEAD, Eagle3Task
from foredraft.training.loop import LoopOptions, train
from foredraft.training.traces import Traces
from support.families import VOCABULARY, each_of
from support.speculators import DRAFTED, target_of

WINDOW, TOP = 16, 4
IDS = torch.from_numpy(np.random.default_rng(1).permutation(VOCABULARY)[:DRAFTED])


def traces_of(windows=12):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (windows, WINDOW + 1)).astype(np.int32)
    best = rng.integers(0, VOCABULARY, (windows, WINDOW, TOP)).astype(np.int32)
    return Traces(
        ids, np.zeros(windows, np.uint8), np.arange(windows) < 2, best, np.full(best.shape, 0.2, np.float16), "made up"
    )


@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some tokens"])
@each_of(["llama", "qwen3", "gpt_oss"], quick=("llama",))
def test_rows_are_trained_as_they_draft(family, ids, tmp_path):
    """The scores of every training step are those of a draft of the same tokens."""
    target, traces = target_of(family), traces_of()
    task = Eagle3Task(target, traces, ids)
    with torch.no_grad():
        for weight in task.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        trained = task.scores(np.array([3]))
    assert [each.shape[1] for each in trained] == [WINDOW - 1 - step for step in range(AHEAD)]
    save_eagle3(tmp_path, target.model, family, task.module, task.reads, ids, torch.float32, lm_head=family != "qwen3")
    head = load_eagle3(tmp_path, target.model)
    window = traces.windows[3, :-1].astype(np.int64)
    states = target.prefill(window.copy(), target.new_cache(), head.reads)
    rollout = StateRollout(head, target.with_model(HeadModel(head)), AHEAD)
    columns = slice(None) if ids is None else ids.argsort()
    for length in (2, 7, WINDOW - AHEAD + 1):
        found = [rollout.start(SequenceView(window[:length], length, states[: length - 1]))]
        following = window[length:, None].astype(np.int32)
        found += [rollout.expand(following[step], np.array([step - 1], np.int32)) for step in range(AHEAD - 1)]
        for step, scores in enumerate(found):
            torch.testing.assert_close(scores[0], trained[step][0, length - 2, columns], atol=1e-4, rtol=1e-4)


def test_training_lowers_the_loss_and_leaves_the_target_as_it_is(tmp_path):
    target, traces = target_of("llama"), traces_of()
    before = {name: each.clone() for name, each in target.model.state_dict().items()}
    task = Eagle3Task(target, traces, IDS, tmp_path / "states.npy")
    options = LoopOptions(epochs=12, micro_batch=5, precision="float32")
    first = task.loss(np.arange(2, 12)).item()
    run = train(task, tmp_path / "run", traces, options, {}, lambda *_said: None)
    assert task.loss(np.arange(2, 12)).item() < first - 0.1
    assert run.step == 24
    assert all(torch.equal(each, before[name]) for name, each in target.model.state_dict().items())
