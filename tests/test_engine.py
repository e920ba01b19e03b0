"""The verifier, the step, the sequence's limits, the cache and the counts: on a toy target, and on a tiny llama."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foredraft.engine.step as step_module
from foredraft.contracts import Draft, DraftContext, Needs, SequenceView, StepRecord, Verdict
from foredraft.control import FixedControl
from foredraft.drafters.prediction import ChainDrafter, Prediction
from foredraft.engine.batch import steps
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.engine.statistics import add_up, summarize
from foredraft.errors import ForedraftError, ForedraftWarning, NumericsError, OutOfMemoryError
from foredraft.graph.layout import lay_out, lay_out_text
from foredraft.graph.tree import chain_parents
from foredraft.model import kv_cache
from foredraft.model.kv_cache import BLOCK, TreeCache
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.testing import VOCABULARY, ToyTarget
from foredraft.verify import verify
from support.drafts import path_to
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, ScriptedDrafting, continuation_in

PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)
TARGET = ToyTarget()
ANSWER = TARGET.greedy(PROMPT, 60)
ORACLE = OracleDrafter(continuation_in(np.concatenate([PROMPT, np.array(ANSWER)])))
NOTHING = OracleDrafter(lambda ids: ())
GREEDY = SamplingOptions()


def run(drafter, nodes=8, sampling=GREEDY, target=None, prompt=PROMPT, max_new_tokens=40, **given):
    """Decode; return the sequence and the records of its steps."""
    target = ToyTarget() if target is None else target
    seq = SequenceState(prompt, sampling, max_new_tokens=max_new_tokens, **given)
    records = list(steps(Run(seq, drafter, FixedControl(nodes), DraftContext(target.vocabulary), target)))
    return seq, records


class Scripted:
    """A drafter from a function of view and budget."""

    name = "scripted"
    needs = Needs()
    source_names = ("left", "right")

    def __init__(self, propose):
        self._propose = propose
        self.closed = 0

    def open(self, context):
        drafting = ScriptedDrafting(self._propose)
        drafting.close = self._count_close
        return drafting

    def _count_close(self):
        self.closed += 1


def tree(tokens, parents, **arrays):
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), **arrays)


def walked(tokens, end_after=99):
    """Verify `FORKED` at position 4 by given choices; return the verdict and what was asked of the chooser."""
    asked = []

    def choose(row, path):
        asked.append((row, tuple(path)))
        return tokens[len(path)]

    return verify(FORKED, choose, lambda emitted: len(emitted) == end_after, at=4), asked


# 7 -> 5 -> 6, 7 -> 8, and 9 with a child that repeats its token
FORKED = tree([7, 9, 5, 8, 9, 6], [-1, -1, 0, 0, 1, 2])


@pytest.mark.parametrize(
    ("taken", "path", "rows"),
    [
        ([1], (), [0]),
        ([7, 1], (0,), [0, 1]),
        ([7, 8, 1], (0, 3), [0, 1, 4]),
        ([7, 5, 6, 1], (0, 2, 5), [0, 1, 3, 6]),
        ([9, 9, 1], (1, 4), [0, 2, 5]),
        ([8, 5], (), [0]),  # 8 is a node, but not a child of the root
    ],
)
def test_the_walk_follows_the_targets_choices_and_adds_one_of_its_own(taken, path, rows):
    verdict, asked = walked(taken)
    assert verdict.path == path
    assert verdict.tokens == tuple(taken[: len(path) + 1])
    assert asked == [(row, verdict.tokens[:i]) for i, row in enumerate(rows)]
    assert verdict.at == 4
    assert verdict.draft is FORKED


@pytest.mark.parametrize("end_after", [1, 2, 3, 4])
def test_the_walk_stops_where_the_text_ends(end_after):
    verdict, _ = walked([7, 5, 6, 1], end_after)
    assert verdict.tokens == (7, 5, 6, 1)[:end_after]
    assert verdict.path == (0, 2, 5)[:end_after]


@pytest.mark.parametrize("distractors", [0, 2])
def test_what_is_always_right_is_always_accepted(distractors):
    known = continuation_in(np.concatenate([PROMPT, np.array(ANSWER)]))
    seq, records = run(OracleDrafter(known, distractors), nodes=3 * (distractors + 1))
    assert seq.emitted.tolist() == ANSWER[:40]
    assert [len(record.emitted) for record in records] == [4] * 10
    assert [record.accepted for record in records] == [3] * 10
    assert all(record.sources == ("scripted",) * 3 + (None,) for record in records)


def test_what_is_never_right_changes_nothing():
    known = continuation_in(np.concatenate([PROMPT, np.array(ANSWER)]))
    seq, records = run(AdversaryDrafter(known))
    assert seq.emitted.tolist() == ANSWER[:40]
    assert len(records) == 40
    assert all(record.accepted == 0 and record.sources == (None,) for record in records)
    assert all(record.drafted > 1 for record in records[:-1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(do_sample=True, seed=4)], ids=["greedy", "sampled"])
def test_what_is_sometimes_right_changes_nothing(seed, sampling):
    plain, _ = run(NOTHING, sampling=sampling)

    def sometimes(view, budget):  # right tokens and random ones, in one tree
        rng = np.random.default_rng([seed, len(view.ids)])
        following = plain.emitted[len(view.ids) - len(PROMPT) :][: min(budget.depth, int(rng.integers(0, 6)))]
        wrong = [(int(token) + 1 + int(rng.integers(VOCABULARY - 1))) % VOCABULARY for token in following]
        tokens = [token for pair in zip(wrong, following.tolist(), strict=True) for token in pair]
        return tree(tokens, [2 * (node // 2) - 1 for node in range(len(tokens))])

    seq, records = run(Scripted(sometimes), nodes=64, sampling=sampling)
    assert seq.emitted.tolist() == plain.emitted.tolist()
    assert 0 < sum(record.accepted for record in records) < 40
    assert len(records) < 40


DEPTHS = range(1, 8)


def first_occurrence(depth):
    """A position in the answer, about `depth`, whose token does not occur before it."""
    return next(i for i in range(depth - 1, len(ANSWER)) if ANSWER[i] not in ANSWER[:i])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("drafter", [ORACLE, NOTHING], ids=["oracle", "plain"])
def test_an_end_id_ends_the_text_inside_an_accepted_run(depth, drafter):
    last = first_occurrence(depth)
    seq, records = run(drafter, nodes=20, eos=(ANSWER[last], VOCABULARY + 5))
    assert seq.finish == "eos"
    assert seq.emitted.tolist() == ANSWER[: last + 1]
    assert sum(len(record.emitted) for record in records) == last + 1
    if drafter is ORACLE:
        assert summarize(records, 0.0).accepted == last + 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("drafter", [ORACLE, NOTHING], ids=["oracle", "plain"])
def test_a_stop_function_ends_the_text_inside_an_accepted_run(depth, drafter):
    seen = []

    def stop(token):
        seen.append(token)
        return len(seen) == depth

    seq, _ = run(drafter, nodes=20, stop=stop)
    assert seq.finish == "stop"
    assert seq.emitted.tolist() == seen == ANSWER[:depth]


@pytest.mark.parametrize("limit", DEPTHS)
@pytest.mark.parametrize("drafter", [ORACLE, NOTHING], ids=["oracle", "plain"])
def test_a_limit_ends_the_text_and_the_reason_says_which(limit, drafter):
    for given, reason in (
        ({"max_new_tokens": limit}, "length"),
        ({"window": len(PROMPT) + limit}, "window"),
        ({"max_new_tokens": limit, "window": len(PROMPT) + limit}, "length"),
        ({"max_new_tokens": limit + 1, "window": len(PROMPT) + limit}, "window"),
    ):
        seq, _ = run(drafter, nodes=20, **given)
        assert (seq.finish, seq.emitted.tolist()) == (reason, ANSWER[:limit])


def test_an_end_id_at_the_limit_counts_as_the_end_id():
    last = first_occurrence(4)
    seq, _ = run(ORACLE, eos=(ANSWER[last],), max_new_tokens=last + 1)
    assert seq.finish == "eos"


def test_a_prompt_that_fills_the_window_is_finished_before_the_first_step():
    seq, records = run(ORACLE, window=len(PROMPT))
    assert (seq.finish, records, seq.emitted.tolist()) == ("window", [], [])


@pytest.mark.parametrize("given", [{"max_new_tokens": 9}, {"window": len(PROMPT) + 9}])
def test_the_draft_shrinks_at_the_limits(given):
    budgets = []

    def notes(view, budget):
        budgets.append(budget)
        return tree([], [])

    _, records = run(Scripted(notes), nodes=5, **given)
    # the last token needs no draft: there is no budget and no proposal
    assert [budget.depth for budget in budgets] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert {budget.nodes for budget in budgets} == {5}
    assert len(records) == 9
    _, records = run(ORACLE, nodes=5, **given)
    assert [record.drafted for record in records] == [5, 2]


def test_an_oversized_draft_is_cut_before_it_is_verified():
    drafter = Scripted(lambda view, budget: tree([1, 2, 3, 4], [-1, -1, -1, -1]))
    _, records = run(drafter, nodes=2)
    assert {record.drafted for record in records[:-1]} == {2}
    # also for a limit that int64 does not hold, as a model without a window may be given
    seq, _ = run(drafter, nodes=2, max_new_tokens=2**64, eos=[ANSWER[first_occurrence(5)]])
    assert seq.emitted.tolist() == ANSWER[: first_occurrence(5) + 1]


def test_sources_name_who_drafted_each_token():
    def two_sources(view, budget):
        following = ANSWER[len(view.ids) - len(PROMPT) :][:2]
        return tree(following, chain_parents(len(following)), source=np.array([1, 0], np.uint8)[: len(following)])

    _, records = run(Scripted(two_sources), max_new_tokens=6)
    assert records[0].sources == ("right", "left", None)


class Recording:
    """A logits processor that records its calls and changes the scores by the whole prefix."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        assert input_ids.dtype == torch.int64
        assert scores.shape == (1, VOCABULARY)
        changed = scores.clone()
        changed[0, int(input_ids.sum()) % VOCABULARY] += 3.0
        return changed


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingOptions(repetition_penalty=1.7),
        SamplingOptions(do_sample=True, seed=2, top_k=20, repetition_penalty=1.3),
    ],
    ids=["greedy", "penalty", "sampled"],
)
@pytest.mark.parametrize("name", ["oracle", "adversary", "random"])
def test_a_processor_is_called_once_a_token_with_the_prefix_of_plain_decoding(sampling, name):
    plain, drafted = Recording(), Recording()
    expected, _ = run(NOTHING, sampling=sampling, processors=[plain])
    known = continuation_in(np.concatenate([PROMPT, expected.emitted]))
    drafter = {
        "oracle": OracleDrafter(known, 1), "adversary": AdversaryDrafter(known), "random": RandomTreeDrafter(1),
    }[name]  # fmt: skip
    seq, records = run(drafter, sampling=sampling, processors=[drafted])
    assert seq.emitted.tolist() == expected.emitted.tolist()
    assert drafted.prefixes == plain.prefixes
    whole = [*PROMPT.tolist(), *expected.emitted.tolist()]
    assert plain.prefixes == [whole[: len(PROMPT) + i] for i in range(40)]
    assert (len(records) < 20) is (name == "oracle")


