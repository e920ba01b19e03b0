"""MTP layers of checkpoints: the text of plain decoding, transformers' own scores, which checkpoints are refused."""

import numpy as np
import pytest
import torch
from transformers.cache_utils import MtpCache

from foredraft.contracts import SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UsageError
from foredraft.model.mtp import load_mtp
from foredraft.model.state_heads import HeadModel
from foredraft.model.state_rollout import StateRollout
from foredraft.model.target import TorchTarget
from support import exits
from support.causal_types import tiny_configuration
from support.families import LONG, NEW_TOKENS, VOCABULARY, each_of, prompt_of, tiny_model
from support.mtp import LAYOUTS, save_checkpoint

SHAPES = {"chain": {"out_degree": 1, "least_probability": 0.0}, "tree": {"out_degree": 3, "least_probability": 0.0}}
QUICK = ("qwen3_5_text", "deepseek_v3")
SAMPLED = "T=0.7 top_p=0.9"


def drafter_of(target, **options):
    return make_drafter("mtp", options, Resources(VOCABULARY, target=target))


@pytest.mark.parametrize("shape", SHAPES)
@each_of(LAYOUTS, quick=QUICK)
def test_the_text_is_that_of_transformers(family, shape, tmp_path):
    target = TorchTarget(save_checkpoint(tmp_path, family)[0])
    ids = torch.from_numpy(prompt_of(LONG))[None]
    own = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, LONG:].tolist()
    nothing = make_drafter("none", {}, Resources(VOCABULARY))
    texts = {"greedy": own, SAMPLED: exits.written(target, family, SAMPLED, nothing)[0]}
    for setting, text in texts.items():
        drafted, records = exits.written(target, family, setting, drafter_of(target, **SHAPES[shape]))
        assert drafted == text
        assert sum(record.drafted for record in records) > NEW_TOKENS


@each_of(LAYOUTS, quick=QUICK)
@torch.inference_mode()
def test_drafts_are_scored_as_by_transformers(family, tmp_path):
    """The first token after a text, and the two after tokens of a chain that has the layer's own states."""
    model, mtp = save_checkpoint(tmp_path, family)
    ids, end = prompt_of(LONG), LONG - 2
    head, target = load_mtp(model), TorchTarget(model)
    states = target.prefill(ids[: end - 1].copy(), target.new_cache(), head.reads)
    rollout = StateRollout(head, target.with_model(HeadModel(head)), 4)
    found = [rollout.start(SequenceView(ids[:end], end, states))]
    found += [rollout.expand(ids[[end + row]].astype(np.int32), np.array([row - 1], np.int32)) for row in range(2)]
    cache, positions = MtpCache(config=mtp.config), torch.arange(LONG - 1)[None]
    given = model.get_decoder()(torch.from_numpy(ids[None, : end - 1])).last_hidden_state
    rows = slice(0, end - 1)
    for scores in found:
        tokens = torch.from_numpy(ids[1:])[None, rows]
        given = mtp.forward_layer(0, given, positions[:, rows], cache, input_ids=tokens)[:, -1:]
        torch.testing.assert_close(
            scores, mtp.shared_head(given)[0], atol=1e-3, rtol=1e-3
        )  # recurrent layers round otherwise in one pass
        rows = slice(rows.stop, rows.stop + 1)


@pytest.mark.parametrize("has_one", [True, False])
def test_auto_blends_the_layer_in_by_default_if_there_is_one(has_one, tmp_path):
    model = save_checkpoint(tmp_path, "qwen3_5_text")[0] if has_one else tiny_model(tiny_configuration("qwen3_5_text"))
    resources = Resources(VOCABULARY, target=TorchTarget(model))
    options = {"table": "none", "store": "none"}
    sources = make_drafter("auto", {**options, "drafter": "default"}, resources).source_names
    assert ("auto, mtp" in sources) == has_one


def test_a_checkpoint_without_the_layer_or_with_a_part_of_it_is_refused(tmp_path):
    bare = tiny_model(tiny_configuration("qwen3_5_text"))
    for bare.config.name_or_path in ("", "file.gguf", "a/model", "/a/folder/file.gguf"):
        with pytest.raises(UsageError, match=r"holds no MTP layer \(tensors mtp\."):
            drafter_of(TorchTarget(bare))
    part = save_checkpoint(tmp_path, "qwen3_5_text", without="mtp.norm.weight")[0]
    with pytest.raises(StoreError, match="post_norm"):
        drafter_of(TorchTarget(part))
