"""Rejection verification keeps the target's law: proved by going through every outcome, and mistakes are found.

A step's law is enumerated: every draft that can be drawn, times everything that verification can decide, each with its
exact probability; behind what the step emits, plain decoding goes on. The law of the first tokens must be the target's.
"""

import dataclasses
import itertools
import types

import numpy as np
import pytest
import torch
from scipy import stats

import foredraft.engine.state as state_module
from foredraft.bench.method import parse_method
from foredraft.bench.prove import prove
from foredraft.contracts import Budget, CostCurve, Draft, DraftContext, Scores
from foredraft.control import FixedControl, cut
from foredraft.control.levels import LevelControl
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.graph.tree import chain_parents
from foredraft.sampling import SamplingOptions, rejection
from foredraft.sampling.chooser import Sampler
from foredraft.sampling.filters import distribution
from foredraft.sampling.noise import gumbel_noise, philox
from foredraft.sampling.rejection import SeededChance, as_drawn, choose_token, draw_siblings, residual
from foredraft.testing import VOCABULARY, ToyTarget, check_drafter, checks
from foredraft.testing.recording import begun, written
from foredraft.verify import verify
from support.controls import OfOne, measured
from support.drafts import path_to
from support.enumeration import PROMPT, DrawingDrafter, World, distance, drawn_tree, outcomes
from support.scripted import OracleDrafter, RandomTreeDrafter, ScriptedDrafting, logits_of

EXACT = 1e-9
LEAST_P = 1e-4
"""Seeds are fixed, so a test either always passes or always fails; a sound one had a chance of 1e-4 to fail."""


def test_the_enumeration_goes_through_every_outcome():
    def two_coins(chance):
        first = chance.accept(0.25)
        return first, chance.draw(np.array([0.5, 0.0, 0.5])) if first else None

    assert dict(outcomes(two_coins)) == {(True, 0): 0.125, (True, 2): 0.125, (False, None): 0.75}


def favours_the_sum(ids, scores):
    """A logits processor that depends on the whole prefix."""
    changed = scores.clone()
    changed[0, int(ids.sum()) % scores.shape[1]] += 1.0
    return changed


def sampled(**options):
    return SamplingOptions(do_sample=True, **options)


SETTINGS = {
    "plain": (sampled(),),
    "filtered": (sampled(temperature=0.6, top_p=0.85),),
    "top-k": (sampled(temperature=1.5, top_k=2),),
    "processed": (sampled(min_p=0.1, repetition_penalty=1.6), (favours_the_sum,)),
    "ended": (sampled(temperature=0.8), (), (0,)),
    "greedy": (SamplingOptions(),),
}


def draft_of(nodes):
    """Build a draft from (parent, token, row of q)."""
    parents, tokens, rows = zip(*nodes, strict=True)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), q=np.stack(rows))


CASES = [
    *((vocabulary, widths, name) for vocabulary in (3, 4) for widths in ((1,), (1, 1), (1, 1, 1)) for name in SETTINGS),
    *((3, widths, name) for widths in ((2,), (3,), (2, 1, 1), (2, 2)) for name in SETTINGS),
    *((4, widths, name) for widths in ((2,), (4,), (3, 1), (1, 2)) for name in SETTINGS if name != "plain"),
    (4, (2, 1, 1), "filtered"),
]


