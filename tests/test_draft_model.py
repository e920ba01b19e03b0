"""Draft models: the text of plain decoding; models that do not fit are refused; a failure does not end a text."""

import functools
import warnings

import numpy as np
import pytest
import torch

import foredraft
from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import ForedraftWarning, NumericsError, UsageError
from foredraft.graph.tree import depths
from foredraft.model.candidates import Imitation, candidates
from foredraft.model.loading import load_model, load_tokenizer
from foredraft.model.target import TorchTarget
from foredraft.pairing import pair_draft_model
from foredraft.sampling import SamplingOptions
from foredraft.sampling.noise import gumbel_noise
from support.toys import TOY, TOY_DRAFT

METHODS = ["draft_model", "draft_tree", "draft_graph"]
PROMPT = "Write a short story about a fox and a"
SETTINGS = {
    "greedy": {},
    "T=0.7 top_p=0.7": {"do_sample": True, "temperature": 0.7, "top_p": 0.7, "seed": 5},
    "T=1": {"do_sample": True, "seed": 6},
}


@functools.cache
def generator():
    return foredraft.load(TOY, method="none", dtype="float32")


@functools.cache
def draft():
    return TorchTarget(load_model(TOY_DRAFT, "float32", "cpu"))


@functools.cache
def plain(setting):
    generator().use("none")
    return generator().generate(PROMPT, max_new_tokens=24, **SETTINGS[setting]).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_plain_decoding(method, setting):
    generator().use(method, {"model": TOY_DRAFT}, nodes=12)
    result = generator().generate(PROMPT, max_new_tokens=24, **SETTINGS[setting])
    assert result.token_ids == plain(setting)
    assert result.statistics.tokens_per_target_step > 1.05


def drafting(method, options, **settings):
    drafter = make_drafter(method, {"model": "x", **options}, Resources(8192, draft_model=lambda _: draft()))
    return drafter.open(DraftContext(8192, seed=3, max_nodes=16, settings=settings))


def ids_of(text):
    return np.array(load_tokenizer(TOY)(text).input_ids, np.int64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [Budget(1, 8), Budget(16, 1), Budget(5, 3), Budget(0, 5), Budget(5, 0)])
def test_a_draft_stays_within_its_budget(method, budget):
    ids = ids_of(PROMPT)
    found = drafting(method, {}).propose(SequenceView(ids, len(ids)), budget)
    found.check()
    assert len(found) <= budget.nodes
    assert len(found) == 0 or int(depths(found.parents).max()) <= budget.depth
    assert (len(found) > 0) == (budget.nodes > 0 and budget.depth > 0)


def test_a_chain_is_a_chain_and_stops_behind_an_improbable_token():
    ids = ids_of(PROMPT)
    whole = drafting("draft_model", {"least_probability": 0.0}).propose(SequenceView(ids, len(ids)), Budget(16, 16))
    assert whole.parents.tolist() == list(range(-1, 9))
    each = whole.score / np.concatenate([[1.0], whole.score[:-1]])
    threshold = float(np.sort(each)[3])  # some token within the chain is below
    cut = drafting("draft_model", {"least_probability": threshold + 1e-4})
    found = cut.propose(SequenceView(ids, len(ids)), Budget(16, 16))
    assert len(found) == 1 + int(np.argmax(each < threshold + 1e-4))


@pytest.mark.slow
def test_a_drafter_asks_after_each_level_whether_to_go_on():
    ids, asked = ids_of(PROMPT), []

    def more(estimate):
        asked.append(estimate)
        return len(asked) < 3

    found = drafting("draft_model", {"least_probability": 0.0}).propose(
        SequenceView(ids, len(ids)), Budget(16, 16, more=more)
    )
    assert len(found) == len(asked) == 3
    assert np.allclose(asked, found.score)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_chain_takes_one_pass_a_token(nodes, monkeypatch):
    ids, passes, forward = ids_of(PROMPT), [], TorchTarget.forward
    chain = drafting("draft_model", {"least_probability": 0.0})
    monkeypatch.setattr(
        TorchTarget, "forward", lambda *given, **options: passes.append(1) or forward(*given, **options)
    )
    assert len(chain.propose(SequenceView(ids, len(ids)), Budget(nodes, 8))) == nodes
    assert len(passes) == nodes


