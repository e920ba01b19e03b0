"""The calls by address: what they draft and learn is what their parts do one by one, however much was read before."""

import numpy as np
import pytest

from foredraft.contracts import Draft, Verdict
from foredraft.graph.tree import top_nodes
from foredraft.index.backoff import prior_trust
from foredraft.index.blend import Counts, blend, learn_written, prior_inner_trust, with_foresight
from foredraft.index.blender import Blender, BlenderOptions, Foreseen
from foredraft.index.learned import empty_learned, learn_verdict, read_text
from foredraft.index.lookup import Lookup, Question
from foredraft.index.recent_text import append, empty_text
from foredraft.index.successors import BLENDED
from test_search import static_table
from test_suffix_array import random_documents, sort

pytestmark = pytest.mark.kernels

VOCABULARY = 40
NODES, DEPTH = 12, 6


def some_segments():
    return [sort(random_documents(seed, VOCABULARY, 20, 20), VOCABULARY) for seed in (3, 4)]


def options(**changed):
    usual = {
        "longest": 8, "shortest": 2, "samples": 32, "continuation": 5, "learns": True, "keep": 0.9,
        "feedback_weight": 2.0, "trust": BLENDED,
    }  # fmt: skip
    return BlenderOptions(**{**usual, **changed})


class OneByOne:
    """What a blender does, by the functions that it is made of, each called by itself."""

    def __init__(self, segments, table, chosen):
        self.chosen, self.table = chosen, table
        self.lookup = Lookup(segments, chosen.longest, own=chosen.learns)
        self.trust, self.inner = prior_trust(chosen.longest, 20.0), prior_inner_trust(20.0)
        self.learned = empty_learned()

    def counts(self):
        return Counts(self.table, self.learned, self.chosen.trust)

    def draft(self, ids, shared, nodes, foreseen=None):
        known = len(self.lookup.ids)
        self.lookup.read(ids)
        if self.chosen.learns:
            self.learned = read_text(self.learned, ids, known, self.chosen.keep)
        asked = Question(self.chosen.shortest, False, True, self.chosen.samples, min(self.chosen.continuation, DEPTH))
        self.occurred = self.known = self.lookup.ask(shared, self.trust, asked)
        if foreseen is not None:
            self.known = with_foresight(*self.occurred, *foreseen)
        levels, rows = self.known
        self.made = blend(rows, levels, self.inner, self.counts(), *last(ids), nodes, DEPTH, VOCABULARY)
        return self.made

    def learn(self, ids, verdict):
        tokens = np.array(verdict.tokens, np.int64)
        known = (self.made, self.occurred, self.known, self.counts())
        otherwise = learn_written(self.trust, self.inner, *known, *last(ids), tokens)
        self.learned = learn_verdict(self.learned, verdict, ids, self.chosen.feedback_weight, self.chosen.keep)
        rows = self.occurred[1]
        return rows.weights[rows.tokens[:, 0] == tokens[0]].sum() + (1 - rows.weights.sum()) * otherwise


def last(ids):
    return (int(ids[-2]) if len(ids) > 1 else -1), int(ids[-1])


def cut(drafted, nodes):
    kept = top_nodes(drafted.parents, drafted.score, nodes, DEPTH)
    return Draft(drafted.tokens, drafted.parents, drafted.score).take(kept)


def told(rng, draft, at, tokens):
    rows = np.sort(rng.choice(len(draft) + 1, min(3, len(draft) + 1), replace=False)).astype(np.int32)
    top = np.stack([rng.choice(VOCABULARY, 4, replace=False) for _ in rows]).astype(np.int32)
    shares = np.sort(rng.dirichlet(np.ones(5), len(rows))[:, :4])[:, ::-1].astype(np.float32)
    return Verdict(tokens, (), draft, at, top_rows=rows, top_tokens=top, top_probabilities=np.ascontiguousarray(shares))