@pytest.mark.parametrize(
    ("vocabulary", "widths", "name"),
    CASES,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_chains_and_trees_keep_the_targets_law_exactly(vocabulary, widths, name):
    world = World(vocabulary, *SETTINGS[name])
    assert distance(world, drawn_tree(world, widths), len(widths) + 1) < EXACT


def merged(world, width=1, own_q=True, deeper=False):
    """Yield drafts in which a continuation is drawn after one prefix and used after another one too.

    Args:
        world: whose draft model draws.
        width: siblings in the continuation.
        own_q: the copies carry the q that they were drawn from; otherwise, the mistake, that of their own prefix.
        deeper: the other prefix is one token longer.
    """
    drafter, sampling = world.drafter(()), world.sampling

    def law(*path):
        return drafter.distribution_after(np.array([*PROMPT, *path], np.int64), sampling)

    def copied(row, *path):
        return row if own_q else law(*path).astype(np.float32)

    def draw(chance):
        tokens, rows = draw_siblings(law(), 2, chance)
        nodes = [(-1, int(token), row) for token, row in zip(tokens, rows, strict=True)]
        if len(nodes) < 2:
            return draft_of(nodes)
        first, second = nodes[0][1], [nodes[1][1]]
        prefix = 1
        if deeper:
            (token,), (row,) = draw_siblings(law(*second), 1, chance)
            nodes.append((1, int(token), row))
            prefix, second = 2, [*second, int(token)]
        for token, row in zip(*draw_siblings(law(first), width, chance), strict=True):
            (last,), (last_row,) = draw_siblings(law(first, int(token)), 1, chance)
            for parent, path, mine in ((0, None, row), (prefix, second, copied(row, *second))):
                nodes.append((parent, int(token), mine))
                below = last_row if path is None else copied(last_row, *path, int(token))
                nodes.append((len(nodes) - 1, int(last), below))
        return draft_of(nodes)

    return outcomes(draw)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("vocabulary", "width", "deeper"), [(3, 1, False), (3, 2, False), (3, 1, True), (4, 1, False)])
def test_merged_graphs_keep_the_targets_law_exactly(vocabulary, width, deeper, name):
    world = World(vocabulary, *SETTINGS[name])
    assert distance(world, merged(world, width, deeper=deeper), 3 + deeper) < EXACT


def test_nodes_of_a_merged_graph_are_accepted_behind_both_prefixes():
    world, behind = World(3, *SETTINGS["plain"]), set()
    for draft, _ in merged(world):
        scores = world.scores(draft)
        for tokens, _ in outcomes(lambda chance, draft=draft, scores=scores: world.emitted(draft, scores, chance)):
            if len(tokens) >= 3:
                behind.add(draft.tokens.tolist().index(tokens[0]))
    assert behind == {0, 1}


@pytest.mark.parametrize("name", SETTINGS)
def test_chosen_trees_keep_the_targets_law_exactly(name):
    """Without q, every drafted node has a one-hot q."""
    world = World(3, *SETTINGS[name])
    for parents in ([-1, 0, 1], [-1, -1, 0, 1], [-1, -1, -1], [-1, -1, 0, 0, 1]):
        for tokens in itertools.islice(itertools.permutations([0, 1, 2, 0, 1], len(parents)), 0, None, 7):
            draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
            try:
                draft.check()
            except ValueError:  # two siblings with one token
                continue
            assert law_distance(world, draft) < EXACT


def law_distance(world, draft):
    law, scores = {}, world.scores(draft)
    for tokens, decided in outcomes(lambda chance: world.emitted(draft, scores, chance)):
        law[tokens] = law.get(tokens, 0.0) + decided
    actual, expected = world.continued(law, 4), world.continued({(): 1.0}, 4)
    return max(abs(actual.get(text, 0.0) - expected.get(text, 0.0)) for text in actual.keys() | expected.keys())


@pytest.mark.parametrize("name", ["plain", "filtered", "ended"])
@pytest.mark.parametrize(("nodes", "widths"), [(1, (1, 1)), (2, (1, 1)), (2, (2, 1))])
def test_whole_texts_keep_the_targets_law_exactly(nodes, widths, name):
    """Three tokens through the engine: budgets, cuts, commits, several drafts, and limits inside a draft."""
    world = World(3, *SETTINGS[name])
    drafter = world.drafter(widths)

    def text(chance):
        seq = SequenceState(
            PROMPT, world.sampling, max_new_tokens=3, eos=world.eos,
            verification="rejection", chance=lambda position: chance,
        )  # fmt: skip
        drafter.open = lambda context: ScriptedDrafting(
            lambda view, budget: drafter.drawn(view.ids, budget, world.sampling, chance)
        )
        for _ in steps(Run(seq, drafter, FixedControl(nodes), DraftContext(3), world)):
            pass
        return tuple(seq.emitted.tolist())

    law = {}
    for tokens, probability in outcomes(text):
        law[tokens] = law.get(tokens, 0.0) + probability
    expected = world.continued({(): 1.0}, 3)
    assert max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in law.keys() | expected.keys()) < EXACT


# --- plants: mistakes that the enumeration must find


def scaled_residual(p, q):
    """A wrong residual: what is left of p in proportion to what q leaves."""
    left = p * (1 - q)
    return left / left.sum() if left.sum() > 0 else p


