"""Every registered drafter passes every conformance check, and the checks catch faulty drafters."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from foredraft.contracts import EMPTY_DRAFT, Draft, Needs
from foredraft.control.worth import Worth
from foredraft.drafters import Resources, auto, drafter_class, make_drafter, method_names
from foredraft.engine.state import SequenceState
from foredraft.graph.tree import chain_parents
from foredraft.testing import CHECKS, VOCABULARY, ToyTarget, check_drafter, checks
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter
from support.tiny_models import tiny_checkpoint, tiny_draft_model, tiny_heads, tiny_target

ADAPTIX = [
    {"table": "none", "search": search, "learn": learn, "feedback": feedback, "share": share}
    for search, learn, feedback, share in (
        ("best_first", "tokens", "topk", False),
        ("mcts", "tokens", "off", True),
        ("best_first", "paper", "off", False),
        ("mcts", "paper", "topk", True),
        ("mcts", "off", "topk", False),
        ("best_first", "off", "off", True),
    )
]
"""Each pair of values of two options once: most errors depend on one option, or on two."""
REST = [
    {"store": "none"},
    {"store": "none", "learn": "off"},
    {"store": "none", "doubt": 0.0, "samples": 3},
    {"store": "none", "longest": 3, "shortest": 3, "continuation": 2},
]
"""Without a store; tests/test_rest.py runs the checks with one."""
AUTO = [
    {"store": "none", "table": "none"},
    {"store": "none", "table": "none", "learn": "request"},
    {"store": "none", "table": "none", "learn": "shared"},
    {"store": "none", "table": "none", "learn": "off"},
    {"store": "none", "table": "none", "model": "tiny", "levels": 3, "learn": "request"},
    {"store": "none", "table": "none", "drafter": "medusa", "learn": "request"},
    {
        "store": "none", "table": "none", "learn": "request",
        "drafter": {"method": "eesd", "least_probability": 0.0, "least_share": 0.0},
    },
    {"store": "none", "table": "none", "drafter": "layer_skip", "learn": "off"},
]  # fmt: skip
"""Without a store and a table; tests/test_auto.py runs the checks with them."""
VARIANTS = {
    "none": [{}],
    "layer_skip": [{}, {"attention": [0], "least_probability": 0.0, "levels": 3}],
    "lookahead": [{}, {"level": 2, "window": 3}, {"level": 6, "window": 2, "guess": 1}, {"guess": 0}],
    "prompt_lookup": [{}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"prompt_lookup_num_tokens": 1}],
    "adaptix": ADAPTIX,
    "rest": REST,
    "auto": AUTO,
    "draft_model": [{}, {"least_probability": 0.0, "levels": 3}],
    "draft_tree": [{"least_probability": 0.0, "least_share": 0.0}],
    "draft_graph": [{"least_probability": 0.0, "least_share": 0.0, "tau": 1}, {"least_probability": 0.0}],
    "eesd": [{}, {"out_degree": 1, "least_probability": 0.0, "levels": 10}, {"head": "none", "layers": 2}],
    "medusa": [{}, {"nodes": 5}],
    "eagle3": [{"least_probability": 0.0, "least_share": 0.0}, {"out_degree": 1, "levels": 3}],
    "peagle": [{"out_degree": 3}],
    "dflash": [{"least_probability": 0.0, "least_share": 0.0}, {"out_degree": 1}],
    "dspark": [{"out_degree": 3}],
    "dflash2": [{"out_degree": 3}],
    "mtp": [{"least_probability": 0.0}, {"out_degree": 1, "levels": 3}],
}
"""The options with which each registered method is tested; a new method needs an entry."""
SPECULATORS = ("eagle3", "peagle", "dflash", "dspark", "dflash2")
"""Methods whose heads are in the `speculators` format."""
ELSEWHERE = {"assistant"}
"""It reads the target's keys and values, and the toy has none: tests/test_assistant.py."""

OPTIONS_DECIDE = (
    checks.proposals_stay_within_the_budget,
    checks.sequences_do_not_influence_each_other,
    checks.greedy_text_equals_plain_decoding,
    checks.sampled_text_equals_plain_decoding,
)
"""The checks run on every set of options; each other check runs on one set of each method, in rotation."""


ASK_A_MODEL = ("draft_model", "draft_tree", "draft_graph", "eesd", "layer_skip")


def cases():
    """Return (method, options, check) of every test; those that take many passes of a model are slow."""
    for method, variants in VARIANTS.items():
        for turn, check in enumerate(CHECKS):
            chosen = variants if check in OPTIONS_DECIDE else [variants[turn % len(variants)]]
            marks = [pytest.mark.slow] if method in ASK_A_MODEL and check in OPTIONS_DECIDE else []
            yield from (pytest.param(method, options, check, marks=marks) for options in chosen)


