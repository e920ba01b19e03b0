"""Lookahead decoding: window and pool are those of the algorithm, written naively, and texts stay the same."""

import functools

import numpy as np
import pytest

import foredraft
from foredraft.contracts import Budget, DraftContext, SequenceView, Verdict
from foredraft.control import FixedControl
from foredraft.drafters import Resources, make_drafter
from foredraft.drafters.lookahead import LookaheadDrafter, LookaheadOptions
from foredraft.drafters.prediction import ChainDrafter, Prediction
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.errors import UsageError
from foredraft.graph.tree import depths
from foredraft.integrations.vllm import parse_proposer_options
from foredraft.sampling import SamplingOptions
from foredraft.testing import VOCABULARY, ToyTarget
from support.drafts import path_to
from support.toys import TOY_DRAFT

WHOLE = Budget(64, 64)


def drafting(seed=0, **options):
    return make_drafter("lookahead", options, Resources(VOCABULARY)).open(DraftContext(VOCABULARY, seed))


def view(*ids):
    return SequenceView(np.array(ids, np.int64), len(ids))


def taught(*ids, said, **options):
    """A drafting that proposed after `ids`; the target `said` these tokens, in one step each."""
    current = drafting(**options)
    for token in said:
        draft = current.propose(view(*ids), WHOLE)
        top = np.full((len(draft) + 1, 1), token, np.int32)
        current.observe(Verdict((token,), (), draft, len(ids) - 1, top, np.ones_like(top, np.float32)))
    return current


def paths(draft):
    """The token path down to each node."""
    return {tuple(int(draft.tokens[node]) for node in path_to(draft.parents, end)) for end in range(len(draft))}


def columns(draft):
    """The paths that no other path extends."""
    found = paths(draft)
    return found - {path[:-1] for path in found}


def prefixes(sequences):
    return {tuple(each[:length]) for each in sequences for length in range(1, len(each) + 1)}


class Notes:
    """A drafter that records another one's drafts and the ids before them."""

    def __init__(self, drafter):
        self._drafter = drafter
        self.needs, self.source_names, self.drafts = drafter.needs, drafter.source_names, []

    def open(self, context):
        self._drafting = self._drafter.open(context)
        self.observe, self.close = self._drafting.observe, self._drafting.close
        return self

    def propose(self, view, budget):
        self.drafts.append((view.ids.tolist(), self._drafting.propose(view, budget)))
        return self.drafts[-1][1]


def noted(prompt, options, nodes=64, new_tokens=24):
    target, notes = ToyTarget(), Notes(LookaheadDrafter(LookaheadOptions(**options)))
    seq = SequenceState(np.array(prompt, np.int64), SamplingOptions(), max_new_tokens=new_tokens)
    for _ in steps(Run(seq, notes, FixedControl(nodes), DraftContext(VOCABULARY), target)):
        pass
    assert seq.emitted.tolist() == target.greedy(np.array(prompt, np.int64), new_tokens)
    return notes.drafts


class NaiveLookahead:
    """The algorithm row by row: every row of the window is a separate text, continued by the target."""

    def __init__(self, level, window, guess, token):
        self.rows = [[token] * window for _ in range(level - 1)]
        self.guess, self.pool = guess, []

    def step(self, ids):
        """Return the paths verified after `ids`, and advance."""
        self.rows[0][0] = ids[-1]
        columns = [[*self.rows[0][: j + 1], *(row[j] for row in self.rows[1:])] for j in range(len(self.rows[0]))]
        latest = []
        for ngram in reversed(self.pool):
            if ngram[0] == ids[-1] and ngram[1:] not in latest:
                latest.append(ngram[1:])
        said = [ToyTarget().greedy(np.array(ids[:-1] + column, np.int64), 1)[0] for column in columns]
        self.pool += [[*(row[j] for row in self.rows), said[j]] for j in range(len(said))]
        self.rows = [*self.rows[1:], said]
        return prefixes([column[1:] for column in columns] + latest[: self.guess])


@pytest.mark.parametrize(("level", "window", "guess"), [(2, 3, 2), (3, 4, 2), (4, 3, 9), (5, 1, 1)])
def test_every_draft_is_the_window_and_the_guesses_of_the_algorithm(level, window, guess):
    naive = NaiveLookahead(level, window, guess, token=7)
    drafts = noted([7] * 9, {"level": level, "window": window, "guess": guess}, nodes=200)
    whole = [(ids, draft) for ids, draft in drafts if 9 + 24 - len(ids) > window + level]  # limits cut the depth
    assert len(whole) > 5
    for ids, draft in whole:
        assert paths(draft) == naive.step(ids)
    assert any((draft.source == 0).any() for _, draft in drafts), "some n-gram was found again"


def test_the_window_begins_as_stretches_of_the_prompt_at_places_that_the_seed_chooses():
    prompt = list(range(1, 21))
    first = [drafting(seed, level=4, window=4).propose(view(*prompt), WHOLE) for seed in (1, 1, 2)]
    assert first[0].tokens.tolist() == first[1].tokens.tolist() != first[2].tokens.tolist()
    whole = drafting(1, level=4, window=9).propose(view(*prompt), WHOLE)
    assert len(columns(whole)) > 5
    assert {(column[-1] - column[-2]) % 20 for column in columns(whole)} == {1}


