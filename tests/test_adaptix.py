"""Adaptix as a drafter: learned counts stay with their sequence unless shared, and invalid options are refused."""

import math

import numpy as np
import pytest

import naive.index_tables
from foredraft.contracts import Budget, Draft, DraftContext, SequenceView, Verdict
from foredraft.corpus.words import tokenizer_hash
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UsageError
from foredraft.graph.tree import check_tree, depths
from foredraft.index import learned
from foredraft.index.learned import empty_learned
from support.learned import check_learned
from support.tokenizers import VOCABULARY, word_tokenizer, words
from support.toys import build_trigram_table, text_documents

pytestmark = pytest.mark.kernels

RESOURCES = Resources(VOCABULARY)
TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


def drafter(**options):
    return make_drafter("adaptix", {"table": "none", **options}, RESOURCES)


def opened(made, seed=0):
    return made.open(DraftContext(VOCABULARY, seed))


def view(ids):
    ids = np.array(ids, np.int64)
    ids.flags.writeable = False
    return SequenceView(ids, len(ids))


def propose(drafting, ids, nodes=8, depth=4):
    draft = drafting.propose(view(ids), Budget(nodes, depth))
    draft.check()
    check_tree(draft.tokens, draft.parents, VOCABULARY)
    assert len(draft) <= nodes
    assert len(draft) == 0 or depths(draft.parents).max() <= depth
    return draft


def memory(made):
    """The counts learned by a sharing drafter, as a dictionary."""
    return naive.index_tables.learned_memory(made.shared)


def first_tokens(draft):
    return draft.tokens[draft.parents < 0].tolist()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "words.trigrams"
    texts = [[1, 2, 9], [1, 2, 9], [1, 2, 8], [7, 6, 5], [0, 7, 6], [2, 9, 10]]
    build_trigram_table(text_documents([words(ids) for ids in texts]), word_tokenizer(), VOCABULARY, path)
    return path


# --- learning


def test_what_the_prompt_taught_is_drafted():
    assert len(propose(opened(drafter(learn="off")), TEXT)) == 0
    draft = propose(opened(drafter()), TEXT, nodes=3)
    assert draft.tokens.tolist() == [3, 4, 5]
    assert draft.parents.tolist() == [-1, 0, 1]
    assert draft.score.tolist() == sorted(draft.score.tolist(), reverse=True)


def test_every_token_is_learned_once_however_the_text_arrives():
    at_once, in_pieces = drafter(share=True), drafter(share=True)
    propose(opened(at_once), TEXT)
    drafting = opened(in_pieces)
    for length in (1, 4, 5, len(TEXT), len(TEXT)):
        propose(drafting, TEXT[:length])
    assert memory(in_pieces) == memory(at_once)
    expected = {}
    naive.index_tables.learn_text(expected, TEXT, 0)
    assert memory(at_once)[1, 2]["total"] == pytest.approx(expected[1, 2]["total"])


def test_what_was_written_without_a_budget_is_learned_before_the_next_draft():
    waited, asked = drafter(share=True), drafter(share=True)
    drafting = opened(waited)
    assert len(propose(drafting, TEXT[:-4], nodes=0)) == len(propose(drafting, TEXT[:-2], depth=0)) == 0
    assert propose(drafting, TEXT).tokens.tolist() == propose(opened(asked), TEXT).tokens.tolist()
    assert memory(waited) == memory(asked)


def test_what_was_written_without_a_budget_is_shared_when_the_sequence_is_closed():
    made = drafter(share=True)
    drafting = opened(made)
    propose(drafting, TEXT, nodes=0)
    drafting.close()
    assert memory(made)


def test_of_a_prompt_longer_than_the_table_the_end_is_known(monkeypatch):
    monkeypatch.setattr(learned, "empty_learned", lambda slots=64: empty_learned(slots))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 300)
    made = drafter(share=True)
    propose(opened(made), ids)
    check_learned(made.shared)
    assert len(made.shared.keys) == 64
    assert (int(ids[-3]), int(ids[-2])) in memory(made)


def test_two_sequences_do_not_influence_each_other():
    made = drafter()
    one, other = opened(made), opened(made)
    propose(one, TEXT)
    assert len(propose(other, [1, 2])) == 0
    assert first_tokens(propose(other, [1, 2, 6, 1, 2])) == [6]
    assert first_tokens(propose(one, TEXT)) == [3]
    one.close()
    assert len(propose(opened(made), [1, 2])) == 0


def test_shared_knowledge_is_kept():
    made = drafter(share=True)
    one = opened(made)
    propose(one, TEXT)
    one.close()
    assert first_tokens(propose(opened(made), [1, 2])) == [3]


def test_the_papers_learning_raises_the_last_trigrams_at_every_step():
    made = drafter(learn="paper", feedback="off", window=5, increment=0.25, max_probability=0.6, share=True)
    drafting = opened(made)
    draft = propose(drafting, [1, 2, 3, 1, 2])
    assert draft.tokens.tolist() == [3, 1, 2, 3]
    assert draft.score.tolist() == pytest.approx([0.25**n for n in range(1, 5)])
    assert propose(drafting, [1, 2, 3, 1, 2]).score[0] == pytest.approx(0.5)
    assert propose(drafting, [1, 2, 3, 1, 2]).score[0] == pytest.approx(0.6)
    assert (-1, 2) not in memory(made)


