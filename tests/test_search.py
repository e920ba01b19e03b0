"""The searches in the tri-gram table: equal to their slow twins, within their limits, and safe on damaged arrays."""

from typing import NamedTuple

import numpy as np
import pytest

import naive.index_tables
from foredraft.graph.tree import check_tree, depths
from foredraft.index.learned import LearnedArrays, empty_learned, learn, learn_text
from foredraft.index.trigram import TableArrays, empty_table
from foredraft.index.trigram_search import (
    SearchSettings,
    TrigramModel,
    Trust,
    best_first,
    mcts,
    successors,
)
from support.tables import VOCABULARY, assert_same_paths, frozen, static_table

pytestmark = pytest.mark.kernels

BLENDED = Trust(2.0, 10.0, 1.0, 5.0, 0, 0.0)
PAPER = Trust(2.0, 10.0, 1.0, 5.0, 1, 3.0)
SMALL = SearchSettings(iterations=40, c1=32.0, c2=8.0, length=4, candidates=12)
"""As the paper's settings, with fewer iterations."""


class Knowledge(NamedTuple):
    """The same in both forms: compiled arrays, and the dictionaries of the slow twins."""

    table: TableArrays
    learned: LearnedArrays
    tables: tuple
    memory: dict


def documents(seed, count=6, longest=60):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(VOCABULARY, 0.7))
    return [rng.choice(VOCABULARY, n, p=weights).tolist() for n in rng.integers(3, longest, count)]


def knowledge(seed, *, static=True, learns=True, trust=BLENDED):
    table = empty_table(VOCABULARY)
    if static:
        table = static_table(documents(seed))
    learned = empty_learned()
    if learns:
        ids = np.concatenate(documents(seed + 1000, 2)).astype(np.int64)
        learn_text(learned, ids, 0) if not trust.paper else learn_paper(learned, ids)
    return Knowledge(
        table, learned, naive.index_tables.static_tables(table), naive.index_tables.learned_memory(learned)
    )


def learn_paper(learned, ids):
    for i in range(2, len(ids)):
        learn(learned, ids[i - 2], ids[i - 1], ids[i], 0.04, 3.0)


def found_successors(known, trust, a, b):
    tokens, scores = successors(TrigramModel(known.table, known.learned, trust), a, b)
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), scores.tolist(), strict=True))


def paths(tokens, parents, scores):
    """{path: score} of a tree in arrays."""
    found = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return dict(zip(found, scores.tolist(), strict=True))


def draws(settings, seed):
    """The random numbers of a search."""
    return np.random.default_rng(seed).random((settings.iterations, settings.length), np.float32)


def contexts(seed, count):
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(-1, VOCABULARY)), int(rng.integers(0, VOCABULARY))) for _ in range(count)]


# --- successors


@pytest.mark.parametrize("trust", [BLENDED, PAPER])
def test_successors_match_the_twin(trust):
    for seed in range(3):
        known = knowledge(seed, trust=trust)
        for a, b in contexts(seed, 15):
            expected = dict(naive.index_tables.successors(known.tables, known.memory, trust, a, b))
            assert found_successors(known, trust, a, b) == pytest.approx(expected, rel=1e-5), (seed, a, b)


def test_blended_successors_are_probabilities():
    for seed in range(3):
        known = knowledge(seed)
        for a, b in contexts(seed, 30):
            scores = found_successors(known, BLENDED, a, b)
            assert all(score > 0 for score in scores.values())
            assert sum(scores.values()) <= 1 + 1e-4


def test_the_blend_by_hand():
    """Each source gets n / (n + constant) of what the more specific ones leave."""
    table = static_table([[1, 2, 3], [1, 2, 4], [5, 2, 4], [5, 2, 4]])
    learned = empty_learned(16)
    learn(learned, 1, 2, 6, 3.0, 9.0)
    learn(learned, -1, 2, 6, 1.0, 9.0)
    found = found_successors(Knowledge(table, learned, (), {}), BLENDED, 1, 2)
    after_pair = 1 - 3 / 5
    after_table = after_pair * (1 - 2 / 12)
    after_single = after_table * (1 - 1 / 2)
    expected = {
        6: 3 / 5 + after_table * 1 / 2,
        3: after_pair * 2 / 12 * 1 / 2 + after_single * 4 / 9 * 1 / 4,
        4: after_pair * 2 / 12 * 1 / 2 + after_single * 4 / 9 * 3 / 4,
    }
    assert found == pytest.approx(expected, rel=1e-4)  # the table's probabilities have 16 bits


def test_nothing_follows_what_nobody_knows():
    known = knowledge(0, static=False, learns=False)
    for a, b in ((-1, 0), (3, 4), (99, 99), (-5, -5), (2, -1)):
        assert found_successors(known, BLENDED, a, b) == found_successors(known, PAPER, a, b) == {}
    known = knowledge(0)
    for a, b in ((99, 99), (-5, -5), (2, -1), (2, -VOCABULARY)):
        assert found_successors(known, BLENDED, a, b) == {}, "no token stands there, so nothing may be read there"