def test_a_repetition_penalty_holds_along_the_branch():
    penalised, _ = run(NOTHING, sampling=SamplingOptions(repetition_penalty=3.0))
    assert penalised.emitted.tolist() != ANSWER[:40], "the penalty must matter here"
    known = continuation_in(np.concatenate([PROMPT, penalised.emitted]))
    seq, records = run(OracleDrafter(known, 2), nodes=12, sampling=SamplingOptions(repetition_penalty=3.0))
    assert seq.emitted.tolist() == penalised.emitted.tolist()
    assert len(records) == 8


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (tree([VOCABULARY], [-1]), f"token {VOCABULARY}.*below {VOCABULARY}"),
        (tree([-1], [-1]), "negative"),
        (tree([4, 4], [-1, -1]), "siblings have the same token"),
        (tree([4, 5], [-1, 1]), "parent must come before"),
        (tree([4, 5], [-1, -2]), "below -1"),
    ],
)
def test_a_drafter_that_proposes_no_tree_of_tokens_is_refused(draft, says):
    drafter = Scripted(lambda view, budget: draft)
    with pytest.raises(ValueError, match=says):
        run(drafter)
    assert drafter.closed == 1, "the drafting is closed on an error"


def test_the_drafting_is_closed_when_the_iterator_is_dropped():
    drafter = Scripted(lambda view, budget: tree([], []))
    seq = SequenceState(PROMPT, GREEDY, max_new_tokens=5)
    records = steps(Run(seq, drafter, FixedControl(2), DraftContext(VOCABULARY), TARGET))
    next(records)
    assert drafter.closed == 0
    records.close()
    assert drafter.closed == 1


