"""foredraft inside transformers' `generate`: the same ids, the same classes, and every option supported or rejected."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import foredraft
from foredraft import UsageError
from foredraft.integrations.transformers import (
    ATTRIBUTE,
    MOST_GENERATORS,
    generators_of,
    last_statistics,
    split_filters,
)
from support import llamas
from support.tokenizers import split_at_spaces
from support.toys import TOY, TOY_DRAFT

VOCABULARY = 64
OURS = {"custom_generate": foredraft.generate, "speculative_config": {"table": "none", "num_speculative_tokens": 8}}
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]])


def tiny_llama():
    model = llamas.tiny_llama(VOCABULARY)
    model.generation_config.pad_token_id = 2
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def padded(rows, side="left", pad=2):
    """Return rows of several lengths as a batch: ids and mask."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def random_rows(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            3, VOCABULARY, (int(torch.randint(1, 20, (1,), generator=generator)),), generator=generator
        ).tolist()
        for _ in range(count)
    ]


class AllowEven(LogitsProcessor):
    """Forbid odd tokens, except after a multiple of five."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[input_ids[:, -1] % 5 != 0, 1::2] = -torch.inf
        return scores


class AfterMultiple(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 20)


class Counting(StoppingCriteria):
    """End a row after as many odd tokens as its own number, counted in the criterion."""

    def __init__(self):
        self.seen = None

    def __call__(self, input_ids, scores, **_):
        self.seen = torch.zeros(len(input_ids)) if self.seen is None else self.seen
        self.seen = self.seen + input_ids[:, -1] % 2
        return self.seen > torch.arange(len(input_ids))


SETTINGS = [
    {},
    {"eos_token_id": None, "pad_token_id": 2},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 12},
    {"logits_processor": [AllowEven()]},
    {"stopping_criteria": [AfterMultiple()]},
    {"return_dict_in_generate": True},
    {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.2},
    {"suppress_tokens": [7, 9], "exponential_decay_length_penalty": (5, 1.2)},
]
CALLS = list(itertools.product(range(5), SETTINGS))


@pytest.mark.parametrize(("seed", "settings"), CALLS, ids=range(len(CALLS)))
def test_a_call_gives_the_ids_and_the_class_that_it_gives_without_us(model, seed, settings):
    given = padded(random_rows(seed, 1 + seed % 3)) | {"max_new_tokens": 24} | settings
    for name, kind in (("logits_processor", LogitsProcessorList), ("stopping_criteria", StoppingCriteriaList)):
        if name in given:
            given[name] = kind(given[name])
    expected, result = model.generate(**given), model.generate(**given, **OURS)
    assert type(result) is type(expected)
    if isinstance(expected, GenerateDecoderOnlyOutput):
        assert (result.scores is None) == (expected.scores is None)
        expected, result = expected.sequences, result.sequences
    assert result.dtype == expected.dtype
    assert result.tolist() == expected.tolist()


def test_scores_and_logits_are_those_of_transformers(model):
    given = {"input_ids": PROMPT, "max_new_tokens": 10, "repetition_penalty": 1.2, "eos_token_id": None}
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, result = model.generate(**given, **wanted), model.generate(**given, **wanted, **OURS)
    for ours, theirs in ((result.scores, expected.scores), (result.logits, expected.logits)):
        assert isinstance(ours, tuple)
        assert len(ours) == len(theirs) == 10
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    ours = model.compute_transition_scores(result.sequences, result.scores)
    torch.testing.assert_close(ours, model.compute_transition_scores(expected.sequences, expected.scores))


def test_scores_of_a_sampled_batch_are_filtered_and_end_with_their_row(model):
    torch.manual_seed(3)
    result = model.generate(
        **padded(random_rows(1, 3)), do_sample=True, top_k=5, max_new_tokens=20, return_dict_in_generate=True,
        output_scores=True, **OURS,
    )  # fmt: skip
    new = result.sequences.shape[1] - padded(random_rows(1, 3))["input_ids"].shape[1]
    assert len(result.scores) == new
    assert result.scores[0].shape == (3, VOCABULARY)
    assert torch.isfinite(result.scores[0]).sum(dim=1).tolist() == [5, 5, 5]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_written_as_it_is_alone(model, side):
    rows = random_rows(7, 4)
    batch = padded(rows, side)
    texts = model.generate(**batch, max_new_tokens=16, **OURS)[:, batch["input_ids"].shape[1] :]
    for row, text in zip(rows, texts.tolist(), strict=True):
        alone = model.generate(torch.tensor([row]), max_new_tokens=16)[0, len(row) :].tolist()
        assert text[: len(alone)] == alone
        assert set(text[len(alone) :]) <= {2}


def test_every_row_sees_its_own_prefix_with_processors_that_count_rows(model):
    rows = padded(random_rows(9, 3))
    allowed = {0: [10, 11, 12], 1: [20, 21], 2: list(range(VOCABULARY))}
    given = rows | {"max_new_tokens": 8, "prefix_allowed_tokens_fn": lambda row, _: allowed[row]}
    assert model.generate(**given, **OURS).tolist() == model.generate(**given).tolist()


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "max_new_tokens": 30}


@pytest.mark.slow
def test_torchs_seed_decides_a_sampled_text_whatever_drafts_it(model):
    texts = []
    for config in ({"method": "none"}, {"method": "prompt_lookup"}, OURS["speculative_config"]):
        torch.manual_seed(11)
        given = {"custom_generate": foredraft.generate, "speculative_config": config}
        texts.append([model.generate(PROMPT, **SAMPLED, **given).tolist() for _ in range(2)])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_rows_of_one_prompt_are_sampled_apart(model):
    texts = model.generate(PROMPT, num_return_sequences=3, **SAMPLED, **OURS)
    assert texts.shape[0] == 3
    assert len({tuple(text) for text in texts.tolist()}) == 3


def test_filters_of_ours_and_processors_of_transformers_choose_the_same_tokens(model):
    torch.manual_seed(5)
    ours = model.generate(PROMPT, **SAMPLED, **OURS)
    torch.manual_seed(5)
    theirs = model.generate(PROMPT, **SAMPLED, return_dict_in_generate=True, output_scores=True, **OURS)
    assert ours.tolist() == theirs.sequences.tolist()  # scores must be those after transformers' processors


def test_only_filters_that_mean_the_same_are_taken_over(model):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    own = AllowEven()
    left, options = split_filters([own, TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), MinPLogitsWarper(0.1)])
    assert (list(left), options) == ([own], {"temperature": 0.5, "top_k": 5, "min_p": 0.1})
    kept = [TopPLogitsWarper(0.9), own]
    assert split_filters(kept) == (kept, {})
    several = [TopPLogitsWarper(0.9, min_tokens_to_keep=2)]
    assert split_filters(several) == (several, {})
    other_order = [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)]
    left, options = split_filters(other_order)
    assert (len(left), options) == (1, {"temperature": 0.5})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The draft model has")  # as many weights as the target: it is the target
@pytest.mark.parametrize("pads_with_end", [False, True])
def test_a_row_ends_at_an_end_token_anywhere_in_an_accepted_draft(model, pads_with_end):
    tokenizer = split_at_spaces({f"w{i}": i for i in range(VOCABULARY)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    itself = {"method": "draft_model", "model": (model, tokenizer), "tokenizer": tokenizer, "least_probability": 0.0}
    itself["num_speculative_tokens"] = 6
    rows, fewest = random_rows(11, 3), 30
    written = model.generate(torch.tensor(rows[:1]), max_new_tokens=20, eos_token_id=None)[0, len(rows[0]) :].tolist()
    for end in dict.fromkeys(written):  # each token of the first row ends it in another place of a draft
        pad = end if pads_with_end else 2
        given = padded(rows, pad=pad) | {"max_new_tokens": 20, "eos_token_id": end, "pad_token_id": pad}
        ours = model.generate(**given, custom_generate=foredraft.generate, speculative_config=itself)
        assert ours.tolist() == model.generate(**given).tolist()
        fewest = min(fewest, *(row.steps / row.emitted for row in last_statistics(model)))
    assert fewest < 0.3  # most of a draft was accepted


class Listener:
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.flatten().tolist())

    def end(self):
        self.heard.append("end")


def test_a_streamer_hears_what_it_hears_without_us(model):
    heard = []
    for given in ({}, OURS):
        listener = Listener()
        model.generate(PROMPT, max_new_tokens=12, streamer=listener, **given)
        heard.append(listener.heard)
    assert heard[0] == heard[1]


REFUSED = {
    "beam search": ({"num_beams": 3}, "num_beams is 3"),
    "output_attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "quantized": ({"past_key_values": "dynamic"}, "past_key_values"),
    "streamer": ({"input_ids": PROMPT.repeat(2, 1), "streamer": Listener()}, "one row a call"),
    "unknown option": ({"speculative_config": {"tabel": "none"}}, "Did you mean 'table'"),
    "unknown method": ({"speculative_config": {"method": "adaptics"}}, "Did you mean 'adaptix'"),
    "no mapping": ({"speculative_config": "adaptix"}, "speculative_config is 'adaptix'"),
    "no tokenizer": ({"speculative_config": {"method": "rest", "store": "my.store"}}, "bound to a tokenizer"),
    "positions": ({"position_ids": torch.arange(13)[None] + 1}, "position_ids of your own"),
    "a memory": ({"speculative_config": {"memory": "words"}}, "memory is 'words', and is only written by"),
    "no tokenizer to compare": ({"speculative_config": {"method": "draft_model", "model": TOY_DRAFT}}, "not known"),
    "a strange tokenizer": ({"speculative_config": {"tokenizer": 5}}, "tokenizer is 5"),
    "an assistant": ({"assistant_model": tiny_llama()}, "foredraft drafts itself"),
    "assisted decoding": ({"prompt_lookup_num_tokens": 3}, "foredraft drafts itself"),
    "full window": ({"input_ids": torch.ones(1, llamas.WINDOW, dtype=torch.long)}, "shorten the prompt"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_what_cannot_be_honoured_is_refused_in_a_sentence(model, given, words):
    from transformers import DynamicCache

    given = {"input_ids": PROMPT, "max_new_tokens": 4} | OURS | given
    if "past_key_values" in given:
        given["past_key_values"] = DynamicCache(config=model.config)
    with pytest.raises(UsageError, match=words) as refusal:
        model.generate(**given)
    assert str(refusal.value).endswith(".")


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(UsageError, match=r"call model\.eval\(\) first"):
        tiny_llama().train().generate(PROMPT, max_new_tokens=4, **OURS)


def test_rows_of_different_lengths_need_something_to_fill_them_with():
    model = tiny_llama()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    given = padded(random_rows(2, 3)) | {
        "max_new_tokens": 40,
        "stopping_criteria": StoppingCriteriaList([AfterMultiple()]),
    }
    with pytest.raises(UsageError, match="give pad_token_id"):
        model.generate(**given, **OURS)


def test_statistics_of_the_last_call_are_kept_by_row():
    model = tiny_llama()
    assert last_statistics(model) == ()
    text = model.generate(PROMPT.repeat(2, 1), max_new_tokens=9, eos_token_id=None, pad_token_id=2, **OURS)
    assert [row.emitted for row in last_statistics(model)] == [9, 9]
    assert text.shape == (2, PROMPT.shape[1] + 9)


def test_a_drafter_is_made_once_for_a_configuration_and_dropped_with_the_oldest():
    model = tiny_llama()
    made = [generators_of(model).generator(model, {"table": "none", "depth": depth}) for depth in (3, 3, 4)]
    assert made[0] is made[1]
    assert made[0] is not made[2]
    for depth in range(5, 5 + MOST_GENERATORS):
        generators_of(model).generator(model, {"table": "none", "depth": depth})
    assert generators_of(model).generator(model, {"table": "none", "depth": 3}) is not made[0]
    model.double()
    assert generators_of(model).generator(model, {"table": "none", "depth": 8}).target.dtype == torch.float64


def test_a_configuration_that_the_caller_changes_makes_another_drafter():
    model, config = tiny_llama(), {"method": "layer_skip", "attention": [1], "mlp": [1]}
    first = generators_of(model).generator(model, config)
    config["attention"].append(0)
    assert generators_of(model).generator(model, config) is not first


@pytest.mark.slow
def test_what_is_kept_goes_with_the_model_and_stays_out_of_copies():
    model = tiny_llama()
    model.generate(PROMPT, max_new_tokens=4, **OURS)
    assert getattr(copy.deepcopy(model), ATTRIBUTE) is None
    assert getattr(pickle.loads(pickle.dumps(model)), ATTRIBUTE) is None  # noqa: S301  # made the line before
    assert copy.deepcopy(model).generate(PROMPT, max_new_tokens=4, **OURS).shape[1] == PROMPT.shape[1] + 4
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_the_embedded_model_drafts_from_its_own_table_and_prints_through_a_streamer(capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = TOY
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
    ours = {"custom_generate": foredraft.generate, "speculative_config": {"num_speculative_tokens": 16}}
    expected = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    result = model.generate(**inputs, max_new_tokens=32, do_sample=False, streamer=streamer, **ours)
    assert result.tolist() == expected.tolist()
    assert capsys.readouterr().out.strip() == tokenizer.decode(expected[0], skip_special_tokens=True).strip()
    statistics = last_statistics(model)[0]
    assert statistics.steps < statistics.emitted


def test_a_criterion_of_a_batch_sees_every_row_at_its_own_place(model):
    given = padded(random_rows(3, 3)) | {"max_new_tokens": 24, "pad_token_id": 2}
    written = model.generate(**given, eos_token_id=None)
    given["eos_token_id"] = next(token for token in range(VOCABULARY) if token not in written)  # ended rows are padded
    expected, ours = (
        model.generate(**given, **how, stopping_criteria=StoppingCriteriaList([Counting()])) for how in ({}, OURS)
    )
    assert ours.tolist() == expected.tolist()


def test_a_criterion_that_cannot_be_copied_is_shared(model):
    cancelled = threading.Event()
    cancelled.set()

    class Cancelled(StoppingCriteria):
        def __init__(self):
            self.event = cancelled

        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), self.event.is_set())

    given = {"max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([Cancelled()])}
    assert model.generate(PROMPT.repeat(2, 1), **given, **OURS).shape == (2, PROMPT.shape[1] + 1)


def test_a_limit_at_the_prompts_length_allows_one_token(model):
    given = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(PROMPT.shape[1] - 2)]), "max_new_tokens": 9}
    assert model.generate(PROMPT, **given, **OURS).tolist() == model.generate(PROMPT, **given).tolist()


def test_a_token_that_a_processor_forces_with_infinity_is_written(model):
    def forces(input_ids, scores):
        scores = scores.clone()
        scores[:, 33] = torch.inf
        return scores

    given = {"max_new_tokens": 3, "eos_token_id": None, "logits_processor": LogitsProcessorList([forces])}
    assert model.generate(PROMPT, **given, **OURS).tolist() == model.generate(PROMPT, **given).tolist()


def test_what_was_written_before_a_processor_raised_is_heard(model):
    """Also where it raises within an accepted draft."""
    heard = []
    for how in ({}, OURS):
        lengths, listener = [], Listener()

        def raises(input_ids, scores, lengths=lengths):
            lengths.append(input_ids.shape[1])
            if input_ids.shape[1] == PROMPT.shape[1] + 30:
                raise RuntimeError("enough")
            return scores

        given = {"max_new_tokens": 60, "eos_token_id": None, "logits_processor": LogitsProcessorList([raises])}
        with pytest.raises(RuntimeError, match="enough"):
            model.generate(PROMPT, streamer=listener, **given, **how)
        heard.append(listener.heard)
        assert lengths[-1] == PROMPT.shape[1] + 30
    assert heard[0] == heard[1]