@pytest.mark.parametrize("search", ["best_first", "mcts"])
@pytest.mark.parametrize("learn", ["tokens", "paper", "off"])
def test_every_combination_drafts_within_its_budget(table, search, learn):
    made = drafter(table=str(table), search=search, learn=learn)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 30).tolist()
    drafting, made_any = opened(made), False
    for length in (1, 2, 3, 10, 29, 30):
        for nodes, depth in ((1, 1), (5, 2), (64, 9), (0, 3)):
            made_any |= len(propose(drafting, ids[:length], nodes, depth)) > 0
    assert made_any
    drafting.close()


@pytest.mark.parametrize("seed", [0, 2**62, 2**63, 2**64 - 1])
def test_mcts_takes_every_seed_and_repeats_itself(table, seed):
    made = drafter(table=str(table), search="mcts")
    drafts = [propose(opened(made, seed), [1, 2]) for _ in range(2)]
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert set(first_tokens(drafts[0])) >= {9, 8}


# --- feedback


def verdict(draft, at, tokens, probabilities):
    top = {"top_tokens": np.array(tokens, np.int32), "top_probabilities": np.array(probabilities, np.float32)}
    return Verdict((0,), (), draft, at, **top)


def test_the_targets_distribution_is_learned_at_each_nodes_own_pair():
    """Rows: the root, its children 6 and 8, and 7 as a child of 6."""
    made = drafter(learn="off", feedback="topk", share=True)
    drafting = opened(made)
    assert made.needs.top_k == 6
    propose(drafting, [4, 5])
    draft = Draft(np.array([6, 7, 8], np.int32), np.array([-1, 0, -1], np.int32))
    shares = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]
    drafting.observe(verdict(draft, 1, [[1, 2], [3, 4], [5, 6], [9, 10]], shares))
    expected = {(4, 5): {1: 1.8, 2: 0.2}, (5, 6): {3: 1.6, 4: 0.4}, (6, 7): {5: 1.4, 6: 0.6}, (5, 8): {9: 1.2, 10: 0.8}}
    found = memory(made)
    assert found.keys() == expected.keys()
    for context, weights in expected.items():
        assert found[context]["weights"] == pytest.approx(weights)
        assert found[context]["total"] == pytest.approx(2.0)
    assert first_tokens(propose(drafting, [4, 5], nodes=1)) == [1]


def test_feedback_at_the_first_token_of_all_has_no_pair():
    made = drafter(learn="off", feedback="topk", share=True)
    drafting = opened(made)
    propose(drafting, [5])
    drafting.observe(verdict(Draft(np.empty(0, np.int32), np.empty(0, np.int32)), 0, [[1, 2]], [[0.5, 0.25]]))
    assert memory(made).keys() == {(-1, 5)}
    assert first_tokens(propose(drafting, [5])) == [1, 2]


@pytest.mark.parametrize(("learn", "feedback"), [("tokens", True), ("paper", False), ("off", False)])
def test_feedback_belongs_to_our_rule_and_not_to_the_papers(learn, feedback):
    assert (drafter(learn=learn).needs.top_k > 0) == feedback
    assert drafter(learn=learn, feedback="topk").needs.top_k > 0


def test_feedback_that_is_off_asks_for_nothing_and_learns_nothing():
    made = drafter(feedback="off", learn="off", share=True)
    assert made.needs.top_k == 0
    drafting = opened(made)
    propose(drafting, [4, 5])
    drafting.observe(Verdict((1,), (), Draft(np.empty(0, np.int32), np.empty(0, np.int32)), 1))
    assert memory(made) == {}


# --- tables and options


def test_the_table_is_drafted_from(table):
    draft = propose(opened(drafter(table=str(table), learn="off")), [1, 2], nodes=2, depth=1)
    assert draft.tokens.tolist() == [9, 8]


def test_the_default_table_is_the_resources_own(table):
    resources = Resources(VOCABULARY, tokenizer_hash(word_tokenizer()), lambda: table)
    assert len(make_drafter("adaptix", {}, resources).table.second) > 0
    assert len(make_drafter("adaptix", {"table": "none"}, resources).table.second) == 0
    assert len(make_drafter("adaptix", {}, RESOURCES).table.second) == 0


def test_a_table_of_another_tokenizer_is_refused(table):
    with pytest.raises(StoreError, match=r"another tokenizer.*foredraft table build"):
        make_drafter("adaptix", {"table": str(table)}, Resources(VOCABULARY, "a" * 64))


def test_a_table_of_a_larger_vocabulary_is_refused(table):
    with pytest.raises(StoreError, match="holds a vocabulary of 12 tokens and this model scores 5"):
        make_drafter("adaptix", {"table": str(table)}, Resources(5))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"search": "beam"}, "search of method 'adaptix' is 'beam'; it must be one of best_first, mcts."),
        ({"learn": "all"}, "learn of method 'adaptix' is 'all'; it must be one of tokens, paper, off."),
        ({"feedback": "full"}, "feedback of method 'adaptix' is 'full'; it must be one of topk, off, or None."),
        ({"depth": 0}, "depth is 0; it must be at least 1."),
        ({"window": 0}, "window is 0; it must be at least 1."),
        ({"increment": 0.0}, "increment is 0.0; it must be above 0."),
        ({"max_probability": -1.0}, "max_probability is -1.0; it must be above 0."),
        ({"increment": math.nan}, "increment of method 'adaptix' is nan; it must be a number that float64 can hold."),
    ],
)
def test_options_that_mean_nothing_are_refused(options, sentence):
    with pytest.raises(UsageError) as refusal:
        drafter(**options)
    assert str(refusal.value) == sentence


def test_an_unknown_option_is_refused_with_a_hint():
    with pytest.raises(UsageError, match="Did you mean 'increment'"):
        drafter(incremnt=0.5)
