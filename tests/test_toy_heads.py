"""The heads that were trained for the toy: what they draft is worth their training, and they are its own."""

import functools

import pytest

import foredraft
from support.toys import TOY, TOY_DRAFT, TOY_HEADS

PROMPT = [{"role": "user", "content": "Tom has 4 apples and buys 7 more. How many apples does he have?"}]


@functools.cache
def generator():
    return foredraft.load(TOY, method="none", dtype="float32", compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.7, "seed": 2}], ids=["greedy", "T=0.7"])
@pytest.mark.parametrize(
    ("method", "options", "least"),
    [("eesd", {"out_degree": 1, "least_probability": 0.0}, 1.25), ("eesd", {}, 1.4), ("medusa", {}, 1.05)],
    ids=["eesd", "eesd tree", "medusa"],
)
def test_trained_heads_draft_for_their_model(method, options, least, settings):
    generator().use("none")
    expected = generator().generate(PROMPT, max_new_tokens=64, **settings)
    generator().use(method, {"head": TOY_HEADS[method], **options}, nodes=8)
    found = generator().generate(PROMPT, max_new_tokens=64, **settings)
    assert found.token_ids == expected.token_ids
    assert found.statistics.tokens_per_target_step > least


@pytest.mark.slow
def test_the_exit_layer_is_worth_its_training():
    generator().use("eesd", {"head": TOY_HEADS["eesd"]}, nodes=1)
    trained = generator().generate(PROMPT, max_new_tokens=64).statistics.draft_acceptance_rate
    generator().use("eesd", {"head": "none", "layers": 1}, nodes=1)
    assert trained > 1.5 * generator().generate(PROMPT, max_new_tokens=64).statistics.draft_acceptance_rate


def test_another_model_says_that_the_heads_are_not_its_own():
    with pytest.raises(foredraft.UsageError, match="trained for demo"):
        foredraft.load(TOY_DRAFT, method="eesd", speculative_config={"head": TOY_HEADS["eesd"]})
