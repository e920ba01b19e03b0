"""DFlash 1 and 2, DSpark, P-EAGLE: the text of plain decoding; blocks of tokens in one pass; heads in both formats."""

import numpy as np
import pytest
import torch

from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UsageError
from foredraft.graph.tree import depths
from foredraft.model.dflash import DFlashBlock, load_dflash
from foredraft.model.state_rollout import BlockRollout
from support.families import LONG, VOCABULARY, of_families, prompt_of
from support.pairs import pairs
from support.speculators import (
    BLOCK,
    CASES,
    DFLASH2,
    LEVELS,
    MADE,
    MASK,
    RANK,
    SPAN,
    WIDTH,
    dflash_tensors,
    drafter_files,
    raw_dflash_config,
    save_drafter,
    target_of,
    writes_the_plain_text,
)

ALL = {"least_probability": 0.0, "least_share": 0.0}
SHAPES = {"chain": {"out_degree": 1, **ALL}, "tree": {"out_degree": 3, **ALL}}
DEPTH = {"peagle": LEVELS, "dflash": BLOCK - 1, "dspark": BLOCK, "dflash2": BLOCK - 1}
HEADS = [(method, case) for method in DEPTH for case in CASES[method]] + [("dflash", "raw")]


def drafter_of(family, method, folder, **options):
    given = {"model": str(folder), **options}
    return make_drafter(method, given, Resources(VOCABULARY, target=target_of(family)))


def saved(head, folder):
    """The method and the folder of a head."""
    method, case = head
    if case == "raw":
        save_drafter(folder, raw_dflash_config(slides=True), dflash_tensors())
    else:
        drafter_files(method, case, folder)
    return method, folder


