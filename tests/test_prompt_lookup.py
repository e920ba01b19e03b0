"""Prompt lookup drafts what transformers' generator drafts, within its budget."""

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.drafters.prompt_lookup import earlier_match
from foredraft.errors import UsageError

pytestmark = pytest.mark.kernels


def scanned(ids, shortest, longest):
    """Compares every window of every length; one at the sequence's end has nothing to copy."""
    ids = list(ids)
    for size in range(longest, shortest - 1, -1):
        ends = [end for end in range(size, len(ids)) if ids[end - size : end] == ids[-size:]]
        if ends:
            return ends[0]
    return -1


def drafted(ids, nodes=64, depth=64, **options):
    drafting = make_drafter("prompt_lookup", options, Resources(vocabulary=100)).open(DraftContext(100))
    draft = drafting.propose(SequenceView(np.array(ids, np.int64), len(ids)), Budget(nodes, depth))
    draft.check()
    assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
    return draft.tokens.tolist()


def transformers_candidates(ids, count, longest):
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=count, max_matching_ngram_size=longest, max_length=10_000
    )
    candidates, _ = generator.get_candidates(torch.tensor([ids]))
    return candidates[0, len(ids) :].tolist()


def random_texts(seed, count):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, rng.integers(1, 7), rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_drafts_are_those_of_transformers(longest, count):
    found = 0
    for ids in random_texts(longest, 60):
        expected = transformers_candidates(ids, count, longest)
        assert drafted(ids, prompt_lookup_num_tokens=count, prompt_lookup_max=longest) == expected, ids
        found += bool(expected)
    assert found > 20


def test_the_defaults_are_those_of_transformers():
    for ids in random_texts(9, 60):
        candidates, _ = PromptLookupCandidateGenerator(max_length=10_000).get_candidates(torch.tensor([ids]))
        assert drafted(ids) == candidates[0, len(ids) :].tolist()


def test_matches_are_those_of_the_twin():
    for ids in random_texts(3, 100):
        for shortest, longest in ((1, 1), (1, 3), (2, 4), (3, 3), (1, 60)):
            expected = scanned(ids, shortest, longest)
            assert earlier_match(np.array(ids, np.int64), shortest, longest) == expected, (ids, shortest, longest)


def test_the_longest_match_wins_and_of_several_the_first():
    assert drafted([1, 2, 9, 3, 2, 8, 3, 2], prompt_lookup_max=2, prompt_lookup_num_tokens=2) == [8, 3]
    assert drafted([1, 2, 9, 3, 2, 8, 3, 2], prompt_lookup_max=1, prompt_lookup_num_tokens=2) == [9, 3]


def test_a_draft_stops_at_the_budget_and_at_the_sequences_end():
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    assert drafted(ids) == [3, 4, 5, 6, 1, 2]
    assert drafted(ids, nodes=2) == drafted(ids, depth=2) == [3, 4]
    assert drafted(ids, nodes=0) == drafted(ids, depth=0) == []


def test_short_and_unrepeating_sequences_give_no_draft():
    assert drafted([1]) == drafted([1, 2]) == drafted([1, 2, 3, 4]) == []


def test_a_match_shorter_than_asked_for_does_not_count():
    ids = [7, 2, 5, 6, 2]
    assert drafted(ids, prompt_lookup_min=1, prompt_lookup_max=3) == [5, 6, 2]
    assert drafted(ids, prompt_lookup_min=2, prompt_lookup_max=3) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0; it must be at least 1"),
        ({"prompt_lookup_min": 0}, "1 <= min <= max"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4 and prompt_lookup_max is 3"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0; it must be 1 to 64"),
        ({"prompt_lookup_max": 65}, "prompt_lookup_max is 65; it must be 1 to 64"),
        ({"prompt_lookup_mx": 3}, "Did you mean 'prompt_lookup_max'"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        make_drafter("prompt_lookup", options, Resources(vocabulary=100))
