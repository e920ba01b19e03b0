"""Drafting for a server's batch: drafts equal those for single sequences, requests are recognised by content."""

import numpy as np
import pytest

import naive.graph
from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Needs, SequenceView, Verdict
from foredraft.corpus.words import tokenizer_hash
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import ForedraftWarning
from foredraft.graph.tree import best_chain, chain_parents
from foredraft.index.datastore import open_datastore, write_datastore
from foredraft.integrations.request_drafter import PATIENCE, RequestDrafter
from foredraft.testing import VOCABULARY
from support import tokenizers
from support.scripted import OracleDrafter
from support.toys import build_trigram_table, text_documents

MOST, LONGEST, NODES = 6, 400, 16


def text(seed, length, vocabulary=VOCABULARY):
    """Return repetitive tokens, as in texts."""
    drawn = np.random.default_rng(seed)
    ids = list(drawn.integers(0, vocabulary, 6))
    while len(ids) < length:
        start = int(drawn.integers(0, len(ids)))
        ids += ids[start : start + int(drawn.integers(1, 6))] if drawn.random() < 0.7 else [drawn.integers(vocabulary)]
    return np.array(ids[:length], np.int32)


class Server:
    """A batch whose rows grow by the tokens of their texts."""

    def __init__(self, texts, rows=None):
        self.texts = texts
        self.token_ids = np.zeros((len(texts) if rows is None else rows, LONGEST), np.int32)
        self.lengths = np.zeros(len(self.token_ids), np.int32)

    def show(self, lengths, order=None):
        """Write the first tokens of each text to the rows, and return one sampled token for each row."""
        order = range(len(self.texts)) if order is None else order
        self.token_ids[:] = 0
        for row, (number, length) in enumerate(zip(order, lengths, strict=True)):
            self.token_ids[row, :length] = self.texts[number][:length]
            self.lengths[row] = length
        return [[1] for _ in lengths]


