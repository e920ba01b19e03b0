"""Options and generation arguments from loose mappings: what is taken as it is meant, and what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from foredraft.drafters.adaptix import AdaptixOptions
from foredraft.errors import UsageError
from foredraft.options import options_from
from foredraft.request import GenerationOptions


@dataclass(frozen=True, slots=True)
class Sample:
    """One field of each kind."""

    needed: str
    count: int = 1
    share: float = 0.5
    limit: float | None = None
    on: bool = False
    side: Literal["left", "right"] = "left"
    anything: Any = None


def sample(**given):
    return options_from(Sample, {"needed": "x", **given}, "Method 'sample'")


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("count", np.int32(3), 3),
        ("share", 2, 2.0),
        ("share", np.float32(0.25), 0.25),
        ("share", float("inf"), float("inf")),
        ("limit", None, None),
        ("limit", 1, 1.0),
        ("on", True, True),
        ("side", "right", "right"),
        ("needed", Path("folder"), "folder"),
        ("anything", [1], [1]),
    ],
)
def test_values_of_a_fields_type_are_taken(name, value, taken):
    found = getattr(sample(**{name: value}), name)
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("count", "4", "count of method 'sample' is '4'; it must be a whole number."),
        ("count", True, "count of method 'sample' is True; it must be a whole number."),
        ("count", 4.0, "it must be a whole number"),
        ("count", None, "count of method 'sample' is None"),
        ("count", [4], "it must be a whole number"),
        ("share", "0.5", "it must be a number."),
        ("share", False, "it must be a number."),
        ("share", float("nan"), "share of method 'sample' is nan; it must be a number that float64 can hold"),
        ("share", 10**400, "float64 can hold"),
        ("limit", {}, "it must be a number, or None."),
        ("on", 1, "it must be True or False"),
        ("on", "yes", "it must be True or False"),
        ("needed", b"x", "it must be a text"),
        ("side", 3, "it must be one of left, right"),
        ("side", ["left"], "it must be one of left, right"),
        ("side", "up", "side of method 'sample' is 'up'; it must be one of left, right."),
    ],
)
def test_values_of_another_type_are_refused_in_a_sentence(name, value, says):
    with pytest.raises(UsageError) as caught:
        sample(**{name: value})
    assert says in str(caught.value)


def test_missing_and_unnameable_options_are_refused():
    with pytest.raises(UsageError, match="needs the option 'needed'"):
        options_from(Sample, {}, "Method 'sample'")
    with pytest.raises(UsageError, match="has no option 5"):
        options_from(Sample, {5: 1}, "Method 'sample'")
    with pytest.raises(UsageError, match="options of method 'sample' are 5; give a mapping"):
        options_from(Sample, 5, "Method 'sample'")


def test_a_long_value_is_shortened():
    with pytest.raises(UsageError) as caught:
        sample(count="4" * 1000)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("name", "value"), [("depth", "4"), ("increment", "0.5"), ("search", None), ("share", 1)])
def test_a_drafters_options_are_checked(name, value):
    with pytest.raises(UsageError, match=f"{name} of method 'adaptix' is"):
        options_from(AdaptixOptions, {name: value}, "Method 'adaptix'")


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 1},
        {"num_return_sequences": np.int64(1)},
        {"generation_config": None},
        {"repetition_penalty": None},
        {"stop_strings": None},
        {"logits_processor": None},
        {"eos_token_id": None},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_that_ask_for_nothing_are_dropped(given):
    assert GenerationOptions.parse(given) == GenerationOptions()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": True}, "beam search"),
        ({"generation_config": {}}, "pass its values"),
        ({"max_new_tokens": True}, "max_new_tokens of generate is True; it must be a whole number"),
        ({"max_new_tokens": "5"}, "whole number"),
        ({"temperature": "hot"}, "temperature of generate is 'hot'"),
        ({"temperature": float("nan")}, "temperature of generate is nan"),
        ({"do_sample": "no"}, "True or False"),
        ({"seed": 1.5}, "seed of generate is 1.5"),
        ({"stop_strings": 5}, "stop_strings is 5; it must be a text or a list of texts"),
        ({"stop_strings": ["a", 5]}, "list of texts"),
        ({"stop_strings": b"a"}, "list of texts"),
        ({"logits_processor": lambda ids, scores: scores}, "put it in a list"),
        ({"logits_processor": [3]}, "list of callables"),
        ({"logits_processor": 3}, "list of callables"),
        ({"eos_token_id": "</s>"}, "eos_token_id holds '</s>'"),
        ({"eos_token_id": True}, "eos_token_id holds True"),
        ({"eos_token_id": [1, 2.0]}, "eos_token_id holds 2.0"),
        ({"eos_token_id": [[1, 2]]}, "flat list of token ids"),
        ({"eos_token_id": torch.tensor([[1]])}, "flat list of token ids"),
        ({"eos_token_id": {}}, "flat list of token ids"),
    ],
)
def test_arguments_of_another_type_are_refused(given, says):
    with pytest.raises(UsageError, match=says):
        GenerationOptions.parse(given)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (7, (7,)),
        (np.int32(7), (7,)),
        (torch.tensor(7), (7,)),
        (torch.tensor([7, 8]), (7, 8)),
        (np.array([7, 8]), (7, 8)),
        ([7, np.int64(8), torch.tensor(9), torch.tensor([5])], (7, 8, 9, 5)),
        ((), ()),
        (None, (0,)),
    ],
)
def test_end_ids_become_ints(given, ids):
    found = GenerationOptions.parse({"eos_token_id": given}).eos((0,), 10)
    assert found == ids
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize("token", [-1, 10])
def test_end_ids_that_the_model_does_not_have_are_refused(token):
    with pytest.raises(UsageError, match=f"eos_token_id holds {token}; the model has ids 0 to 9"):
        GenerationOptions.parse({"eos_token_id": [3, token]}).eos((0,), 10)


def test_numbers_of_numpy_and_lists_of_processors_are_taken():
    options = GenerationOptions.parse({"max_new_tokens": np.int64(5), "stop_strings": ["a"], "top_k": np.int8(3)})
    assert (options.max_new_tokens, options.stop_strings, options.top_k) == (5, ("a",), 3)
    assert type(options.max_new_tokens) is int
    processors = LogitsProcessorList([TopKLogitsWarper(3)])
    assert GenerationOptions.parse({"logits_processor": processors}).logits_processor == tuple(processors)