class Broken(ToyTarget):
    """Scores are NaN from the third position on."""

    def forward(self, layout, cache, *, hidden=()):
        scores = super().forward(layout, cache, hidden=hidden)
        scores.logits[torch.from_numpy(layout.positions) >= len(PROMPT) + 1] = float("nan")
        return scores


@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(do_sample=True), SamplingOptions(repetition_penalty=2.0)])
@pytest.mark.parametrize("drafter", [ORACLE, NOTHING], ids=["oracle", "plain"])
def test_unusable_scores_stop_the_text_with_their_position(sampling, drafter):
    with pytest.raises(NumericsError, match=f"position {len(PROMPT) + 2}"):
        run(drafter, sampling=sampling, target=Broken())


def test_what_a_drafter_needs_reaches_it():
    verdicts = []

    class Curious(Scripted):
        needs = Needs(top_k=3)

        def open(self, context):
            drafting = super().open(context)
            drafting.observe = verdicts.append
            return drafting

    run(Curious(lambda view, budget: tree([1, 2], [-1, 0])), max_new_tokens=3)
    verdict = verdicts[0]
    assert verdict.top_tokens.shape == verdict.top_probabilities.shape == (3, 3)
    assert verdict.top_tokens[0, 0] == ANSWER[0]
    assert (np.diff(verdict.top_probabilities) <= 0).all()
    bare = []
    Curious.needs = Needs()
    verdicts = bare
    run(Curious(lambda view, budget: tree([1], [-1])), max_new_tokens=3)
    assert bare[0].top_tokens is None