def redraw(p, q):
    """After a mismatch, the draw is repeated."""
    return p


def path_counted_twice(draft, at, law, chance):
    """Accepts by the ratio of the whole path, so that a node's ancestors, accepted already, count again."""
    ratio = 1.0
    children = {}
    for node, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).append(node)

    def choose(row, path):
        nonlocal ratio
        p, decides = law(row, path), chance(at)
        for node in children.get(row - 1, ()):
            token, q = int(draft.tokens[node]), as_drawn(draft.q[node])
            here = ratio * p[token] / q[token]
            if decides.accept(min(1.0, here)):
                ratio = here
                return token
            p = residual(p, q)
        return decides.draw(p)

    return choose


def node_counted_twice(draft, at, law, chance):
    """Tries a node again for every path by which a graph reaches it, as if it had been drawn again."""
    children = {}
    for node, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).extend([node, node])

    def choose(row, path):
        p, decides = law(row, path), chance(at)
        for node in children.get(row - 1, ()):
            token, q = int(draft.tokens[node]), as_drawn(draft.q[node])
            if decides.accept(min(1.0, p[token] / q[token])):
                return token
            p = residual(p, q)
        return decides.draw(p)

    return choose


def with_q(drafts, changed):
    return ((dataclasses.replace(draft, q=changed(draft)), probability) for draft, probability in drafts)


def unprocessed_q(world):
    """Nodes are drawn from the processed distribution, and q is the draft model's own softmax."""
    drafter = world.drafter(())

    def rows(draft):
        paths = [draft.tokens[path_to(draft.parents, node)[:-1]] for node in range(len(draft))]
        found = [drafter.distribution_after(np.array([*PROMPT, *path]), sampled()) for path in paths]
        return np.stack(found).astype(np.float32)

    return with_q(drawn_tree(world, (1, 1)), rows)


def with_score(draft):
    """A draft model's score: the probability of the path."""
    own = draft.q[np.arange(len(draft)), draft.tokens]
    score = [float(np.prod(own[path_to(draft.parents, node)])) for node in range(len(draft))]
    return dataclasses.replace(draft, score=np.array(score, np.float32))


def cut_by_score(world):
    """Of three siblings, the two with the best scores are verified."""
    for draft, probability in drawn_tree(world, (3,)):
        kept = np.sort(np.argsort(-with_score(draft).score, kind="stable")[:2]).astype(np.int32)
        yield draft.take(kept), probability


def dropped_after_drawing(world):
    """A node is dropped because it is improbable."""
    for draft, probability in drawn_tree(world, (1, 1)):
        own = draft.q[np.arange(len(draft)), draft.tokens]
        unlikely = np.flatnonzero(own < 0.3)
        yield draft.take(np.arange(unlikely[0] if len(unlikely) else len(draft), dtype=np.int32)), probability


def copies_cut_by_their_original(world):
    """A merged graph is cut by the scores of its levels, which repeat tokens further down."""
    for draft, probability in merged(world, deeper=True):
        scored = with_score(draft)
        second = [node for node in range(len(draft)) if len(path_to(draft.parents, node)) == 2]
        yield (draft if scored.score[second].max() > 0.2 else cut(draft, Budget(9, 2))), probability


def sorted_by_probability(world):
    """Siblings are drawn in one order and tried in another."""
    for draft, probability in drawn_tree(world, (3,)):
        first = as_drawn(draft.q[0])
        yield draft_of([(-1, *pair) for pair in resorted(draft, first)]), probability


def resorted(draft, first):
    """The tokens by descending probability, with q as if they had been drawn so."""
    left = first.copy()
    for token in sorted(draft.tokens.tolist(), key=lambda token: -first[token]):
        yield token, (left / left.sum()).astype(np.float32)
        left[token] = 0.0