def test_candidates_share_the_targets_noise():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(2, 50)).astype(np.float32)) * 2
    imitation = Imitation(SamplingOptions(do_sample=True, temperature=0.7, seed=9))
    tokens, probabilities = candidates(logits, 4, imitation, np.array([11, 12]))
    for row, position in enumerate((11, 12)):
        perturbed = logits[row].double().numpy() / 0.7 + gumbel_noise(9, position, np.arange(50))
        among = np.argsort(-logits[row].numpy())[:32]
        assert tokens[row].tolist() == among[np.argsort(-perturbed[among])][:4].tolist()
    assert (np.diff(probabilities, axis=1) <= 0).all()
    assert (probabilities.sum(axis=1) <= 1 + 1e-6).all()


def test_candidates_outside_the_targets_vocabulary_are_left_out():
    logits = torch.zeros(1, 20)
    logits[0, 15] = 5.0
    tokens, _ = candidates(logits, 3, Imitation(vocabulary=10), np.array([0]))
    assert tokens.max() < 10


def test_scores_that_are_not_numbers_are_named():
    with pytest.raises(NumericsError, match="draft model's scores are NaN"):
        candidates(torch.full((1, 9), float("nan")), 2, Imitation(), np.array([0]))


@pytest.mark.slow
def test_a_draft_model_that_breaks_is_reported_once_and_costs_no_text():
    broken = TorchTarget(load_model(TOY_DRAFT, "float32", "cpu"))
    with torch.no_grad():
        broken.model.get_output_embeddings().weight[:] = float("nan")
    drafter = make_drafter("draft_tree", {"model": "x"}, Resources(8192, draft_model=lambda _: broken))
    generator().attach("draft_tree", drafter, nodes=8)
    with pytest.warns(ForedraftWarning, match=r"draft_tree failed .*NaN.* without drafts") as told:
        result = generator().generate(PROMPT, max_new_tokens=16)
    assert len(told) == 1
    assert result.token_ids == plain("greedy")[:16]


def test_without_a_draft_model_the_method_says_what_it_needs():
    with pytest.raises(UsageError, match="needs a draft model"):
        make_drafter("draft_model", {}, Resources(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 0}, "levels is 0"),
        ({"out_degree": 33}, "out_degree is 33"),
        ({"least_probability": 1.5}, "least_probability is 1.5"),
        ({"least_share": -0.1}, "least_share is -0.1"),
        ({"tau": 0}, "tau is 0"),
        ({"taus": 2}, "Did you mean 'tau'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_drafter("draft_graph", {"model": "x", **options}, Resources(100, draft_model=lambda _: draft()))


class OtherWords:
    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def get_vocab(self):
        return self._vocabulary


def test_a_draft_model_with_another_vocabulary_is_refused():
    ours = load_tokenizer(TOY)
    theirs = dict(ours.get_vocab())
    a, b = list(theirs)[100:102]
    theirs[a], theirs[b] = theirs[b], theirs[a]
    with pytest.raises(UsageError, match=r"another tokenizer than the target \(2 ids differ"):
        pair_draft_model((draft().model, OtherWords(theirs)), generator().target, ours)


def test_a_vocabulary_that_only_has_more_ids_is_taken():
    ours = load_tokenizer(TOY)
    theirs = {**ours.get_vocab(), "<|padding|>": 9000}
    assert pair_draft_model((draft().model, OtherWords(theirs)), generator().target, ours).vocabulary == 8192


def test_spaces_of_a_sentencepiece_vocabulary_may_be_written_as_in_gguf():
    """Of Gemma, transformers has U+2581 in tokens of several spaces, and llama.cpp's conversions the spaces."""
    ours = {"\u2581" * count: count for count in range(1, 5)}
    theirs = {text if number < 2 else " " * number: number for text, number in ours.items()}
    model, target = draft().model, generator().target
    for one, other in ((ours, theirs), (theirs, ours)):
        assert pair_draft_model((model, OtherWords(other)), target, OtherWords(one)).vocabulary == 8192


def test_a_pair_the_wrong_way_round_is_refused():
    with pytest.raises(UsageError, match=r"The pair is .* the model first"):
        pair_draft_model((generator().tokenizer, draft().model), generator().target, generator().tokenizer)


def test_a_draft_model_larger_than_the_target_is_warned_of():
    ours = load_tokenizer(TOY)
    with pytest.warns(ForedraftWarning, match="drafting probably costs more than it saves"):
        pair_draft_model((generator().target.model, ours), draft(), ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair_draft_model((draft().model, ours), generator().target, ours)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match="a name, a folder, or a pair"):
        pair_draft_model(3, generator().target, load_tokenizer(TOY))
