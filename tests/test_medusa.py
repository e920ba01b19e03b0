"""Medusa: the text of plain decoding; the tree by accuracies; fit of heads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.drafters.medusa import MedusaDrafter, MedusaOptions, static_tree
from foredraft.errors import UsageError
from foredraft.graph.tree import check_tree, depths
from foredraft.model.heads import load_medusa
from support.drafts import path_to
from support.exits import plain, target_of, written
from support.families import NEW_TOKENS, SETTINGS, VOCABULARY, each_of
from support.heads import HEADS, head_of


@pytest.mark.parametrize("setting", SETTINGS)
@each_of(["llama", "qwen3", "gpt2", "gemma2", "gpt_neox"])
def test_the_text_is_that_of_plain_decoding(family, setting, tmp_path):
    target = target_of(family)
    drafter = make_drafter("medusa", {"head": head_of(family, tmp_path)}, Resources(VOCABULARY, target=target))
    text, records = written(target, family, setting, drafter)
    assert text == plain(family, setting)
    assert sum(record.drafted for record in records) > NEW_TOKENS


def test_each_level_holds_the_tokens_of_its_head(tmp_path):
    """An LM head that scores one token for each head: 10, 11, 12."""
    _, heads, _ = load_medusa(head_of("llama", tmp_path), target_of("llama").model)
    rows = iter(range(1000))

    def lm_head(states):
        tokens = torch.tensor([(10 + next(rows)) % VOCABULARY for _ in range(len(states))])
        return torch.nn.functional.one_hot(tokens, VOCABULARY).float()

    drafting = MedusaDrafter(MedusaOptions(), heads, lm_head).open(DraftContext(VOCABULARY))
    ids = np.arange(6, dtype=np.int64)
    assert len(drafting.propose(SequenceView(ids, 5), Budget(8, 8))) == 0, "there are no states"
    draft = drafting.propose(SequenceView(ids, 5, torch.zeros(1, 32)), Budget(24, 8))
    draft.check()
    best = path_to(draft.parents, int(np.argmax(depths(draft.parents))))
    assert draft.tokens[best].tolist() == [10, 11, 12]
    assert max(depths(draft.parents)) == HEADS


def slow_tree(accuracies, nodes, depth):
    """Every path of ranks, best first, cut to size."""
    paths = {(): 1.0}
    level = [()]
    for head in accuracies[:depth]:
        level = [(*path, rank) for path in level for rank in range(len(head))]
        for path in level:
            paths[path] = paths[path[:-1]] * float(head[path[-1]])
    found = sorted((chance for path, chance in paths.items() if path and chance > 0), reverse=True)
    return found[:nodes]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(0, 5), st.integers(0, 99))
def test_the_static_tree_holds_the_likeliest_paths(heads, ranks, nodes, depth, seed):
    rng = np.random.default_rng(seed)
    accuracies = -np.sort(-rng.random((heads, ranks)).astype(np.float32), axis=1)
    parents, found, score = static_tree(accuracies, nodes, depth)
    expected = slow_tree(accuracies, nodes, depth)
    np.testing.assert_allclose(score, expected[: len(score)], rtol=1e-5)
    assert len(score) == len(expected)
    if len(score):
        check_tree(found, parents)  # a parent before its child, siblings of different ranks
        for node in range(len(score)):
            path = path_to(parents, node)
            assert score[node] == pytest.approx(
                np.prod([accuracies[i, found[n]] for i, n in enumerate(path)]), rel=1e-4
            )


def test_heads_that_do_not_fit_are_refused(tmp_path):
    folder = head_of("llama", tmp_path)
    with pytest.raises(UsageError, match=r"whose weights are not this model's.*train medusa"):
        load_medusa(folder, target_of("qwen3").model)
    with pytest.raises(UsageError, match="is a head for medusa, not for eesd"):
        make_drafter("eesd", {"head": folder}, Resources(VOCABULARY, target=target_of("llama")))
    with pytest.raises(UsageError, match="needs heads trained for this model"):
        make_drafter("medusa", {}, Resources(VOCABULARY, target=target_of("llama")))
    with pytest.raises(UsageError, match="no model is loaded here"):
        make_drafter("medusa", {"head": folder}, Resources(VOCABULARY))
    with pytest.raises(UsageError, match="nodes is 0"):
        make_drafter("medusa", {"nodes": 0}, Resources(VOCABULARY, target=target_of("llama")))