PLANTS = {
    "a wrong residual": ("filtered", lambda world: drawn_tree(world, (1, 1)), "residual", scaled_residual),
    "a wrong residual among siblings": ("plain", lambda world: drawn_tree(world, (2,)), "residual", scaled_residual),
    "q unprocessed": ("filtered", unprocessed_q, None, None),
    "a re-draw after a mismatch": ("plain", lambda world: drawn_tree(world, (1,)), "residual", redraw),
    "a path counted twice": (
        "plain", lambda world: drawn_tree(world, (1, 1)), "rejection_chooser", path_counted_twice,
    ),
    "a node counted twice": ("plain", merged, "rejection_chooser", node_counted_twice),
    "a merged node with the other prefix's q": ("plain", lambda world: merged(world, own_q=False), None, None),
    "a deeper merged node with the other prefix's q": (
        "plain", lambda world: merged(world, own_q=False, deeper=True), None, None,
    ),
    "a cut by score": ("plain", cut_by_score, None, None),
    "a node dropped after it was drawn": ("plain", dropped_after_drawing, None, None),
    "a copy cut by its original's score": ("plain", copies_cut_by_their_original, None, None),
    "siblings tried in another order": ("plain", sorted_by_probability, None, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_the_enumeration_finds(plant, monkeypatch):
    name, drafts, attribute, mistake = PLANTS[plant]
    if attribute is not None:
        monkeypatch.setattr(state_module if attribute == "rejection_chooser" else rejection, attribute, mistake)
    world = World(4, *SETTINGS[name])
    assert distance(world, drafts(world)) > 1e-3


@pytest.mark.parametrize("control", ["fixed", "measured"])
def test_a_drawn_draft_is_cut_in_order_whatever_its_scores(control):
    world = World(4, *SETTINGS["plain"])
    kinds = {"fixed": OfOne(FixedControl(2)), "measured": measured(CostCurve((1, 99), (1.0, 500.0)))}
    trimmed = []
    for draft, probability in drawn_tree(world, (3,)):
        kept = kinds[control].trim(with_score(draft), Budget(2, 9))
        assert kept.tokens.tolist() == draft.tokens[:2].tolist()
        np.testing.assert_array_equal(kept.q, draft.q[:2])
        trimmed.append((kept, probability))
    assert distance(world, trimmed) < EXACT


class Confident:
    """Stops after a token that is probable, and records what it is told."""

    def __init__(self):
        self.told = []

    def more(self, token):
        self.told.append(token)
        return token is None or token < 0.4

    def observe(self, outcome):
        """Learn nothing."""


def test_a_rule_is_not_told_the_scores_of_drawn_tokens():
    world, trimmed = World(3, *SETTINGS["plain"]), []
    for draft, probability in merged(world, deeper=True):
        rule = Confident()
        control = OfOne(LevelControl(rule, 20))
        trimmed.append((control.trim(with_score(draft), control.budget(9)), probability))
        assert set(rule.told) <= {None}
    assert distance(world, trimmed) < EXACT


def test_a_drawn_draft_is_cut_by_depth_too():
    world = World(3, *SETTINGS["plain"])
    for draft, _ in drawn_tree(world, (2, 1)):
        scored = with_score(draft)
        assert cut(scored, Budget(9, 1)).tokens.tolist() == draft.tokens[:2].tolist()
        assert cut(scored, Budget(3, 2)).tokens.tolist() == draft.tokens[:3].tolist()
        assert cut(scored, Budget(1, 2), -scored.score).tokens.tolist() == draft.tokens[:1].tolist()


# --- the pure functions


def choose(p, draft, seed=0):
    return choose_token(np.array(p), draft, range(len(draft)), SeededChance(seed, 3))


def siblings(tokens, rows=None):
    q = None if rows is None else np.array(rows, np.float32)
    return Draft(np.array(tokens, np.int32), np.full(len(tokens), -1, np.int32), q=q)


def test_a_zero_residual_never_divides():
    p = np.array([0.25, 0.75])
    with np.errstate(all="raise"):
        assert residual(p, p) is p
        assert residual(p, np.array([0.25, 0.8])) is p
        assert residual(np.array([0.0, 1.0]), np.array([0.5, 0.5])).tolist() == [0, 1]
        assert residual(np.array([0.0, 1.0]), np.array([0.0, 1.0])).tolist() == [0, 1]
        for seed in range(20):
            assert choose([0.0, 1.0], siblings([1]), seed) == 1
            assert choose([0.25, 0.75], siblings([0], [[0.25, 0.75]]), seed) == 0


def test_what_rounding_leaves_of_equal_distributions_is_a_law_again():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.dirichlet(np.ones(5))
        left = residual(p, as_drawn(p.astype(np.float32)))
        assert left.sum() == pytest.approx(1, abs=1e-12)
        assert (left >= 0).all()


def test_a_rejected_node_of_rounding_falls_back_to_the_target():
    class Refuses(SeededChance):
        def accept(self, probability):
            return False

    p = np.array([0.5, 0.5])
    found = {choose_token(p, siblings([0], [p]), [0], Refuses(seed, 0)) for seed in range(40)}
    assert found == {0, 1}


def test_a_token_that_the_target_does_not_allow_is_never_emitted():
    for seed in range(200):
        assert choose([0.0, 0.5, 0.5], siblings([0], [[0.9, 0.1, 0.0]]), seed) != 0
        assert choose([0.0, 0.5, 0.5], siblings([0]), seed) != 0


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (siblings([1], [[1.0, 0.0, 0.0]]), "Node 0 of the draft is token 1, to which its q gives 0"),
        (siblings([1], [[1.0, np.nan, 0.0]]), "Node 0 of the draft is token 1, to which its q gives nan"),
        (siblings([0, 1], [[0.5, 0.5, 0], [0.5, 0.5, 0]]), "node 1 gives 0.5 to token 0, which an earlier sibling has"),
    ],
)
def test_a_node_that_its_q_cannot_have_given_is_named(draft, says):
    with pytest.raises(ValueError, match=says):
        choose([0.0, 0.0, 1.0], draft)
    with pytest.raises(ValueError, match=r"[Nn]ode"):
        draft.check_q()