def test_states_that_a_drafter_needs_are_those_of_the_text():
    """Whatever the drafts, and with a text that outgrows its first room for states."""
    shown = {}

    class Curious(RandomTreeDrafter):
        needs = Needs(hidden=(-1,))

        def open(self, context):
            drafting = super().open(context)
            propose = drafting.propose
            drafting.propose = lambda view, budget: shown.update({len(view.ids): view.states}) or propose(view, budget)
            return drafting

    seq, _ = run(Curious(2), max_new_tokens=150)
    ids = seq.view().ids
    scores = TARGET.forward(lay_out_text(ids.copy(), 0), TARGET.new_cache(), hidden=(-1,))
    assert len(shown) > 20
    for length, states in shown.items():
        if states is not None:  # the toy tells none of a prompt's
            assert torch.equal(states, scores.hidden[len(PROMPT) - 1 : length - 1])
    assert sum(states is None for states in shown.values()) <= 1


def test_top_tokens_are_told_where_a_draft_was_asked_for(monkeypatch):
    told = []

    class Curious(Scripted):
        needs = Needs(top_k=2)

        def open(self, context):
            drafting = super().open(context)
            drafting.observe = lambda verdict: told.append(verdict.top_tokens is not None)
            return drafting

    run(Curious(lambda view, budget: tree([], [])), max_new_tokens=2)  # at the last token no draft is of use
    run(Curious(lambda view, budget: tree([1], [-1])), max_new_tokens=1, nodes=0)
    monkeypatch.setattr(FixedControl, "trim", lambda self, drafts, budgets: [tree([], [])])
    run(Curious(lambda view, budget: tree([1], [-1])), max_new_tokens=2)
    assert told == [True, False, False, True, False]