@pytest.mark.parametrize(
    "budget", [Budget(1, 9), Budget(2, 2), Budget(5, 9), Budget(9, 3), Budget(12, 64), Budget(64, 1)]
)
def test_a_budget_cuts_columns_and_guesses_never_levels(budget):
    ids = [1, 2, 3, 4, 1, 2, 5, 6, 1]
    current = taught(*ids, said=[7, 8, 9], level=4, window=6, guess=6)
    draft = current.propose(view(*ids), budget)
    draft.check()
    assert len(draft) <= budget.nodes
    assert depths(draft.parents).max(initial=0) <= budget.depth
    assert (draft.source == 0).sum() <= (budget.nodes + 1) // 2
    leaves = set(range(len(draft))) - set(draft.parents.tolist())
    for node in leaves:
        if draft.source[node] == 1:  # a column is complete or missing
            assert depths(draft.parents)[node] >= 2  # the rows after the root, in column 0


def emptied(current, ids, budget):
    draft = current.propose(view(*ids), budget)
    current.observe(Verdict((5,), (), draft, len(ids) - 1))
    return draft


def test_steps_without_a_draft_keep_the_window_and_the_pool():
    ids = [1, 2, 3, 4, 1, 2]
    first, second = taught(*ids, said=[5]), taught(*ids, said=[5])
    first.propose(view(*ids), WHOLE)
    second.propose(view(*ids), WHOLE)
    for _ in range(5):
        assert len(emptied(second, ids, Budget(0, 8))) == len(emptied(second, ids, Budget(8, 0))) == 0
    draft = first.propose(view(*ids), WHOLE)
    assert paths(draft) == paths(second.propose(view(*ids), WHOLE))
    assert set(draft.source.tolist()) == {0, 1}, "there are guesses and a window"


def test_a_window_that_was_cut_away_stays_where_it_is():
    current = drafting(guess=0)
    draft = current.propose(view(*range(1, 9)), WHOLE)
    kept = draft.take(np.array([0], np.int32))
    top = np.array([[3], [4]], np.int32)
    current.observe(Verdict((3,), (), kept, 7, top, np.ones((2, 1), np.float32)))
    after = current.propose(view(*range(1, 9), 3), WHOLE)
    assert not any(column[-1] == column[-2] for column in columns(draft))
    assert all(column[-1] == column[-2] for column in columns(after)), "the last row stands twice: none took its place"
    assert {column[-1] for column in columns(after)} == {column[-1] for column in columns(draft)}


def test_a_pool_keeps_the_newest_of_each_token():
    current = taught(1, said=[2, 3, 4], level=2, guess=2, window=1)
    draft = current.propose(view(1), WHOLE)
    assert draft.tokens[draft.source == 0].tolist() == [4, 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 1}, "level is 1; it must be 2 to 16"),
        ({"window": 0}, "window is 0; it must be 1 to 64"),
        ({"guess": -1}, "guess is -1; it must be 0 to 64"),
        ({"ngram": 4}, "has no option 'ngram'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        make_drafter("lookahead", options, Resources(10))


def test_where_nobody_tells_the_targets_best_tokens_it_is_refused():
    with pytest.raises(UsageError, match="vLLM does not pass"):
        parse_proposer_options({"method": "lookahead"})


@functools.cache
def generator():
    return foredraft.load(TOY_DRAFT, method="none", dtype="float32")


SETTINGS = {"greedy": {}, "T=0.7": {"do_sample": True, "temperature": 0.7, "seed": 5}}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_text_is_that_of_plain_decoding_in_fewer_passes(setting):
    prompt = "Write a short story about a fox and a"
    generator().use("none")
    plain = generator().generate(prompt, max_new_tokens=64, **SETTINGS[setting])
    generator().use("lookahead", {"window": 8, "guess": 8}, nodes=64)
    drafted = generator().generate(prompt, max_new_tokens=64, **SETTINGS[setting])
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.tokens_per_target_step > 1.15
    generator().use("lookahead")  # its own control, which may stop drafting
    assert generator().generate(prompt, max_new_tokens=64, **SETTINGS[setting]).token_ids == plain.token_ids


def test_a_prediction_beside_it_does_not_stop_it():
    target, prompt = ToyTarget(), np.array([3, 1, 4, 1, 5], np.int64)
    expected = target.greedy(prompt, 24)
    guess = np.array([*expected[:8], 1, *expected[9:]], np.int64)
    drafter = ChainDrafter(LookaheadDrafter(LookaheadOptions()), Prediction(guess).chains)
    seq = SequenceState(prompt, SamplingOptions(), max_new_tokens=24)
    run = Run(seq, drafter, FixedControl(24), DraftContext(VOCABULARY), target)
    for _ in steps(run):
        pass
    assert seq.emitted.tolist() == expected
    assert drafter.drafted > 0
    assert run.statistics.drafted > drafter.drafted