def assert_same_steps(one, other, begin, steps, *, shared=None, foreseeing=False, seed=0, nodes=NODES):
    rng, ids = np.random.default_rng(seed), list(begin)
    for step in range(steps):
        read = np.array(ids, np.int64)
        read.flags.writeable = False
        foreseen = None
        if foreseeing and rng.random() < 0.7:
            paths = rng.integers(0, VOCABULARY, (4, min(5, DEPTH))).astype(np.int32)
            foreseen = Foreseen(paths, rng.dirichlet(np.ones(4)), 0.6)
        if foreseen is None and step % 2:
            drafted = one.propose(read, shared, nodes, DEPTH, VOCABULARY)
        else:
            one.ask(read, shared, DEPTH)
            if foreseen is not None:
                one.foresee(foreseen)
            drafted = one.draft(nodes, DEPTH, VOCABULARY)
        made = other.draft(read, shared, nodes, foreseen)
        for field in ("tokens", "parents", "score", "source"):
            np.testing.assert_array_equal(getattr(drafted, field), getattr(made, field))
        tokens = tuple(rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist())
        if len(drafted.tokens) and rng.random() < 0.6:
            tokens = (int(drafted.tokens[0]), *tokens)
        verdict = told(rng, cut(drafted, 5), len(ids) - 1, tokens)
        assert one.learn(read, verdict) == pytest.approx(other.learn(read, verdict))
        ids += tokens
    assert one.ids is read


CASES = {
    "all": {}, "nothing learned": {"learns": False, "feedback_weight": 0.0}, "short": {"continuation": 1, "longest": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("foreseeing", [False, True])
def test_the_calls_do_what_their_parts_do(case, foreseeing):
    chosen, table = options(**CASES[case]), static_table(random_documents(7, VOCABULARY, 20, 20))
    shared = empty_text()
    append(shared, np.array([*range(10), -1, *range(5, 15), -1], np.int64))
    segments = some_segments()
    one = Blender(segments, table, prior_trust(chosen.longest, 20.0), chosen, 20.0)
    other = OneByOne(segments, table, chosen)
    assert_same_steps(one, other, [5, 6, 7], 25, shared=shared, foreseeing=foreseeing and case == "all")


def test_nothing_is_lost_when_a_text_outgrows_its_room():
    """Nine hundred tokens at once, then so many steps that text and counts need more room by themselves."""
    chosen, table = options(), static_table([[1, 2, 3]])
    begin = np.random.default_rng(1).integers(0, VOCABULARY, 900).tolist()
    one = Blender((), table, prior_trust(chosen.longest, 20.0), chosen, 20.0)
    other = OneByOne((), table, chosen)
    assert_same_steps(one, other, begin, 60)
    assert len(one.ids) > len(empty_text().symbols)


def test_texts_too_long_for_one_stretch_are_read_all_the_same(monkeypatch):
    monkeypatch.setattr("foredraft.index.blender.STRETCH", 100)
    chosen, table = options(), static_table([[1, 2, 3]])
    begin = np.random.default_rng(1).integers(0, VOCABULARY, 300).tolist()
    one = Blender((), table, prior_trust(chosen.longest, 20.0), chosen, 20.0)
    assert_same_steps(one, OneByOne((), table, chosen), begin, 10)


def test_contexts_outgrow_their_room_too(monkeypatch):
    monkeypatch.setattr("foredraft.index.blender.empty_learned", lambda: empty_learned(64))
    chosen, table = options(), static_table([[1, 2, 3]])
    one = Blender((), table, prior_trust(chosen.longest, 20.0), chosen, 20.0)
    assert_same_steps(one, OneByOne((), table, chosen), [1, 2], 40)


def test_more_nodes_than_there_was_room_for():
    chosen, table = options(samples=200), static_table(random_documents(7, VOCABULARY, 40, 40))
    segments = some_segments()
    one = Blender(segments, table, prior_trust(chosen.longest, 20.0), chosen, 20.0)
    assert_same_steps(one, OneByOne(segments, table, chosen), [5, 6], 5, nodes=150)


def test_what_was_not_asked_for_credits_nobody():
    chosen, table = options(), static_table([[1, 2, 3]])
    trust = prior_trust(chosen.longest, 20.0)
    blender = Blender((), table, trust, chosen, 20.0)
    before, ids = trust.hits.copy(), np.array([1, 2, 1, 2], np.int64)
    nothing = Draft(np.empty(0, np.int32), np.empty(0, np.int32))
    assert blender.learn(ids, Verdict((1,), (), nothing, 3)) is None
    np.testing.assert_array_equal(trust.hits, before)
    blender.ask(ids, None, DEPTH)
    assert blender.learn(ids, Verdict((1,), (), nothing, 3)) is not None
    assert trust.hits.sum() > before.sum()