@pytest.mark.parametrize(
    ("q", "says"),
    [
        (np.ones((1, 3), np.float64), r"q must be float32\[1, 3\]"),
        (np.ones((2, 3), np.float32), r"q must be float32\[1, 3\]"),
        (np.array([[0.5, 0.2, 0.1]], np.float32), "sum to 0.8"),
        (np.array([[0.5, 1.0, -0.5]], np.float32), "negative"),
    ],
)
def test_q_that_is_no_distribution_is_refused(q, says):
    draft = Draft(np.array([1], np.int32), np.array([-1], np.int32), q=q)
    with pytest.raises(ValueError, match=says):  # noqa: PT012  # either may find it
        draft.check()
        draft.check_q()


@pytest.mark.parametrize("q", [np.ones((1, 4), np.float32), np.ones((1, 3), np.float64), np.ones((2, 3), np.float32)])
def test_q_of_another_shape_than_the_targets_is_refused_before_it_is_verified(q):
    draft = Draft(np.array([1], np.int32), np.array([-1], np.int32), q=q)
    with pytest.raises(ValueError, match=r"q must be float32\[1, 3\]"):
        draft.check(3)


def test_siblings_are_different_and_carry_what_they_were_drawn_from():
    q = np.array([0.5, 0.0, 0.3, 0.2])
    law = {}
    for (tokens, rows), probability in outcomes(lambda chance: draw_siblings(q, 9, chance)):
        assert sorted(tokens.tolist()) == [0, 2, 3], "as many as q allows"
        assert (tokens.dtype, rows.dtype, rows.shape) == (np.int32, np.float32, (3, 4))
        siblings(tokens, rows).check_q()
        assert rows[1][tokens[0]] == rows[2][tokens[0]] == 0
        law[tuple(tokens.tolist())] = probability
    assert law[0, 2, 3] == pytest.approx(0.5 * 0.6, abs=1e-6)
    assert law[3, 2, 0] == pytest.approx(0.2 * 0.3 / 0.8, abs=1e-6)
    tokens, rows = draw_siblings(q, 0, SeededChance(0, 0))
    assert (tokens.shape, rows.shape) == ((0,), (0, 4))


# --- seeded chance


def test_seeded_chance_is_the_philox_words_of_its_own_counter():
    seed, position = (7 << 32) | 3, 21
    chance = SeededChance(seed, position)
    for asked in range(3):
        words = philox(np.array([asked, position, 1, 0], np.uint32), np.array([3, 7], np.uint32)).tolist()
        u = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
        again = SeededChance(seed, position)
        for _ in range(asked):
            again.accept(0.5)
        assert again.accept(np.nextafter(u, 1))
        assert not chance.accept(u)


def uniforms(seed, position, stream, count):
    chance = SeededChance(seed, position, stream)
    return [chance._uniform() for _ in range(count)]