def shares(method, options):
    """Return whether sequences learn from each other by design."""
    if method == "adaptix":
        return options["share"] and options["learn"] != "off"
    return options.get("learn", "shared" if method == "auto" else None) == "shared"


def named(value):
    if callable(value):
        return value.__name__
    return "-".join(map(str, value.values())) or "default" if isinstance(value, dict) else None


RESOURCES = Resources(VOCABULARY, draft_model=lambda _: tiny_draft_model(), target=tiny_target())


def with_models(method, options):
    """Set the draft model or the heads' folder that a method needs, also for one that `auto` blends in."""
    if method.startswith("draft_"):
        return {"model": "tiny", **options}
    if method in tiny_heads():
        return {"model" if method in SPECULATORS else "head": tiny_heads()[method], **options}
    if "drafter" in options:
        drafter = options["drafter"]
        inner = {"method": drafter} if isinstance(drafter, str) else drafter
        return {**options, "drafter": with_models(inner["method"], inner)}
    return options


def maker(method, options):
    own = replace(RESOURCES, target=tiny_checkpoint()) if method == "mtp" else RESOURCES
    return lambda: make_drafter(method, with_models(method, options), own)


def test_every_registered_method_is_covered():
    assert set(VARIANTS) | ELSEWHERE == set(method_names()), (
        "Give every method at least one set of options in VARIANTS."
    )
    assert all(VARIANTS.values())


@pytest.mark.parametrize("method", VARIANTS)
def test_every_registered_class_provides_what_the_door_reads(method):
    kind = drafter_class(method)
    assert kind.name == method
    assert kind.summary.endswith(".")
    drafter = maker(method, VARIANTS[method][0])()
    assert isinstance(drafter.needs, Needs)
    assert len(drafter.source_names) > 0
    assert all(isinstance(name, str) and name for name in drafter.source_names)


@pytest.fixture
def steady_seconds(monkeypatch):
    """Use a clock with equal ticks: whether `auto` uses a neural drafter depends on measured time."""
    monkeypatch.setattr(auto, "Worth", lambda: Worth(itertools.count(1.0).__next__))


@pytest.mark.usefixtures("steady_seconds")
@pytest.mark.parametrize(("method", "options", "check"), [*cases()], ids=named)
def test_the_law_holds(method, options, check):
    if check is checks.sequences_do_not_influence_each_other and shares(method, options):
        with pytest.raises(AssertionError, match="do not influence"):
            check(maker(method, options))
    else:
        check(maker(method, options))


def test_every_pair_of_adaptixs_values_is_tested():
    values = {name: {options[name] for options in ADAPTIX} for name in ADAPTIX[0]}
    assert values["search"] == {"best_first", "mcts"}
    assert values["learn"] == {"tokens", "paper", "off"}
    assert values["feedback"] == {"topk", "off"}
    assert values["share"] == {False, True}
    for one, other in itertools.combinations(values, 2):
        pairs = {(options[one], options[other]) for options in ADAPTIX}
        assert pairs == set(itertools.product(values[one], values[other]))


def continuation_of(ids):
    return _continuation(tuple(ids))


@functools.cache
def _continuation(ids):
    return ToyTarget().greedy(np.array(ids, np.int64), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: OracleDrafter(continuation_of),
        lambda: OracleDrafter(continuation_of, distractors=2),
        lambda: AdversaryDrafter(continuation_of),
        lambda: RandomTreeDrafter(3),
    ],
    ids=["oracle", "oracle-distractors", "adversary", "random"],
)
def test_the_shipped_drafters_keep_the_laws(make):
    check_drafter(make)


class Planted:
    """A drafter with a mistake; each case supplies `propose(view, budget, calls)`, where `calls` is shared state."""

    name = "planted"
    needs = Needs()
    source_names = ("planted",)

    def __init__(self, propose, closes=2, per_sequence=True, needs=needs):
        self.needs = needs
        self._propose = propose
        self._closes = closes
        self._calls = [] if not per_sequence else None

    def open(self, context):
        return PlantedDrafting(self._propose, self._closes, [] if self._calls is None else self._calls)


class PlantedDrafting:
    def __init__(self, propose, closes, calls):
        self._propose = propose
        self._closes = closes
        self._calls = calls

    def propose(self, view, budget):
        draft = self._propose(view, budget, self._calls) if budget.nodes and budget.depth else EMPTY_DRAFT
        self._calls.append(int(view.ids[-1]))
        return draft

    def observe(self, verdict):
        pass

    def close(self):
        self._closes -= 1
        if self._closes < 0:
            raise RuntimeError("closed already")


def tree(tokens, parents, **arrays):
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), **arrays)


def chain(*tokens):
    return Draft(np.array(tokens, np.int32), chain_parents(len(tokens)))


def writes_into_the_view(view, budget, calls):
    view.ids[0] = 0
    return EMPTY_DRAFT


def opens_the_view_and_writes(view, budget, calls):
    view.ids.flags.writeable = True
    view.ids[0] += 1
    return EMPTY_DRAFT


