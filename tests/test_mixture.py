"""`auto` as a drafter: it finds what each source alone would find, learns whom to trust, shares, saves and forgets."""

import numpy as np
import pytest

from foredraft.contracts import Budget, Draft, SequenceView, Verdict
from foredraft.drafters import Resources, make_drafter, mixture
from foredraft.drafters.mixture import MixtureDrafter, MixtureOptions
from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.blend import COUNTS
from foredraft.index.datastore import check_datastore, open_datastore
from foredraft.index.library import Library
from foredraft.index.retrieval import FORESEEN, OWN, SHARED, STORE
from foredraft.index.trigram import TrigramTable
from foredraft.model.rollout_drafter import RolloutDrafting
from foredraft.testing import CHECKS, check_drafter
from foredraft.testing import VOCABULARY as TOY_IDS
from test_conformance import tiny_draft_model
from test_datastore import built
from test_mixture_neural import asked
from test_rest import opened, propose, scored
from test_search import static_table
from test_suffix_array import random_documents
from toys import TOY_DRAFT

pytestmark = pytest.mark.kernels

VOCABULARY = 300
SEGMENTS = [random_documents(seed, VOCABULARY, 30, 30) for seed in (31, 32)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return built(tmp_path_factory.mktemp("stores") / "auto", *SEGMENTS)


def drafter(folder=None, **options):
    chosen = {"store": "none" if folder is None else str(folder), "table": "none", **options}
    return make_drafter("auto", chosen, Resources(VOCABULARY))


def verdict(*tokens, path=(), at=0, top=None):
    nodes = np.empty(0, np.int32)
    shown = {} if top is None else {
        "top_rows": np.zeros(1, np.int32),
        "top_tokens": np.array([[token for token, _ in top]], np.int32),
        "top_probabilities": np.array([[share for _, share in top]], np.float32),
    }  # fmt: skip
    return Verdict(tokens, path, Draft(nodes, nodes), at, **shown)


def best(draft):
    return draft.tokens[0] if len(draft) else None


# --- what it knows


@pytest.mark.parametrize(("learn", "copies"), [("request", True), ("shared", True), ("off", False)])
def test_quick_drafts_are_of_the_text_itself_and_named_so_and_none_where_it_learns_nothing(learn, copies):
    made = drafter(learn=learn)
    assert made.needs.quick == copies
    if copies:
        ids = np.array([7, 8, 9, 4, 7, 8])
        draft = opened(made).propose(SequenceView(ids, len(ids)), Budget(2, 2, quick=True))
        assert draft.tokens.tolist() == [9, 4]
        assert {made.source_names[number] for number in draft.source} == {"auto, own text"}


def test_each_source_is_found_and_named(store, tmp_path):
    document = next(ids for ids in SEGMENTS[0] if len(ids) > 8)
    draft = propose(opened(drafter(store, learn="off")), document[:4], 16)
    assert best(draft) == document[4]
    assert set(draft.source.tolist()) == {STORE}

    own = propose(opened(drafter()), [7, 8, 9, 10, 11, 7, 8, 9])
    assert best(own) == 10
    assert own.source[0] == OWN

    made = drafter(learn="shared")
    first = opened(made)
    propose(first, [20, 21, 22, 23])
    first.close()
    shared = propose(opened(made), [20, 21, 22])
    assert (best(shared), shared.source[0]) == (23, SHARED)

    counted = opened(MixtureDrafter(MixtureOptions(learn="off"), table_of([[1, 2, 3]] * 9), Library(vocabulary=11)))
    draft = propose(counted, [1, 2])
    assert (best(draft), draft.source[0]) == (3, COUNTS)
    names = MixtureDrafter.source_names
    assert [names[source] for source in (STORE, OWN, SHARED, FORESEEN, COUNTS)] == [
        "auto, datastore", "auto, own text", "auto, shared text", "auto, draft model", "auto, counts"
    ]  # fmt: skip


def table_of(documents):
    return TrigramTable(11, static_table(documents), "", {}, None)


def test_the_targets_own_distribution_is_learned():
    drafting = opened(drafter())
    assert best(propose(drafting, [1, 2, 3])) is None
    drafting.observe(verdict(4, at=2, top=[(4, 0.6), (5, 0.3)]))
    draft = propose(drafting, [1, 2, 3, 4, 2, 3], depth=1)
    assert draft.tokens.tolist()[:2] == [4, 5]
    deaf = opened(drafter(feedback_weight=0.0))
    propose(deaf, [1, 2, 3])
    deaf.observe(verdict(4, at=2, top=[(4, 0.6), (5, 0.3)]))
    assert 5 not in propose(deaf, [1, 2, 3, 4, 2, 3], depth=1).tokens


def test_a_source_that_misleads_is_trusted_less(tmp_path):
    """The store says 4 behind 1 2 3 every time, and the target writes 5."""
    folder = built(tmp_path / "s", [[1, 2, 3, 4]] * 6, vocabulary=VOCABULARY)
    made = drafter(folder, learn="off")
    drafting, ids, scores = opened(made), [], []
    for _ in range(40):
        ids += [1, 2, 3]
        scores.append(scored(propose(drafting, ids, depth=1))[4,])
        drafting.observe(verdict(5))
    assert scores[-1] < 0.5 * scores[0]
    assert scored(propose(opened(made), [1, 2, 3], depth=1))[4,] == pytest.approx(scores[0]), "others are not told"


def test_rows_that_go_on_rightly_behind_drafted_tokens_are_trusted_more(tmp_path):
    folder = built(tmp_path / "s", [[1, 2, 3, 4, 5]] * 6, vocabulary=VOCABULARY)
    drafting, ids, ratios = opened(drafter(folder, learn="off")), [], []
    for _ in range(40):
        ids += [1, 2]
        found = scored(propose(drafting, ids, depth=2))
        ratios.append(found[3, 4] / found[3,])
        drafting.observe(verdict(3, 4))
    assert ratios[-1] > ratios[0] + 0.1


def test_steps_without_a_budget_are_read_all_the_same():
    drafting = opened(drafter())
    assert len(propose(drafting, [7, 8, 9, 10, 7, 8], nodes=0)) == 0
    drafting.observe(verdict(9))
    assert best(propose(drafting, [7, 8, 9, 10, 7, 8, 9])) == 10


def test_the_number_of_steps_does_not_matter_to_what_is_read(store):
    ids = [token for document in SEGMENTS[1][:6] for token in document]
    at_once, in_steps = opened(drafter(store)), opened(drafter(store))
    for end in range(1, len(ids)):
        propose(in_steps, ids[:end])
    assert scored(propose(at_once, ids)) == pytest.approx(scored(propose(in_steps, ids)))


# --- what it keeps


def test_what_was_shared_is_saved_and_found_again(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory)
    assert made.options.shares
    drafting = opened(made)
    propose(drafting, [41, 42, 43, 44])
    drafting.close()
    made.save()
    made.save()  # nothing new
    assert len(open_datastore(memory).segments) == 1
    assert list(check_datastore(memory, full=True))
    draft = propose(opened(drafter(memory=memory)), [41, 42, 43])
    assert (best(draft), draft.source[0]) == (44, STORE)
    assert best(propose(opened(made), [41, 42, 43])) == 44


def say_and_save(made, start):
    drafting = opened(made)
    propose(drafting, list(range(start, start + 10)))
    drafting.close()
    made.save()


def test_a_memory_forgets_its_oldest_part_when_it_is_full(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory, memory_tokens=40)
    for start in range(100, 200, 10):
        say_and_save(made, start)
        manifest = open_datastore(memory).manifest
        assert sum(entry.tokens for entry in manifest.segments) <= 40
    assert list(check_datastore(memory, full=True))
    fresh = drafter(memory=memory)
    assert best(propose(opened(fresh), [191, 192, 193])) == 194
    assert best(propose(opened(fresh), [101, 102, 103])) is None


def test_small_parts_of_a_memory_are_sorted_together(tmp_path):
    memory = str(tmp_path / "memory")
    made = drafter(memory=memory, memory_tokens=1600)
    for start in range(100, 200, 10):
        say_and_save(made, start)
    assert len(open_datastore(memory).segments) == 1
    assert best(propose(opened(drafter(memory=memory)), [101, 102, 103])) == 104


def test_a_memory_of_another_tokenizer_or_a_damaged_one_is_refused(tmp_path):
    memory = built(tmp_path / "memory", [[4, 5]], tokenizer_hash="b")
    with pytest.raises(StoreError, match="tokenizer"):
        make_drafter("auto", {"store": "none", "table": "none", "memory": str(memory)}, Resources(VOCABULARY, "a"))
    (memory / "datastore.json").write_text("{")
    with pytest.raises(StoreError, match=r"datastore\.json"):
        drafter(memory=str(memory))


def test_only_what_is_shared_can_be_saved(tmp_path):
    with pytest.raises(UsageError, match='give learn="shared", and a path or memory=PATH'):
        drafter().save(str(tmp_path / "memory"))
    with pytest.raises(UsageError, match='give learn="shared", and a path or memory=PATH'):
        drafter(learn="shared").save()


def test_a_draft_models_foresight_is_blended_in_and_followed(monkeypatch):
    """The model is asked at every step here; what it foresees is what it would write, and its cache keeps up."""
    monkeypatch.setattr(mixture, "Worth", asked(True))
    model = tiny_draft_model()
    chosen = {"store": "none", "table": "none", "model": "tiny", "learn": "off"}
    made = make_drafter("auto", chosen, Resources(TOY_IDS, draft_model=lambda _: model))
    alone = make_drafter(
        "draft_tree",
        {"levels": 4, "out_degree": 3, "model": "tiny"},
        Resources(TOY_IDS, draft_model=lambda _: model),
    )
    drafting, other, ids = opened(made, vocabulary=TOY_IDS), opened(alone, vocabulary=TOY_IDS), [1, 2, 3]
    for _ in range(6):
        draft, expected = propose(drafting, ids, 16, vocabulary=TOY_IDS), propose(other, ids, 16, vocabulary=TOY_IDS)
        assert set(draft.source.tolist()) == {FORESEEN}
        assert scored(draft).keys() >= {path for path, score in scored(expected).items() if score > 0.05}
        written = (*max(scored(expected), key=len), 5)
        for each in (drafting, other):
            each.observe(verdict(*written))
        ids += written


def test_a_draft_model_needs_a_target():
    with pytest.raises(UsageError, match=r"There is no model here that .* could draft for"):
        drafter(model=TOY_DRAFT)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learn": "all"}, "learn is 'all'; choose one of request, shared, off."),
        ({"longest": 0}, "longest is 0; it must be 1 to 64."),
        ({"shortest": 17}, "shortest is 17; it must be 1 to longest, which is 16."),
        ({"samples": 1 << 17}, "samples is 131072; it must be 1 to 65536."),
        ({"memory_tokens": 0}, "memory_tokens is 0; it must be at least 1."),
        ({"keep": 0.0}, "keep is 0.0; it must be above 0 and at most 1."),
        ({"feedback_weight": -1.0}, "feedback_weight is -1.0; it must be a number from 0 on."),
        ({"feedback_top_k": 0}, "feedback_top_k is 0; it must be 1 to 64."),
        ({"memory": "m", "learn": "request"}, "memory keeps what sequences share"),
        ({"model": TOY_DRAFT, "drafter": "eesd"}, "model and drafter both name what is to be blended in; give one"),
        ({"drafter": 7}, 'drafter is 7; give the name of a method to blend in, such as "medusa"'),
        ({"drafter": {"levels": 3}}, "drafter is {'levels': 3}; give the name of a method to blend in"),
        ({"drafter": "auto"}, "drafter is 'auto'; give the name of a method to blend in"),
        ({"drafter": "medsa"}, "There is no method 'medsa'. Did you mean 'medusa'?"),
        ({"drafter": {"method": "eesd", "level": 3}}, "Method 'eesd' has no option 'level'"),
        ({"drafter": "lookahead"}, "Method 'lookahead' learns from what the target says of its own drafts"),
        ({"drafter": "eesd"}, "no model is loaded here"),
        ({"drafter": {"method": "rest", "learn": "shared"}}, "Method 'rest' must be shown every step"),
    ],
)
def test_options_out_of_range_are_refused(options, sentence):
    with pytest.raises(UsageError) as caught:
        drafter(**options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_laws_hold_with_a_store(tmp_path, check):
    rng = np.random.default_rng(0)
    folder = built(tmp_path / "s", [rng.integers(0, TOY_IDS, 40).tolist() for _ in range(20)], vocabulary=TOY_IDS)
    check(lambda: make_drafter("auto", {"store": str(folder), "table": "none"}, Resources(TOY_IDS)))


def test_it_passes_the_drafters_checks_as_a_whole():
    check_drafter(lambda: make_drafter("auto", {"store": "none", "table": "none"}, Resources(TOY_IDS)))


# --- sources that fail


def raising(*_args):
    raise RuntimeError("disk on fire")


def step(drafting):
    propose(drafting, [1, 2, 3, 4, 1, 2])
    drafting.observe(verdict(3))


@pytest.mark.parametrize("fails", ["propose", "observe"])
def test_a_draft_model_that_fails_is_left_out(monkeypatch, fails):
    made = make_drafter(
        "auto", {"store": "none", "table": "none", "model": "tiny"},
        Resources(TOY_IDS, draft_model=lambda _name: tiny_draft_model()),
    )  # fmt: skip
    drafting = opened(made)
    monkeypatch.setattr(RolloutDrafting, fails, raising)
    with pytest.warns(ForedraftWarning, match="source 'auto, draft model' failed .*disk on fire.*it is the same text"):
        step(drafting)
    assert best(propose(drafting, [1, 2, 3, 4, 1, 2, 3])) == 4
    drafting.close()