def test_chance_is_uniform_and_never_the_same_for_another_test_position_stream_or_seed():
    values = [
        uniforms(seed, position, stream, 12) for seed in range(6) for position in range(40) for stream in (1, 2, 3)
    ]
    flat = np.ravel(values)
    assert len(set(flat.tolist())) == len(flat)
    assert stats.kstest(flat, "uniform").pvalue > LEAST_P
    assert stats.pearsonr(flat[:-1], flat[1:]).pvalue > LEAST_P
    assert max(SeededChance(2**64 - 1, 2**31).draw(np.ones(3) / 3) for _ in range(2)) <= 2


def test_chance_shares_nothing_with_matched_noise():
    matched = np.exp(-np.exp(-gumbel_noise(5, 9, np.arange(48))))
    own = uniforms(5, 9, rejection.VERIFIER_STREAM, 48)
    assert np.abs(matched[:, None] - np.array(own)).min() > 1e-7


def test_draws_follow_the_distribution_and_never_leave_it():
    law = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    draws = [SeededChance(3, position).draw(law) for position in range(4000)]
    counts = np.bincount(draws, minlength=6)
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], law[law > 0] * 4000).pvalue > LEAST_P


def test_a_product_that_rounds_up_stays_on_the_last_token_with_a_probability():
    class Highest(SeededChance):
        def _uniform(self):
            return 1.0  # as the product of a large u and a sum just off 1 may come out

    assert Highest(0, 0).draw(np.array([0.5, 0.5, 0.0])) == 1


# --- the law of a row