def redraws_after_a_mismatch(draft, choose, ends, at):
    """The classic mistake: the draw that did not match is dropped, and another one is emitted."""
    verdict = verify(draft, choose, ends, at)
    if len(verdict.path) < len(verdict.tokens) and len(draft):
        again = (verdict.tokens[-1] + 1) % VOCABULARY
        return dataclasses.replace(verdict, tokens=(*verdict.tokens[:-1], again))
    return verdict


def accepts_what_is_drafted(draft, choose, ends, at):
    """Relaxed acceptance: the first drafted token is accepted, whatever the target chooses."""
    if len(draft):
        ends([int(draft.tokens[0])])
        return Verdict((int(draft.tokens[0]),), (0,), draft, at)
    return verify(draft, choose, ends, at)


@pytest.mark.parametrize("mistake", [redraws_after_a_mismatch, accepts_what_is_drafted])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(do_sample=True, seed=3)], ids=["greedy", "sampled"])
def test_a_wrong_verifier_is_caught_by_comparing_texts(mistake, sampling, monkeypatch):
    plain, _ = run(NOTHING, sampling=sampling)
    seq, _ = run(RandomTreeDrafter(2), sampling=sampling, nodes=20)
    assert seq.emitted.tolist() == plain.emitted.tolist()
    monkeypatch.setattr(step_module, "verify", mistake)
    seq, _ = run(RandomTreeDrafter(2), sampling=sampling, nodes=20)
    assert seq.emitted.tolist() != plain.emitted.tolist()


def test_a_wrong_commit_is_caught_by_comparing_texts(monkeypatch):
    commit = SequenceState.commit

    def off_by_one(seq, verdict, states):  # the accepted path is gathered from neighbouring slots
        commit(seq, dataclasses.replace(verdict, path=tuple(max(0, node - 1) for node in verdict.path)), states)

    known = continuation_in(np.concatenate([PROMPT, np.array(ANSWER)]))
    assert run(OracleDrafter(known, 1))[0].emitted.tolist() == ANSWER[:40]
    monkeypatch.setattr(SequenceState, "commit", off_by_one)
    assert run(OracleDrafter(known, 1))[0].emitted.tolist() != ANSWER[:40]


def record(emitted, accepted, drafted, nanoseconds=0):
    return StepRecord(tuple(emitted), accepted, drafted, (None,) * len(emitted), {"draft": nanoseconds, "forward": 1})


def test_statistics_follow_their_definitions():
    records = [
        record([1, 2, 3], 2, 10, 999), record([4], 0, 6, 999), record([5], 0, 0, 999),
        record([6, 7], 2, 4, 3 * 10**9 - 1),
    ]  # fmt: skip
    figures = summarize(records, 0.5)
    assert (figures.emitted, figures.steps, figures.drafting_steps) == (7, 4, 3)
    assert (figures.drafted, figures.accepted, figures.prefill_seconds) == (20, 4, 0.5)
    assert figures.tokens_per_target_step == 7 / 4
    assert figures.mean_acceptance_length == 1 + 4 / 3
    assert figures.draft_acceptance_rate == 4 / 20
    assert figures.drafted_share == 4 / 7
    assert figures.harmonic_mean == pytest.approx(2 * 0.2 * (4 / 7) / (0.2 + 4 / 7))
    assert figures.decode_seconds == pytest.approx(3.000003)
    assert figures.decode_seconds_per_token == pytest.approx(3.000003 / 7)
    assert figures.as_dict()["mean_acceptance_length"] == figures.mean_acceptance_length
    twice = add_up([figures, figures])
    assert (twice.emitted, twice.prefill_seconds) == (14, 1.0)
    assert twice.draft_acceptance_rate == figures.draft_acceptance_rate