@of_families(
    ("family", "head", "shape", "setting"),
    pairs(["llama", "qwen3", "gpt_oss"], HEADS, list(SHAPES), ["greedy", "T=0.7 top_p=0.9"]),
    quick=("llama",),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_the_text_is_that_of_plain_decoding(family, head, shape, setting, tmp_path):
    assert writes_the_plain_text(family, setting, drafter_of(family, *saved(head, tmp_path), **SHAPES[shape]))


@pytest.mark.parametrize("head", HEADS, ids=" ".join)
def test_a_draft_is_as_deep_as_the_block_and_the_same_however_its_text_came_about(head, tmp_path):
    ids, target, head = prompt_of(LONG), target_of("llama"), saved(head, tmp_path)
    drafter = drafter_of("llama", *head, **SHAPES["tree"])
    states = target.prefill(ids[:-1].copy(), target.new_cache(), drafter.needs.hidden)
    whole = drafter.open(DraftContext(VOCABULARY)).propose(SequenceView(ids, LONG, states), Budget(24, 8))
    chain = drafter_of("llama", *head, **SHAPES["chain"]).open(DraftContext(VOCABULARY))
    found = chain.propose(SequenceView(ids, LONG, states), Budget(24, 8))
    assert depths(found.parents).max() == DEPTH[head[0]]
    drafting = drafter.open(DraftContext(VOCABULARY))
    for end in (7, 8, 20, LONG):
        stepwise = drafting.propose(SequenceView(ids[:end], 5, states[: end - 1]), Budget(24, 8))
    assert stepwise.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(stepwise.score, whole.score, rtol=1e-4)
    assert len(drafting.propose(SequenceView(ids, LONG, states), Budget(3, 1))) == 3
    assert not len(drafting.propose(SequenceView(ids, 5), Budget(20, 4))), "no states are known"


def test_a_token_of_dspark_or_dflash_2_changes_what_follows_it_and_one_of_dflash_does_not(tmp_path):
    ids, target = prompt_of(LONG), target_of("llama")
    after = {}
    for method in ("dflash", "dspark", "dflash2"):
        drafter_files(method, next(iter(CASES[method])), tmp_path / method)
        drafter = drafter_of("llama", method, tmp_path / method, out_degree=2, **ALL)
        states = target.prefill(ids[:-1].copy(), target.new_cache(), drafter.needs.hidden)
        draft = drafter.open(DraftContext(VOCABULARY)).propose(SequenceView(ids, LONG, states), Budget(6, 2))
        first, second = np.flatnonzero(draft.parents < 0)
        after[method] = [set(draft.tokens[draft.parents == node].tolist()) for node in (first, second)]
    assert after["dflash"][0] == after["dflash"][1]
    assert after["dspark"][0] != after["dspark"][1]
    assert after["dflash2"][0] != after["dflash2"][1]


def block_scores(method, folder, config, tensors, states):
    """The scores of a drafter's block after as many tokens as there are states, and one more."""
    save_drafter(folder, config, tensors)
    head = load_dflash(folder, target_of("llama").model, method)
    rollout, ids = BlockRollout(head, DFlashBlock(head), 4), prompt_of(LONG)[: len(states) + 1]
    first = rollout.start(SequenceView(ids, len(ids), states))
    levels = range(DFlashBlock(head).levels - 1)
    return torch.cat([first, *(rollout.expand(np.array([3], np.int32), np.zeros(1, np.int32)) for _ in levels)])


MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
RAW = {
    "dflash": ("dflash", {}, {}),
    "all rows": ("dflash", {"is_causal": False}, {"sliding_window_non_causal": True}),
    "scaled": ("dflash", {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}, {}),
    "dspark": ("dspark", {"dflash_config": None, "target_layer_ids": [0, 2, 4], "mask_token_id": MASK, **MARKOV}, {}),
    "dspark's part": ("dspark", {"dspark_config": {"shift_label": False, **MARKOV}}, {"sample_from_anchor": False}),
    "dflash2": ("dflash2", {"is_causal": False, **DFLASH2}, {}),
}


@pytest.mark.parametrize("case", RAW)
def test_a_raw_head_is_run_as_the_same_one_in_the_format(case, tmp_path):
    """After a text that no window ends in."""
    (method, raw, fields), states = RAW[case], torch.randn(1, 3 * WIDTH)
    make, tensors = MADE[method][0], MADE[method][1]()
    own = block_scores(method, tmp_path / "own", make(slides=True, **fields), tensors, states)
    found = block_scores(method, tmp_path / "raw", raw_dflash_config(slides=True) | raw, tensors, states)
    expected = torch.tanh(own * 0.5 / 2.0) * 2.0 if case == "scaled" else own
    torch.testing.assert_close(found, expected)


def test_a_raw_heads_window_ends_at_each_row(tmp_path):
    """A state that only the windows of the block's first two rows hold changes what the second one drafts."""
    config, tensors, states = raw_dflash_config(1, slides=True), dflash_tensors(1), torch.randn(2 * SPAN, 3 * WIDTH)
    before = block_scores("dflash", tmp_path, config, tensors, states)
    states[-SPAN + 2] += 1.0
    changed = (before != block_scores("dflash", tmp_path, config, tensors, states)).any(dim=1)
    assert changed.tolist() == [True] + [False] * (BLOCK - 2)


@pytest.mark.parametrize("method", DEPTH)
@pytest.mark.parametrize("field", [{"mask_token_id": None}, {"mask_token_id": VOCABULARY}, {"mask_token_id": -1}])
def test_a_drafter_without_a_placeholder_is_refused(method, field, tmp_path):
    config, tensors = (make() for make in MADE[method])
    save_drafter(tmp_path, config | field, tensors)
    with pytest.raises(StoreError, match=f"has {field['mask_token_id']} as mask_token_id; .* from 0 to 96"):
        drafter_of("llama", method, tmp_path)


@pytest.mark.parametrize("size", [0, -4, "x", 10**6, 1])
def test_a_block_of_another_size_is_refused(size, tmp_path):
    config, tensors = (make() for make in MADE["dflash"])
    save_drafter(tmp_path, config | {"block_size": size}, tensors)
    with pytest.raises(StoreError, match=f"has {size!r} as block_size; it must be a whole number from 2 to 1024"):
        drafter_of("llama", "dflash", tmp_path)


@pytest.mark.parametrize("field", [{"selector_top_k": True}, {"conv_group_size": 5}, {"output_multiplier": "x"}])
def test_a_drafter_whose_parts_cannot_be_made_is_damaged(field, tmp_path):
    config, tensors = (make() for make in MADE["dflash2"])
    save_drafter(tmp_path, config | field, tensors)
    with pytest.raises(StoreError, match="is damaged"):
        drafter_of("llama", "dflash2", tmp_path)


def test_a_product_that_is_not_run_and_options_out_of_range_are_refused(tmp_path):
    config, tensors = (make() for make in MADE["dspark"])
    save_drafter(tmp_path, config | {"markov_head_type": "rnn"}, tensors)
    with pytest.raises(UsageError, match="Markov head of type rnn, and vanilla and gated ones are run"):
        drafter_of("llama", "dspark", tmp_path)
    with pytest.raises(UsageError, match="levels is 0"):
        drafter_of("llama", "dspark", tmp_path, levels=0)