def ignores_the_budget(view, budget, calls):
    return chain(1, 2, 3)


def repeats_siblings(view, budget, calls):
    return tree([4, 4], [-1, -1])


def needs_two_tokens(view, budget, calls):
    return chain(int(view.ids[-2]))


UNSEEDED = np.random.default_rng()

PLANTS = {
    "repeats siblings": (
        lambda: Planted(repeats_siblings), checks.proposals_are_valid_trees, "sibling",
    ),
    "parent behind its child": (
        lambda: Planted(lambda view, budget, calls: tree([4, 5], [1, -1])), checks.proposals_are_valid_trees, "before",
    ),
    "token beyond the vocabulary": (
        lambda: Planted(lambda view, budget, calls: chain(VOCABULARY)), checks.proposals_are_valid_trees, "vocabulary",
    ),
    "negative token": (
        lambda: Planted(lambda view, budget, calls: chain(-1)), checks.proposals_are_valid_trees, "vocabulary",
    ),
    "NaN score": (
        lambda: Planted(lambda view, budget, calls: tree([4], [-1], score=np.array([np.nan], np.float32))),
        checks.proposals_are_valid_trees, "finite",
    ),
    "source without a name": (
        lambda: Planted(lambda view, budget, calls: tree([4], [-1], source=np.array([1], np.uint8))),
        checks.proposals_are_valid_trees, "name",
    ),
    "counts steps that it says it need not see": (
        lambda: Planted(lambda view, budget, calls: chain(len(calls) % VOCABULARY), needs=Needs(every_step=False)),
        checks.steps_not_shown_change_no_draft, "every_step",
    ),
    "too many nodes": (lambda: Planted(ignores_the_budget), checks.proposals_stay_within_the_budget, "3 nodes"),
    "too deep": (
        lambda: Planted(lambda view, budget, calls: chain(*range(budget.nodes))),
        checks.proposals_stay_within_the_budget, "deep",
    ),
    "writes into the view": (lambda: Planted(writes_into_the_view), checks.the_view_is_left_as_it_was, "view"),
    "opens the view": (lambda: Planted(opens_the_view_and_writes), checks.the_view_is_left_as_it_was, "changed"),
    "draws without the seed": (
        lambda: Planted(lambda view, budget, calls: chain(int(UNSEEDED.integers(VOCABULARY)))),
        checks.the_same_seed_gives_the_same_drafts, "same seed",
    ),
    "remembers the sequence before": (
        lambda: Planted(lambda view, budget, calls: chain(len(calls) % VOCABULARY), per_sequence=False),
        checks.sequences_do_not_influence_each_other, "influence",
    ),
    "cannot be closed twice": (
        lambda: Planted(lambda view, budget, calls: chain(1), closes=1), checks.close_can_be_called_twice, "twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_the_checker_catches(plant):
    make, check, says = PLANTS[plant]
    with pytest.raises(AssertionError, match=says):
        check(make)
    with pytest.raises(AssertionError):
        check_drafter(make)


def test_the_checker_catches_drafts_without_a_budget():
    class Eager(PlantedDrafting):
        def propose(self, view, budget):
            return chain(1)

    class EagerDrafter(Planted):
        def open(self, context):
            return Eager(None, 2, [])

    with pytest.raises(AssertionError, match=r"within Budget\(nodes=0, depth=0.*this one has 1 nodes"):
        checks.proposals_stay_within_the_budget(lambda: EagerDrafter(None))


def test_the_checker_catches_a_drafter_that_needs_two_tokens():
    with pytest.raises(AssertionError, match="one token"):
        checks.a_sequence_of_one_token_is_drafted_for(lambda: Planted(needs_two_tokens))


@pytest.mark.parametrize(
    "check", [checks.greedy_text_equals_plain_decoding, checks.sampled_text_equals_plain_decoding], ids=named
)
def test_the_checker_catches_a_text_that_differs(check, monkeypatch):
    """Make the engine commit the wrong row, because no drafter can change the text of a correct engine."""
    commit = SequenceState.commit

    def commits_a_sibling(seq, verdict, states=None):
        commit(seq, verdict, states)
        if len(verdict.path) > 1:  # as if the first accepted row had been gathered from another slot
            seq.cache.slots[seq.cache.length - 1] = (seq.cache.slots[seq.cache.length - 1] + 1) % VOCABULARY

    monkeypatch.setattr(SequenceState, "commit", commits_a_sibling)
    with pytest.raises(AssertionError, match="text equals plain decoding"):
        check(maker("prompt_lookup", {}))


def test_shared_knowledge_is_not_held_against_a_drafter_that_shares():
    make = PLANTS["remembers the sequence before"][0]
    with pytest.raises(AssertionError, match="influence"):
        check_drafter(make)
    with pytest.raises(AssertionError, match="influence"):
        check_drafter(make, shared=False)
    check_drafter(make, shared=True)