def test_statistics_of_nothing_are_zero():
    figures = summarize([], 0.0)
    rates = figures.as_dict()
    assert rates.pop("mean_acceptance_length") == 1
    assert set(rates.values()) == {0}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    return TorchTarget(model)


def row_of(target, cache, ids):
    return target.forward(lay_out_text(ids[-1:], len(ids) - 1), cache).logits[0]


def after_random_accepts(target, length, steps, rng, nodes=12):
    """A cache after steps with random trees and random accepted paths, and the ids it should hold."""
    ids = rng.integers(0, 97, length).astype(np.int64)
    cache = target.new_cache()
    target.prefill(ids[:-1], cache)
    for _ in range(steps):
        parents = np.array([rng.integers(-1, node) for node in range(nodes)], np.int32)
        tokens = rng.permutation(97)[:nodes].astype(np.int32)
        target.forward(lay_out(int(ids[-1]), tokens, parents, len(ids) - 1), cache)
        path = path_to(parents, int(rng.integers(-1, nodes)))
        cache.commit([0, *(node + 1 for node in path)])
        ids = np.concatenate([ids, tokens[path].astype(np.int64), rng.integers(0, 97, 1)])
    return cache, ids


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_after_random_accepts_equals_a_fresh_prefill(llama, seed):
    rng = np.random.default_rng(seed)
    cache, ids = after_random_accepts(llama, int(rng.integers(2, 30)), 12, rng)
    fresh = llama.new_cache()
    llama.prefill(ids[:-1], fresh)
    assert cache.length == fresh.length == len(ids) - 1
    for kept, made in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(kept.keys[:, :, : len(ids) - 1], made.keys[:, :, : len(ids) - 1])
        torch.testing.assert_close(kept.values[:, :, : len(ids) - 1], made.values[:, :, : len(ids) - 1])
    torch.testing.assert_close(row_of(llama, cache, ids), row_of(llama, fresh, ids), rtol=1e-4, atol=1e-4)