def algorithm_2(matrix, ids, longest, increment, most):
    """ADED, appendix H, Algorithm 2, line by line."""
    recent = ids[max(0, len(ids) - longest) :]
    for i in range(2, len(recent)):
        trigram = tuple(recent[i - 2 : i + 1])
        matrix[trigram] = min(matrix[trigram] + increment, most) if trigram in matrix else increment


def test_the_papers_rule_is_algorithm_2():
    """Step by step over a text, whose last tri-grams are raised again at every step, some of them up to the cap."""
    table = static_table(documents(5))
    pairs, _ = naive.index_tables.static_tables(table)
    matrix = {(*pair, token): share for pair, (_, row) in pairs.items() for token, share in row}
    learned, trust = empty_learned(), PAPER._replace(cap=0.9)
    ids = np.array(documents(6, 1, 40)[0] + [1, 2] * 12, np.int64)
    for length in range(3, len(ids) + 1):
        algorithm_2(matrix, ids[:length].tolist(), 16, 0.04, 0.9)
        recent = ids[:length][-16:]
        for i in range(2, len(recent)):
            learn(learned, recent[i - 2], recent[i - 1], recent[i], 0.04, 0.9)
    known = Knowledge(table, learned, (), {})
    for a in range(VOCABULARY):
        for b in range(VOCABULARY):
            expected = {trigram[2]: score for trigram, score in matrix.items() if trigram[:2] == (a, b)}
            if all(score <= 0.9 for score in expected.values()):  # the algorithm itself leaves larger ones alone
                assert found_successors(known, trust, a, b) == pytest.approx(expected, rel=1e-4)
    assert found_successors(known, trust, 1, 2)[1] == pytest.approx(0.9)


# --- best-first


@pytest.mark.parametrize("trust", [BLENDED, PAPER])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 4), (5, 1), (12, 3), (30, 6)])
def test_best_first_matches_the_twin(trust, nodes, depth):
    for seed in range(3):
        known = knowledge(seed, trust=trust)
        for a, b in contexts(seed, 3):
            found = paths(*best_first(TrigramModel(known.table, known.learned, trust), a, b, nodes, depth, VOCABULARY))
            expected = naive.index_tables.best_first(known.tables, known.memory, trust, a, b, nodes, depth, VOCABULARY)
            assert_same_paths(found, expected)


def test_best_first_finds_the_most_probable_paths():
    for seed in range(3):
        known = knowledge(seed)
        for a, b in contexts(seed, 2):
            found = paths(*best_first(TrigramModel(known.table, known.learned, BLENDED), a, b, 16, 3, VOCABULARY))
            best = naive.index_tables.best_paths(known.tables, known.memory, BLENDED, a, b, 16, 3, VOCABULARY)
            assert_same_paths(found, best)


def test_ties_give_as_many_nodes_with_the_same_scores():
    """Every context has four equally frequent successors, so whole levels tie."""
    text = [[a, b, c] for a in range(4) for b in range(4) for c in range(4)]
    table = static_table(text)
    known = Knowledge(table, empty_learned(8), naive.index_tables.static_tables(table), {})
    trust = Trust(1.0, 1.0, 1.0, 1e12, 0, 0.0)
    for nodes in (1, 3, 4, 7, 20, 50):
        found = paths(*best_first(TrigramModel(table, known.learned, trust), 1, 2, nodes, 3, VOCABULARY))
        assert len(found) == nodes
        assert_same_paths(found, naive.index_tables.best_paths(known.tables, {}, trust, 1, 2, nodes, 3, VOCABULARY))


@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 33, 64])
def test_best_first_keeps_its_limits(nodes):
    known = knowledge(4)
    for depth in (0, 1, 2, 5):
        for vocabulary in (VOCABULARY, 4, 1):
            tokens, parents, scores = best_first(
                TrigramModel(known.table, known.learned, BLENDED), 1, 0, nodes, depth, vocabulary
            )
            check_tree(tokens, parents, vocabulary)
            assert tokens.dtype == parents.dtype == np.int32
            assert scores.dtype == np.float32
            assert len(tokens) <= (nodes if depth else 0)
            if len(tokens):
                assert depths(parents).max() <= depth
                above = np.where(parents < 0, np.float32(1.0), scores[parents])
                assert (scores <= above).all()
                assert (np.diff(scores) <= 0).all()  # taken best first
    assert len(best_first(TrigramModel(known.table, known.learned, BLENDED), 1, 0, nodes, 5, VOCABULARY)[0]) == nodes


def test_fewer_nodes_are_made_where_fewer_are_known():
    learned = empty_learned(16)
    learn_text(learned, np.array([1, 2, 3]), 0)
    known = empty_table(VOCABULARY)
    found = paths(*best_first(TrigramModel(known, learned, BLENDED), 1, 2, 10, 10, VOCABULARY))
    assert found.keys() == {(3,)}
    assert found[3,] == pytest.approx(1 / 3 + 2 / 3 * 1 / 2)


