"""DFlash: the text of plain decoding; blocks of tokens in one pass; heads in both formats."""

import numpy as np
import pytest

from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UsageError
from foredraft.graph.tree import depths
from support.families import LONG, VOCABULARY, each_of, prompt_of
from support.speculators import (
    BLOCK,
    dflash_config,
    dflash_tensors,
    raw_dflash_config,
    save_drafter,
    target_of,
    writes_the_plain_text,
)

SHAPES = {"chain": {"out_degree": 1}, "tree": {"out_degree": 3}}


def drafter_of(family, folder, **options):
    return make_drafter("dflash", {"model": folder, **options}, Resources(VOCABULARY, target=target_of(family)))


@pytest.fixture(params=["speculators", "raw"])
def folder(request, tmp_path):
    if request.param == "raw":
        return save_drafter(tmp_path, raw_dflash_config(), dflash_tensors())
    return save_drafter(tmp_path, dflash_config(reduced=True), dflash_tensors(reduced=True))


@pytest.mark.parametrize("setting", ["greedy", "T=0.7 top_p=0.9"])
@pytest.mark.parametrize("shape", SHAPES)
@each_of(["llama", "qwen3", "gpt_oss"], quick=("llama",))
def test_the_text_is_that_of_plain_decoding(family, shape, setting, folder):
    assert writes_the_plain_text(family, setting, drafter_of(family, folder, **SHAPES[shape]))


def test_a_draft_is_as_deep_as_the_block_and_the_same_however_its_text_came_about(folder):
    ids, target = prompt_of(LONG), target_of("llama")
    drafter = drafter_of("llama", folder)
    assert drafter.needs.hidden == (1, 3, 5)
    states = target.prefill(ids[:-1].copy(), target.new_cache(), drafter.needs.hidden)
    whole = drafter.open(DraftContext(VOCABULARY)).propose(SequenceView(ids, LONG, states), Budget(24, 8))
    chain = drafter_of("llama", folder, out_degree=1).open(DraftContext(VOCABULARY))
    assert depths(chain.propose(SequenceView(ids, LONG, states), Budget(24, 8)).parents).max() == BLOCK - 1
    drafting = drafter.open(DraftContext(VOCABULARY))
    for end in (7, 8, 20, LONG):
        stepwise = drafting.propose(SequenceView(ids[:end], 5, states[: end - 1]), Budget(24, 8))
    assert stepwise.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(stepwise.score, whole.score, rtol=1e-4)
    assert len(drafting.propose(SequenceView(ids, LONG, states), Budget(3, 1))) == 3
    assert not len(drafting.propose(SequenceView(ids, 5), Budget(20, 4))), "no states are known"


def test_a_drafter_without_a_placeholder_is_refused(tmp_path):
    with pytest.raises(StoreError, match="names no mask_token_id"):
        drafter_of("llama", save_drafter(tmp_path, dflash_config(mask_token_id=None), dflash_tensors()))
    with pytest.raises(UsageError, match="nodes is 0"):
        drafter_of("llama", str(tmp_path), nodes=0)