def test_a_device_that_fails_is_a_sentence(llama, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(llama.model.model, "forward", fails)
    with pytest.raises(ForedraftError, match=r"a pass of 9 rows after 0 tokens \(.*encountered\).*start it again"):
        run(ORACLE, nodes=0, target=llama, prompt=np.arange(10), max_new_tokens=4)


@pytest.mark.parametrize(
    "told",
    ["DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.", "CUDA error: out of memory\n..."],
)
def test_memory_that_runs_out_ends_the_text_with_what_is_written(told, llama, monkeypatch):
    prompt, whole = np.arange(BLOCK - 10) % 97, 40
    plain, _ = run(ORACLE, nodes=0, target=llama, prompt=prompt, max_new_tokens=whole)
    allocated = kv_cache.allocated

    def limited(like, capacity):
        if capacity > BLOCK:
            raise RuntimeError(told)
        return allocated(like, capacity)

    monkeypatch.setattr(kv_cache, "allocated", limited)
    with pytest.warns(ForedraftWarning, match=r"no memory left for 1 more rows after 256 tokens.*ends here"):
        cut, _ = run(ORACLE, nodes=0, target=llama, prompt=prompt, max_new_tokens=whole)
    assert cut.finish == "memory"
    assert 0 < len(cut.emitted) < whole
    assert cut.emitted.tolist() == plain.emitted.tolist()[: len(cut.emitted)]
    with pytest.raises(OutOfMemoryError, match="ask for fewer tokens"):
        run(ORACLE, nodes=0, target=llama, prompt=np.arange(1, 90).repeat(4), max_new_tokens=whole)


def test_the_cache_grows_over_several_blocks(llama):
    rng = np.random.default_rng(9)
    cache, ids = after_random_accepts(llama, BLOCK - 5, 100, rng, nodes=20)
    capacities = {span.capacity for span in cache.spans.values()}
    assert all(capacity % BLOCK == 0 and len(ids) <= capacity < 2 * len(ids) for capacity in capacities)
    assert len(ids) > 2 * BLOCK
    with torch.inference_mode():
        expected = llama.model(torch.from_numpy(ids)[None]).logits[0, -1]
    torch.testing.assert_close(row_of(llama, cache, ids), expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("window", [5, 64, 300])
def test_a_sliding_cache_shifts_and_keeps_what_its_window_sees(window):
    cache = TreeCache([window, None])
    position, rng = 0, np.random.default_rng(0)
    shifts = 0
    for _ in range(120):
        rows = int(rng.integers(1, 30))
        base = cache.spans[window].base
        cache.reserve(rows)
        shifts += cache.spans[window].base > base
        states = torch.arange(position, position + rows, dtype=torch.float32)[None, None, :, None]
        for layer in cache.layers:
            seen, _ = layer.update(states, states)
            span = layer.span
            assert seen[0, 0, :, 0].tolist() == list(range(span.base, position + rows))
            assert span.base <= max(0, position - (window - 1)), "the first row's window must still be there"
        kept = int(rng.integers(1, rows + 1))
        cache.commit(range(kept))
        position += kept
        assert cache.length == cache.get_seq_length() == position
    assert position > 1000
    assert shifts > 1
    assert cache.spans[window].capacity <= max(2 * window, window + 60) + BLOCK
    assert cache.spans[None].base == 0


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [3], [-1]])
def test_rows_that_were_not_in_the_last_pass_cannot_be_committed(rows):
    cache = TreeCache([None])
    cache.reserve(3)
    with pytest.raises(ValueError, match="ascending and below 3"):
        cache.commit(rows)


def test_rows_cannot_be_committed_twice():
    cache = TreeCache([None])
    cache.reserve(3)
    cache.commit([0])
    with pytest.raises(ValueError, match="below 0"):
        cache.commit([0])


def test_a_failing_drafter_is_named_when_a_prediction_is_drafted_too():
    def fail(view, budget):
        raise RuntimeError("disk on fire")

    guarded = GuardedDrafter(ChainDrafter(Scripted(fail), Prediction(np.array([90, 91], np.int64)).chains))
    with pytest.warns(ForedraftWarning, match="The drafter scripted failed .*disk on fire.*the text is the same"):
        seq, _ = run(guarded, max_new_tokens=10)
    assert seq.emitted.tolist() == ANSWER[:10]


def test_a_prediction_goes_on_after_a_late_edit_of_a_text_that_repeats_itself():
    expected = np.array([[1, 2, 3, 100 + row] for row in range(200)]).ravel()  # only the rows' numbers are rare
    prediction, ids = Prediction(expected), np.array([0, *expected[: 4 * 180 - 1], 9, 1, 2])
    for end in range(1, len(ids) + 1):
        chains = prediction.chains(SequenceView(ids[:end], 1))
    assert chains[0].tokens[0] == 3
    assert 179 <= chains[0].tokens[1] - 100 <= 180, "the row of the edit, or the next one"


def test_a_prediction_that_was_often_wrong_offers_few_tokens():
    prediction = Prediction(np.tile(np.arange(1, 5), 40))
    assert len(prediction.chains(SequenceView(np.array([0]), 1))[0].tokens) == 64
    ids = np.array([0, *[1, 2, 9] * 40, 1, 2])
    for end in range(1, len(ids) + 1):
        chains = prediction.chains(SequenceView(ids[:end], 1))
    assert len(chains[0].tokens) in (1, 2)
    assert chains[0].tokens[0] == 3