@pytest.mark.parametrize("options", [{}, {"temperature": 0.4, "top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}])
def test_the_distribution_is_the_law_of_the_matched_draw(options):
    row = np.random.default_rng(3).normal(0, 0.4, 8).astype(np.float32)
    law = distribution(row, sampled(**options))
    assert law.dtype == np.float64
    assert law.sum() == pytest.approx(1, abs=1e-12)
    logits = torch.from_numpy(row)[None]
    draws = []
    for seed in range(3000):
        sampler = Sampler(sampled(seed=seed, **options))
        draws.append(sampler.chooser(Scores(logits), 0)(0, []))
    counts = np.bincount(draws, minlength=8)
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], law[law > 0] * 3000).pvalue > LEAST_P


def test_the_distribution_of_greedy_decoding_is_one_hot_and_of_an_unusable_row_empty():
    row = np.array([0.0, 3.0, 1.0], np.float32)
    assert distribution(row, SamplingOptions()).tolist() == [0, 1, 0]
    for bad in ([np.nan, 0], [-np.inf, -np.inf], [np.inf, 0]):
        for options in (SamplingOptions(), sampled()):
            assert len(distribution(np.array(bad, np.float32), options)) == 0


# --- through the engine, with seeds

TARGET_LOGITS = logits_of(ToyTarget(seed=0))
TOY_PROMPT = np.array([3, 1, 4, 1, 5], np.int64)


def write(drafter, sampling, verification="rejection", nodes=6, new=24, processors=()):
    target = ToyTarget()
    seq = SequenceState(TOY_PROMPT, sampling, max_new_tokens=new, verification=verification, processors=processors)
    settings = {**dataclasses.asdict(sampling), "verification": verification}
    context = DraftContext(VOCABULARY, sampling.seed, settings=settings)
    records = list(steps(Run(seq, drafter, FixedControl(nodes), context, target)))
    return seq.emitted.tolist(), sum(record.accepted for record in records)


NOTHING = OracleDrafter(lambda ids: ())
DRAFTERS = {
    "draws well": lambda: DrawingDrafter(TARGET_LOGITS),
    "draws badly": lambda: DrawingDrafter(logits_of(ToyTarget(seed=8)), (2, 2)),
    "chooses": lambda: RandomTreeDrafter(4),
    "nothing": lambda: NOTHING,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("processors", [(), (favours_the_sum,)], ids=["bare", "processed"])
@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_greedy_text_under_rejection_is_that_of_plain_decoding(drafter, processors, penalty):
    sampling = SamplingOptions(repetition_penalty=penalty)
    plain, _ = write(NOTHING, sampling, "matched", processors=processors)
    assert write(DRAFTERS[drafter](), sampling, processors=processors)[0] == plain


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    texts = [write(DRAFTERS["draws well"](), sampled(seed=seed))[0] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != write(NOTHING, sampled(seed=3), "matched")[0]


def test_a_drafter_that_draws_as_the_target_does_is_always_accepted():
    drafter = DrawingDrafter(TARGET_LOGITS, (1, 1, 1))
    text, accepted = write(drafter, sampled(seed=1, temperature=0.9), nodes=3, new=40)
    assert (len(text), accepted) == (40, 30)
    assert write(drafter, sampled(seed=1, temperature=0.9, top_p=0.8), nodes=3, new=40)[1] == 30


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_processor_is_called_once_a_token_with_the_prefix_of_the_text(drafter):
    prefixes = []

    def notes(ids, scores):
        prefixes.append(ids[0].tolist())
        return scores

    text, _ = write(DRAFTERS[drafter](), sampled(seed=2), processors=(notes,))
    whole = [*TOY_PROMPT.tolist(), *text]
    assert prefixes == [whole[: len(TOY_PROMPT) + i] for i in range(len(text))]


def test_matched_verification_reads_no_q():
    plain, _ = write(NOTHING, sampled(seed=6), "matched")
    assert write(DRAFTERS["draws badly"](), sampled(seed=6), "matched")[0] == plain


def test_the_verifier_asks_for_each_position_once():
    asked = []
    world = World(3, *SETTINGS["plain"])
    draft = Draft(np.array([0, 1, 2], np.int32), chain_parents(3))

    def chance(position):
        asked.append(position)
        return types.SimpleNamespace(accept=lambda probability: True, draw=lambda law: 0)

    seq = SequenceState(PROMPT, sampled(), max_new_tokens=99, verification="rejection", chance=chance)
    scores = world.scores(draft)
    assert verify(draft, seq.chooser(scores, draft), seq.ends, len(PROMPT) - 1).path == (0, 1, 2)
    assert asked == [2, 3, 4, 5]


def test_texts_sampled_under_rejection_are_not_proved_token_for_token():
    target = types.SimpleNamespace(vocabulary=9)
    generator = types.SimpleNamespace(target=target, use=lambda method: method)
    method = parse_method('prompt_lookup:{"verification": "rejection"}')
    assert (method.verification, method.options) == ("rejection", {})
    assert prove(generator, [method], [], {"temperature": 0.5}) == []


# --- the conformance suite


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draws well", "draws badly"])
def test_the_shipped_drawing_drafter_keeps_the_laws(name):
    check_drafter(DRAFTERS[name])


class Mistaken(DrawingDrafter):
    """Changes its drafts after drawing them."""

    def __init__(self, mistake):
        super().__init__(logits_of(ToyTarget(seed=8)), (1, 1, 1))
        self._mistake = mistake

    def drawn(self, ids, budget, options, chance):
        draft = super().drawn(ids, budget, options, chance)
        return self._mistake(draft) if len(draft) else draft


def flattened(draft):
    """Gives q of a higher temperature than the draws'."""
    rows = np.sqrt(draft.q)
    return dataclasses.replace(draft, q=rows / rows.sum(axis=1, keepdims=True))


def keeps_the_probable(draft):
    own = draft.q[np.arange(len(draft)), draft.tokens]
    unlikely = np.flatnonzero(own < 0.2)
    return draft.take(np.arange(unlikely[0] if len(unlikely) else len(draft), dtype=np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [flattened, keeps_the_probable])
def test_the_conformance_suite_finds_a_drafter_whose_q_is_not_what_it_drew_from(mistake):
    with pytest.raises(AssertionError, match="Drawn text must have the target's distribution"):
        checks.drawn_text_has_the_targets_distribution(lambda: Mistaken(mistake))


# --- whole texts


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["matched", "rejection"])
def test_whole_texts_have_the_distribution_of_plain_decoding(rule):
    """Of 3,000 seeds, two tokens each, by the engine's own steps."""
    world, counts = World(4, sampled(temperature=0.8)), {}
    for seed in range(3000):
        sampling = dataclasses.replace(world.sampling, seed=seed)
        run = begun(world.drafter((2, 1)), PROMPT, sampling, rule, 2, FixedControl(4), world)
        text = tuple(written(run).emitted.tolist())
        counts[text] = counts.get(text, 0) + 1
    exact = world.continued({(): 1.0}, 2)
    assert counts.keys() <= exact.keys()
    found = [counts.get(text, 0) for text in exact]
    assert stats.chisquare(found, [3000 * share for share in exact.values()]).pvalue > LEAST_P