METHODS = {
    "adaptix": ("adaptix", {"table": "none", "feedback": "off"}),
    "rest": ("rest", {"store": "STORE", "samples": 32}),
    "rest without a store": ("rest", {"store": "none"}),
    "rest, store only": ("rest", {"store": "STORE", "learn": "off"}),
    "auto": ("auto", {"store": "STORE", "table": "none", "learn": "request"}),
    "auto without a store": ("auto", {"store": "none", "table": "none", "learn": "request"}),
    "auto, store only": ("auto", {"store": "STORE", "table": "none", "learn": "off"}),
    "prompt_lookup": ("prompt_lookup", {"prompt_lookup_max": 3}),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "a.store"
    with write_datastore(folder, tokenizer_hash="", vocabulary=VOCABULARY, create=True) as writer:
        for seed in (50, 51):
            writer.add([np.append(text(seed, 600), VOCABULARY).astype(np.uint16)])  # a separator ends it
        writer.commit()
    assert len(open_datastore(folder).segments) == 2
    return str(folder)


@pytest.fixture(params=METHODS)
def make(request, store):
    method, options = METHODS[request.param]
    options = {key: store if value == "STORE" else value for key, value in options.items()}
    return lambda: make_drafter(method, options, Resources(VOCABULARY))


def drafts_alone(drafter, ids, lengths, vocabulary=VOCABULARY):
    """Return the best chains of the drafter's own drafts for one text that grows to each of `lengths`."""
    drafting, chains, known, last = drafter.open(DraftContext(vocabulary)), [], 0, EMPTY_DRAFT
    for length in lengths:
        view = ids[:length].astype(np.int64)
        view.flags.writeable = False  # as drafters are given it, for which their kernels are compiled
        if known:
            drafting.observe(Verdict(tuple(view[known:].tolist()), (), last, known - 1))
        depth = min(MOST, LONGEST - length - 1)
        last = drafting.propose(SequenceView(view, lengths[0]), Budget(max(NODES, depth), depth))
        score = np.ones(len(last), np.float32) if last.score is None else last.score
        kept = best_chain(last.parents, score, depth)
        last = Draft(last.tokens[kept], chain_parents(len(kept)), score[kept])
        chains.append(last.tokens.tolist())
        known = length
    return chains


def growing(seed, steps, start):
    return (start + np.cumsum(np.random.default_rng(seed).integers(1, 6, steps))).tolist()


@pytest.mark.kernels
def test_a_batch_drafts_what_each_text_is_drafted_alone(make):
    texts = [text(seed, 300) for seed in range(5)]
    lengths = [growing(seed, 30, 20 * seed + 1) for seed in range(5)]
    expected = [drafts_alone(make(), ids, sizes) for ids, sizes in zip(texts, lengths, strict=True)]
    server = Server(texts)
    requests = RequestDrafter(make(), vocabulary=VOCABULARY, most=MOST, rows=5, longest=LONGEST)
    for step in range(30):
        sampled = server.show([sizes[step] for sizes in lengths])
        drafts = requests.propose(sampled, server.lengths, server.token_ids)
        assert drafts == [chains[step] for chains in expected]
    assert sum(len(chain) for chains in expected for chain in chains) > 50


@pytest.mark.parametrize("method", ["rest", "auto"])
def test_segments_with_longer_places_are_searched_too(store, method, monkeypatch):
    """Segments of over two billion tokens store int64 places."""

    def made():
        drafter = make_drafter(method, {"store": store, "learn": "off"}, Resources(VOCABULARY))
        first, second = drafter.library.segments()
        longer = second._replace(suffixes=second.suffixes.astype(np.int64))
        monkeypatch.setattr(drafter.library, "segments", lambda: [first, longer])
        return drafter

    ids, lengths = text(51, 200), growing(1, 20, 20)
    expected = drafts_alone(make_drafter(method, {"store": store, "learn": "off"}, Resources(VOCABULARY)), ids, lengths)
    assert drafts_alone(made(), ids, lengths) == expected
    server = Server([ids])
    requests = RequestDrafter(made(), vocabulary=VOCABULARY, most=MOST, rows=1, longest=LONGEST)
    for length, chain in zip(lengths, expected, strict=True):
        assert requests.propose(server.show([length]), server.lengths, server.token_ids) == [chain]
    assert sum(map(len, expected)) > 30


def test_a_batch_drafts_from_the_table(tmp_path):
    texts = [text(seed, 200, tokenizers.VOCABULARY) for seed in range(3)]
    path, tokenizer = tmp_path / "a.trigrams", tokenizers.word_tokenizer()
    documents = text_documents([tokenizers.words(ids.tolist()) for ids in texts])
    build_trigram_table(documents, tokenizer, tokenizers.VOCABULARY, path)
    resources = Resources(tokenizers.VOCABULARY, tokenizer_hash(tokenizer))
    drafter = make_drafter("adaptix", {"table": str(path), "learn": "off"}, resources)
    server = Server(texts)
    requests = RequestDrafter(drafter, vocabulary=tokenizers.VOCABULARY, most=MOST, rows=3, longest=LONGEST)
    for length in (1, 2, 30, 150):
        drafts = requests.propose(server.show([length] * 3), server.lengths, server.token_ids)
        alone = [drafts_alone(drafter, ids, [length], vocabulary=tokenizers.VOCABULARY)[0] for ids in texts]
        assert drafts == alone
        assert any(drafts)


def test_requests_are_found_again_in_other_rows_and_after_a_pause(make):
    texts = [text(seed, 300) for seed in range(4)]
    sizes = [growing(seed, 12, 60) for seed in range(4)]
    server, orders = Server(texts), [[0, 1, 2, 3], [3, 1, 0, 2], [2], [1, 2], [0, 3, 1, 2]]
    requests = RequestDrafter(make(), vocabulary=VOCABULARY, most=MOST, rows=4, longest=LONGEST)
    steps, drafted = [0] * 4, [[] for _ in texts]
    for order in orders:
        sampled = server.show([sizes[number][steps[number]] for number in order], order)
        for number, draft in zip(order, requests.propose(sampled, server.lengths, server.token_ids), strict=True):
            drafted[number].append(draft)
            steps[number] += 1
    for number, ids in enumerate(texts):
        assert drafted[number] == drafts_alone(make(), ids, sizes[number][: steps[number]])


def test_rows_without_a_new_token_are_left_alone(make):
    server = Server([text(1, 200), text(2, 200)])
    requests = RequestDrafter(make(), vocabulary=VOCABULARY, most=MOST, rows=2, longest=LONGEST)
    server.show([150, 150])
    drafts = requests.propose([[], [7]], server.lengths, server.token_ids)
    assert drafts[0] == []
    assert drafts[1] == drafts_alone(make(), text(2, 200), [150])[0]
    assert requests.propose([], server.lengths, server.token_ids) == []


def test_a_text_that_fills_the_window_gets_no_draft_and_one_close_to_it_a_short_one():
    drafter = make_drafter("prompt_lookup", {}, Resources(VOCABULARY))
    same = np.full(LONGEST, 3, np.int32)
    server = Server([same, same, same])
    requests = RequestDrafter(drafter, vocabulary=VOCABULARY, most=MOST, rows=3, longest=LONGEST)
    sampled = server.show([LONGEST, LONGEST - 3, LONGEST - 1])
    assert [len(draft) for draft in requests.propose(sampled, server.lengths, server.token_ids)] == [0, 2, 0]


def test_two_processes_draft_the_same(make):
    server = Server([text(seed, 300) for seed in range(3)])
    ranks = [RequestDrafter(make(), vocabulary=VOCABULARY, most=MOST, rows=3, longest=LONGEST) for _ in range(2)]
    for step in range(40):
        sampled = server.show([30 + 2 * step, 40 + step, 50 + 3 * step])
        first, second = (rank.propose(sampled, server.lengths, server.token_ids) for rank in ranks)
        assert first == second


@pytest.mark.parametrize("length", [40_000])
@pytest.mark.parametrize("method", ["adaptix", "rest"])
def test_a_long_prompt_is_read_whole(method, length):
    options = {"adaptix": {"table": "none", "feedback": "off"}, "rest": {"store": "none"}}[method]
    ids = text(4, length, 1000)
    token_ids = np.zeros((1, length + 100), np.int32)
    token_ids[0, :length] = ids
    drafters = [make_drafter(method, options, Resources(1000)) for _ in range(2)]
    requests = RequestDrafter(drafters[0], vocabulary=1000, most=MOST, rows=1, longest=length + 100)
    draft = requests.propose([[1]], np.array([length]), token_ids)[0]
    drafting = drafters[1].open(DraftContext(1000))
    tree = drafting.propose(SequenceView(ids.astype(np.int64), length), Budget(NODES, MOST))
    assert draft == tree.tokens[best_chain(tree.parents, tree.score, MOST)].tolist()
    assert len(draft) > 0


class FaultyDrafter:
    """Raise for texts that begin with 9."""

    name, needs, source_names = "faulty", Needs(), ("faulty",)

    def open(self, context):
        return self

    def propose(self, view, budget):
        if view.ids[0] == 9:
            raise RuntimeError("no idea")
        return Draft(np.array([5], np.int32), np.array([-1], np.int32))

    def observe(self, verdict):
        pass

    def close(self):
        pass


def test_a_drafter_that_raises_drafts_nothing_for_that_request_and_is_named_once():
    server = Server([np.array([9, 1, 2, 3, 4], np.int32), np.array([8, 1, 2, 3, 4], np.int32)])
    requests = RequestDrafter(FaultyDrafter(), vocabulary=VOCABULARY, most=MOST, rows=2, longest=LONGEST)
    with pytest.warns(ForedraftWarning, match="faulty failed .RuntimeError: no idea") as seen:
        drafts = [requests.propose(server.show([n, n]), server.lengths, server.token_ids) for n in (3, 4, 5)]
    assert drafts == [[[], [5]]] * 3
    assert len(seen) == 1


def test_any_drafter_drafts_for_a_server():
    target = text(3, 300)
    oracle = OracleDrafter(lambda ids: target[len(ids) :].tolist())
    requests = RequestDrafter(oracle, vocabulary=VOCABULARY, most=MOST, rows=1, longest=LONGEST)
    server = Server([target])
    assert requests.propose(server.show([50]), server.lengths, server.token_ids) == [target[50:56].tolist()]


# --- matching rows and requests


class Noting:
    """A drafter that records the texts and the closing of each drafting, by its number."""

    name, needs, source_names = "noting", Needs(), ("noting",)

    def __init__(self, rows):
        self.texts, self.closed = [], []
        self.requests = RequestDrafter(self, vocabulary=VOCABULARY, most=MOST, rows=rows, longest=LONGEST)

    def open(self, context):
        self.texts.append([])
        return NotingOne(self, len(self.texts) - 1)

    def step(self, *rows):
        """Take a step of a batch with these rows; None stands for one without a new token."""
        server = Server([np.array(row or [0], np.int32) for row in rows])
        server.show([len(row or [0]) for row in rows])
        self.requests.propose([[1] if row else [] for row in rows], server.lengths, server.token_ids)


class NotingOne:
    def __init__(self, drafter, number):
        self.drafter, self.number = drafter, number

    def propose(self, view, budget):
        self.drafter.texts[self.number].append(view.ids.tolist())
        return EMPTY_DRAFT

    def observe(self, verdict):
        assert len(self.drafter.texts[self.number][-1]) == verdict.at + 1  # it begins at the last text's end

    def close(self):
        self.drafter.closed.append(self.number)


def test_a_request_keeps_its_drafting_and_a_new_one_gets_its_own():
    drafter = Noting(3)
    drafter.step([1, 2, 3], [4, 5])
    drafter.step([4, 5, 6], [1, 2, 3, 7], [1, 2, 9])
    assert drafter.texts == [[[1, 2, 3], [1, 2, 3, 7]], [[4, 5], [4, 5, 6]], [[1, 2, 9]]]
    assert drafter.closed == []


def test_the_longest_text_that_fits_is_gone_on_with():
    drafter = Noting(2)
    drafter.step([1, 2], [1, 2, 3, 4])
    drafter.step(None, None)
    drafter.step([1, 2, 3, 4, 5], None)
    assert drafter.texts[0] == [[1, 2], [1, 2, 3, 4, 5]]  # the row's own request, which fits too, is preferred
    drafter = Noting(3)
    drafter.step(None, [1, 2], [1, 2, 3, 4])
    drafter.step([1, 2, 3, 4, 5], None, None)
    assert drafter.texts == [[[1, 2]], [[1, 2, 3, 4], [1, 2, 3, 4, 5]]]


def test_equal_texts_have_draftings_of_their_own():
    drafter = Noting(2)
    drafter.step([1, 2], [1, 2])
    drafter.step([1, 2, 3], [1, 2, 4])
    assert drafter.texts == [[[1, 2], [1, 2, 3]], [[1, 2], [1, 2, 4]]]


def test_requests_that_nobody_goes_on_with_are_closed_in_time():
    drafter = Noting(2)
    drafter.step([1, 2, 3])
    for length in range(1, PATIENCE + 3):
        assert drafter.closed == ([] if length <= PATIENCE + 1 else [0])
        drafter.step([5] * length)
    assert drafter.closed == [0]


def test_where_there_is_no_room_the_request_not_seen_for_longest_goes():
    drafter = Noting(1)
    drafter.step([1, 2, 3])
    drafter.step([4, 5])
    drafter.step([6, 7])
    assert drafter.closed == [0]
    drafter.step([4, 5, 8])
    assert drafter.texts[1] == [[4, 5], [4, 5, 8]]


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
def test_the_best_chain_is_that_of_all_paths(seed):
    drawn = np.random.default_rng(seed)
    count = int(drawn.integers(0, 12))
    parents = np.array([drawn.integers(-1, node) for node in range(count)], np.int32)
    score = np.empty(count, np.float32)
    for node in range(count):
        above = 1.0 if parents[node] < 0 else score[parents[node]]
        score[node] = above * np.float32(drawn.integers(1, 5) / 4)
    for longest in (12, 2, 3):
        expected = naive.graph.best_chain(parents, score, longest)
        assert best_chain(parents, score, longest).tolist() == expected.tolist()