# --- Monte Carlo tree search


@pytest.mark.parametrize(
    "settings", [SMALL, SMALL._replace(c1=0.1, c2=1.0, candidates=6, iterations=60)], ids=["published", "logarithmic"]
)
@pytest.mark.parametrize("trust", [BLENDED, PAPER], ids=["blended", "paper"])
def test_mcts_matches_the_twin(trust, settings):
    """With a small `c1`, the logarithm in equation 3 decides the exploration."""
    for seed in range(6):
        known = knowledge(seed, trust=trust)
        for a, b in contexts(seed, 4):
            found = paths(
                *mcts(
                    TrigramModel(known.table, known.learned, trust), a, b, settings, VOCABULARY, draws(settings, seed)
                )
            )
            expected, _ = naive.index_tables.mcts(
                known.tables, known.memory, trust, a, b, settings, VOCABULARY, draws(settings, seed)
            )
            assert found == pytest.approx(expected, rel=1e-5)


def test_mcts_is_the_same_for_a_seed_and_not_for_another():
    known = knowledge(2)
    settings = SMALL._replace(c1=0.01, candidates=8)  # so that the draws matter

    def trees(seed):
        found = [
            mcts(TrigramModel(known.table, known.learned, BLENDED), 1, b, settings, VOCABULARY, draws(settings, seed))
            for b in range(VOCABULARY)
        ]
        return [paths(*tree) for tree in found]

    assert [trees(seed) for seed in range(4)] == [trees(seed) for seed in range(4)]
    assert any(trees(seed) != trees(0) for seed in range(1, 4))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_mcts_keeps_its_limits_and_extends_every_kept_path(length):
    known = knowledge(3)
    settings = SMALL._replace(length=length, candidates=25)
    tokens, parents, scores = mcts(
        TrigramModel(known.table, known.learned, BLENDED), 1, 2, settings, VOCABULARY, draws(settings, 0)
    )
    check_tree(tokens, parents, VOCABULARY)
    found = paths(tokens, parents, scores)
    assert (max(map(len, found), default=0)) == (length if length > 1 else 0)
    _, visits = naive.index_tables.mcts(
        known.tables, known.memory, BLENDED, 1, 2, settings, VOCABULARY, draws(settings, 0)
    )
    for path in naive.index_tables.kept_paths(visits, dict.fromkeys(visits, 1.0), 25):
        if path:
            ranked = naive.index_tables.successors(known.tables, known.memory, BLENDED, *(1, 2, *path)[-2:])
            assert (*path, max(ranked, key=lambda item: item[1])[0]) in found


def test_mcts_leaves_tokens_beyond_the_vocabulary_out():
    known = knowledge(3)
    tokens, parents, _ = mcts(TrigramModel(known.table, known.learned, BLENDED), 1, 0, SMALL, 9, draws(SMALL, 0))
    assert len(tokens)
    check_tree(tokens, parents, 9)


def test_mcts_finds_nothing_where_nothing_is_known():
    known = knowledge(0, static=False, learns=False)
    assert all(
        len(array) == 0
        for array in mcts(TrigramModel(known.table, known.learned, BLENDED), 1, 2, SMALL, VOCABULARY, draws(SMALL, 0))
    )


# --- damaged arrays


def garbage(rng, wide):
    """Arrays with a table's dtypes and lengths, and nothing else right about them; `wide` tokens have 32 bits."""
    arrays = naive.index_tables.static_arrays(documents(1), VOCABULARY, 8)
    for name, array in arrays.items():
        largest = rng.choice([3, len(array) + 3, np.iinfo(array.dtype).max])
        noise = rng.integers(0, largest, len(array), endpoint=True).astype(array.dtype)
        arrays[name] = np.where(rng.random(len(array)) < rng.choice([0.1, 1.0]), noise, array)
    if wide:
        for name in ("second", "tokens", "unigram_tokens"):
            noise = rng.integers(0, 2**32, len(arrays[name]))
            arrays[name] = np.where(rng.random(len(noise)) < 0.5, noise, arrays[name]).astype(np.uint32)
    return frozen(arrays)


@pytest.mark.parametrize("trust", [BLENDED, PAPER])
def test_damaged_tables_give_trees_of_tokens_all_the_same(trust):
    rng = np.random.default_rng(0)
    learned = knowledge(0, trust=trust).learned
    settings = SMALL._replace(iterations=8)
    for number in range(60):
        table = garbage(rng, wide=number % 3 == 0)
        a, b = int(rng.integers(-1, VOCABULARY)), int(rng.integers(0, VOCABULARY))
        trees = [best_first(TrigramModel(table, learned, trust), a, b, 20, 6, VOCABULARY)]
        if number % 3:  # the searches share the functions that read the table, and compiling takes long
            trees.append(mcts(TrigramModel(table, learned, trust), a, b, settings, VOCABULARY, draws(settings, 0)))
        for tokens, parents, scores in trees:
            check_tree(tokens, parents, VOCABULARY)
            assert np.isfinite(scores).all()
