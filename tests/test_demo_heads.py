"""The heads that come with the embedded model: loaded without a word, worth their place, small."""

import functools

import pytest

import foredraft
from foredraft.demo import embedded_heads

PROMPT = [{"role": "user", "content": "Tom has 4 apples and buys 7 more. How many apples does he have?"}]
MOST_BYTES = 40 * 2**20


@functools.cache
def generator():
    return foredraft.load("demo", method="none", dtype="float32")


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.7, "seed": 2}], ids=["greedy", "T=0.7"])
@pytest.mark.parametrize(
    ("method", "options", "least"),
    [("eesd", {}, 1.25), ("eesd", {"out_degree": 3}, 1.4), ("medusa", {}, 1.05)],
    ids=["eesd", "eesd tree", "medusa"],
)
def test_the_embedded_heads_draft_for_the_embedded_model(method, options, least, settings):
    generator().use("none")
    expected = generator().generate(PROMPT, max_new_tokens=64, **settings)
    generator().use(method, options, nodes=8)
    found = generator().generate(PROMPT, max_new_tokens=64, **settings)
    assert found.token_ids == expected.token_ids
    assert found.statistics.tokens_per_target_step > least


def test_the_exit_layer_is_worth_its_training():
    generator().use("eesd", {}, nodes=1)
    trained = generator().generate(PROMPT, max_new_tokens=64).statistics.draft_acceptance_rate
    generator().use("eesd", {"head": "none", "layers": 1}, nodes=1)
    assert trained > 1.5 * generator().generate(PROMPT, max_new_tokens=64).statistics.draft_acceptance_rate


def test_all_heads_together_stay_small():
    files = [file for folder in embedded_heads().values() for file in folder.rglob("*") if file.is_file()]
    assert {file.name for file in files} == {"head.json", "head.safetensors"}
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


def test_the_other_embedded_model_says_that_the_heads_are_not_its_own():
    with pytest.raises(foredraft.UsageError, match="trained for demo"):
        foredraft.load("demo-draft", method="eesd")
