"""The front door, on a tiny random llama with a tokenizer trained here: what it takes, refuses and reports."""

import copy
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, TopKLogitsWarper

import foredraft
from foredraft import StoreError, UsageError
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import chat
from foredraft.corpus.words import tokenizer_hash
from foredraft.errors import ForedraftWarning
from foredraft.index.trigram import open_table
from foredraft.sampling import SamplingOptions
from support.llamas import WINDOW, tiny_llama
from support.scripted import OracleDrafter
from support.toys import TOY, build_trigram_table, text_documents

TEXT = [
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps",
    "a model writes one token after the other, a draft guesses the next ones",
    "to be or not to be, that is the question; naïve café 🙂",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
METHODS = {
    "none": {},
    "prompt_lookup": {"num_speculative_tokens": 5},
    "adaptix": {"num_speculative_tokens": 12, "table": "none"},
    "adaptix measured": {"table": "none"},
    "adaptix beta_ts": {"table": "none", "control": "beta_ts", "control_options": {"alpha0": 4}},
    "prompt_lookup beta_ts": {"control": "beta_ts", "num_speculative_tokens": 8},
}


def trained_tokenizer(size=300, texts=TEXT):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")  # noqa: S106  # a token of text


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer):
    return tiny_llama(len(tokenizer) + 7), tokenizer  # as models often are: larger than their tokenizer


@pytest.fixture(scope="module")
def plain(pair):
    return foredraft.load(pair, method="none")


@pytest.fixture(scope="module", params=METHODS)
def generator(request, pair):
    return foredraft.load(pair, method=request.param.split()[0], speculative_config=METHODS[request.param])


SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 5}}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_every_method_writes_the_text_of_plain_decoding(plain, generator, options):
    expected = plain.generate("the quick brown", max_new_tokens=40, eos_token_id=[], **options)
    result = generator.generate("the quick brown", max_new_tokens=40, eos_token_id=[], **options)
    assert result.token_ids == expected.token_ids
    assert len(result.token_ids) == 40
    assert result.text == expected.text
    assert result.finish_reason == "length"
    assert result.prompt_length == len(plain.encode("the quick brown"))
    assert result.statistics.emitted == sum(len(step.emitted) for step in result.steps) == 40
    assert result.statistics.decode_seconds > 0


def test_a_generation_says_briefly_what_it_is(plain):
    shown = repr(plain.generate("the quick brown", max_new_tokens=40, eos_token_id=[]))
    assert len(shown) < 200
    assert "40 tokens in 40 steps, finish_reason='length'" in shown


def test_a_text_is_answered_where_chat_is_asked_for(pair):
    model, tokenizer = pair
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = TEMPLATE
    generator = foredraft.load((model, talking), method="none")
    message = [{"role": "user", "content": "to be"}]
    options = {"max_new_tokens": 8, "eos_token_id": []}
    answered = generator.generate("to be", chat=True, **options)
    assert answered.token_ids == generator.generate(message, **options).token_ids
    assert answered.prompt_length > generator.generate("to be", **options).prompt_length
    assert generator.stream("to be", chat=True, **options).generation.prompt_length == answered.prompt_length
    with pytest.raises(UsageError, match="chat=True is for a prompt that is a text; this one is a list"):
        generator.generate(message, chat=True)


def test_what_stands_in_the_wrong_place_is_named(pair, plain):
    with pytest.raises(UsageError, match=r"The pair is \(\w+, LlamaForCausalLM\); .* model first"):
        foredraft.load(pair[::-1])
    with pytest.raises(UsageError, match=r"The pair is \(LlamaForCausalLM, LlamaForCausalLM\)"):
        foredraft.load((pair[0], pair[0]))
    with pytest.raises(UsageError, match=r"The pair is \(LlamaForCausalLM, Tokenizer\)"):
        foredraft.load((pair[0], pair[1].backend_tokenizer))
    with pytest.raises(UsageError, match="this list holds 'one', a text: use generate_all for many"):
        plain.generate(["one", "two"])


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_an_interrupt_inside_a_drafter_ends_the_text_also_where_it_has_another_name(pair, method, monkeypatch):
    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    generator = foredraft.load(pair, method="prompt_lookup", speculative_config={"num_speculative_tokens": 3})
    opened = generator.drafter.open

    def opening(context):
        drafting = opened(context)
        monkeypatch.setattr(type(drafting), method, interrupted)
        return drafting

    monkeypatch.setattr(generator.drafter, "open", opening, raising=False)
    with pytest.raises(KeyboardInterrupt):
        generator.generate("to be or not to be or not", max_new_tokens=8)


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_a_stream_gives_what_generate_gives(generator, options):
    whole = generator.generate("to be or not", max_new_tokens=30, **options)
    stream = generator.stream("to be or not", max_new_tokens=30, **options)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.generation.text
    assert tuple(piece.token_id for piece in pieces if piece.token_id >= 0) == whole.token_ids
    assert stream.generation.token_ids == whole.token_ids
    assert stream.generation.finish_reason == whole.finish_reason
    names = {piece.drafted_by for piece in pieces}
    assert names <= {None, generator.method}
    assert sum(piece.drafted_by is not None for piece in pieces) == stream.generation.statistics.accepted


def test_an_oracle_of_the_text_itself_is_named_in_the_pieces(pair, plain):
    answer = plain.generate("to be", max_new_tokens=20, eos_token_id=[])
    ids = [*answer.token_ids, *plain.encode("to be")]  # what will be written stands in the prompt
    generator = foredraft.load(pair, method="adaptix", speculative_config=METHODS["adaptix"])
    pieces = list(generator.stream(ids * 3, max_new_tokens=20, eos_token_id=[]))
    assert "adaptix" in {piece.drafted_by for piece in pieces}


def test_a_stream_can_be_read_before_it_ends(plain):
    stream = plain.stream("the quick", max_new_tokens=10, eos_token_id=[])
    first = next(stream)
    assert (stream.generation.token_ids, stream.generation.finish_reason) == ((first.token_id,), None)
    assert len(list(stream)) >= 9
    assert (len(stream.generation.token_ids), stream.generation.finish_reason) == (10, "length")


def test_seeds_are_reported_and_reproduce_the_text(generator):
    drawn = [generator.generate("a model", max_new_tokens=15, do_sample=True) for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    assert drawn[0].token_ids != drawn[1].token_ids
    again = generator.generate("a model", max_new_tokens=15, do_sample=True, seed=drawn[0].seed)
    assert again.token_ids == drawn[0].token_ids
    assert generator.generate("a model", max_new_tokens=2, do_sample=True, seed=2**64 - 1).seed == 2**64 - 1


def test_the_end_id_is_the_models_own_unless_given(pair, plain):
    assert plain.eos_token_ids() == (0,)
    answer = plain.generate("the", max_new_tokens=20, eos_token_id=[]).token_ids
    end = next(token for token in answer if token != answer[0])
    result = plain.generate("the", max_new_tokens=20, eos_token_id=end)
    assert result.finish_reason == "eos"
    assert result.token_ids == answer[: answer.index(end) + 1]
    assert plain.generate("the", max_new_tokens=20, eos_token_id=[299, end]).token_ids == result.token_ids


def test_a_generation_configuration_is_followed_or_what_is_not_is_said(pair, plain, monkeypatch):
    config = pair[0].generation_config
    monkeypatch.setattr(config, "repetition_penalty", 1.05)
    monkeypatch.setattr(config, "no_repeat_ngram_size", 0)
    with pytest.warns(ForedraftWarning, match=r"sets repetition_penalty 1\.05, which transformers"):
        foredraft.load(pair, method="none")
    monkeypatch.setattr(config, "eos_token_id", "</s>")
    with pytest.raises(UsageError, match="generation configuration holds '</s>'; it must be a token id"):
        plain.generate("the")


def test_stop_strings_end_the_text_behind_them(plain, generator):
    options = {"max_new_tokens": 40, "eos_token_id": [], "do_sample": True, "seed": 9}
    text = plain.generate("the quick", **options).text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    result = generator.generate("the quick", stop_strings=stop, **options)
    assert result.finish_reason == "stop"
    assert stop in result.text
    assert text.startswith(result.text)
    assert len(result.text) <= text.index(stop) + len(stop) + 12, "at most the rest of one token"
    assert generator.generate("the quick", stop_strings=["\x00never", stop], **options).text == result.text


def test_a_window_ends_the_text_and_refuses_prompts_that_fill_it(generator):
    result = generator.generate([5] * (WINDOW - 3), max_new_tokens=50, eos_token_id=[])
    assert (result.finish_reason, len(result.token_ids)) == ("window", 3)
    with pytest.raises(UsageError, match=f"has {WINDOW} tokens.*window is {WINDOW}.*at most {WINDOW - 1}"):
        generator.generate([5] * WINDOW)


def test_logits_processors_are_honoured(plain, generator):
    options = {"max_new_tokens": 20, "eos_token_id": [], "do_sample": True, "seed": 1}
    processor = [TopKLogitsWarper(3)]
    expected = plain.generate("a draft", logits_processor=processor, **options)
    assert expected.token_ids == plain.generate("a draft", top_k=3, **options).token_ids
    assert generator.generate("a draft", logits_processor=processor, **options).token_ids == expected.token_ids


class Counting:
    """Allows one token more at each call."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        allowed = torch.full_like(scores, -torch.inf)
        allowed[0, 100 + self.calls] = 0.0
        return allowed


def test_each_of_many_texts_has_processors_of_its_own(generator):
    made = generator.generate_all([[5, 6], [7]], count=2, max_new_tokens=3, logits_processor=[Counting()])
    assert [list(each.token_ids) for each in made] == [[101, 102, 103]] * 4


@pytest.mark.parametrize(
    ("returned", "says"),
    [(None, "returned None"), (torch.zeros(1, 3), "it must return"), (np.zeros((1, 3)), "it must return")],
)
def test_what_a_logits_processor_returns_is_checked(generator, returned, says):
    with pytest.raises(UsageError, match=says):
        generator.generate("a draft", max_new_tokens=3, logits_processor=[lambda _ids, _scores: returned])


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ("abc", {}, "prompts is 'abc'; give a list"),
        (None, {}, "prompts is None"),
        (["abc"], {"count": 0}, "count is 0"),
        (["abc"], {"count": 2.0}, "count is 2.0"),
        ([], {"max_tokens": 3}, "no argument 'max_tokens'"),
    ],
)
def test_many_texts_of_nothing_are_refused(generator, prompts, options, says):
    with pytest.raises(UsageError, match=says):
        generator.generate_all(prompts, **options)


def test_an_amount_that_means_nothing_changes_nothing(plain):
    changed = foredraft.Generator(plain.target, plain.tokenizer, method="auto", options={"table": "none"})
    with pytest.raises(UsageError, match="num_speculative_tokens is '3'"):
        changed.use("none", nodes="3")
    assert changed.method == "auto"


REFUSED = {
    "unknown": ({"tempature": 1.0}, "no argument 'tempature'. Did you mean 'temperature'"),
    "abbreviated": ({"stop": "x"}, "no argument 'stop'. Did you mean 'stop_strings'"),
    "unlike anything": ({"zzz": 1}, "no argument 'zzz'. It takes: max_new_tokens"),
    "beams": ({"num_beams": 4}, "num_beams: beam search is not supported"),
    "several": ({"num_return_sequences": 2}, "use generate_all with count="),
    "assistant": ({"assistant_model": "small"}, "method='draft_model'"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "method='prompt_lookup'"),
    "max_length": ({"max_length": 30}, "use max_new_tokens"),
    "typical_p": ({"typical_p": 0.5}, "TypicalLogitsWarper"),
    "ngrams": ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor"),
    "nothing new": ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    "half a token": ({"max_new_tokens": 2.5}, "whole number"),
    "sampling at 0": ({"temperature": 0, "do_sample": True}, "temperature is 0 with do_sample"),
    "ignored": ({"do_sample": False, "top_p": 0.5}, "top_p would be ignored with do_sample=False.*leave it out"),
    "ignored two": ({"temperature": 0, "top_k": 5, "min_p": 0.1}, "top_k and min_p would be ignored.*leave them out"),
    "empty stop": ({"stop_strings": ["x", ""]}, "stop string is empty"),
    "top_k": ({"top_k": 10_000}, "top_k is 10000 and the model has 307 tokens"),
    "negative top_k": ({"top_k": -1}, "top_k is -1"),
    "top_p": ({"top_p": 1.5}, "top_p is 1.5"),
    "min_p": ({"min_p": 2.0}, "min_p is 2.0"),
    "cold": ({"temperature": -1.0}, "temperature is -1.0"),
    "penalty": ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    "seed": ({"do_sample": True, "seed": -3}, "seed is -3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_honoured_are_refused_before_the_first_token(plain, case, monkeypatch):
    given, says = REFUSED[case]
    monkeypatch.setattr(plain.target, "prefill", lambda *_: pytest.fail("it began to write"))
    for begin in (plain.generate, plain.stream):
        with pytest.raises(UsageError, match=says):
            begin("the", **given)


def test_temperature_zero_is_greedy(plain):
    greedy = plain.generate("the", max_new_tokens=9)
    assert plain.generate("the", max_new_tokens=9, temperature=0).token_ids == greedy.token_ids
    assert plain.generate("the", max_new_tokens=9, do_sample=False).token_ids == greedy.token_ids
    assert plain.generate("the", max_new_tokens=9, do_sample=True, seed=3).token_ids != greedy.token_ids


def test_a_prompt_is_a_text_a_conversation_or_ids(plain, tokenizer, monkeypatch):
    ids = tokenizer("the quick").input_ids
    for prompt in ("the quick", ids, tuple(ids), np.array(ids, np.int32)):
        encoded = plain.encode(prompt)
        assert encoded.dtype == np.int64
        assert encoded.tolist() == ids
    talk = [{"role": "u", "content": "hello"}]
    with pytest.raises(UsageError, match="no chat template"):
        plain.encode(talk)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert tokenizer.decode(plain.encode(talk)) == "<u>hello<a>"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([5, 307], "token id 307; the model has ids 0 to 306"),
        ([5, -2], "token id -2"),
        ([[1, 2], [3, 4]], "flat list"),
        ([1.5, 2.0], "flat list"),
    ],
)
def test_prompts_that_are_none_are_refused(plain, prompt, says):
    with pytest.raises(UsageError, match=says):
        plain.generate(prompt)
    if not isinstance(prompt, str):
        with pytest.raises(UsageError, match=says):
            plain.begin(np.array(prompt), SamplingOptions(), max_new_tokens=1)


def test_ids_beyond_the_tokenizer_are_written_without_text(plain, tokenizer):
    beyond = len(tokenizer) + 2

    def only_beyond(ids, scores):
        scores = scores.clone()
        scores[:, beyond] += 1e4
        return scores

    result = plain.generate("the", max_new_tokens=3, logits_processor=[only_beyond])
    assert (result.token_ids, result.text) == ((beyond,) * 3, "")
    stream = plain.stream([beyond, 5], max_new_tokens=3, logits_processor=[only_beyond])
    assert "".join(piece.text for piece in stream) == ""


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"ids up to 299, which is .*, but the model scores only ids below 200"):
        foredraft.load((tiny_llama(200), tokenizer), method="none")


@pytest.mark.parametrize("model", [3, (1, 2, 3), None])
def test_a_model_that_is_no_name_and_no_pair_is_refused(model):
    with pytest.raises(UsageError, match="name, a folder, or a pair"):
        foredraft.load(model)


@pytest.mark.parametrize(
    ("method", "config", "says"),
    [
        ("adaptx", {}, "no method 'adaptx'. Did you mean 'adaptix'"),
        ("none", {"method": "adaptix"}, "method is 'none' and speculative_config names 'adaptix'"),
        (None, {"method": "none", "nodes": 3}, "Method 'none' has no option 'nodes'"),
        ("prompt_lookup", {"prompt_lookup_mix": 3}, "Did you mean 'prompt_lookup_m"),
        ("prompt_lookup", {"prompt_lookup_min": 3}, "prompt_lookup_min is 3 and prompt_lookup_max is 2"),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 0}, "at least 1"),
        ("adaptix", {"search": "deep"}, "search of method 'adaptix' is 'deep'; it must be one of best_first, mcts"),
        ("adaptix", {"increment": 0.0}, "increment is 0.0"),
        (None, {"num_speculative_token": 5}, r"'num_speculative_tokens'\? The keys are: table, .*, method"),
        ("none", {"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ("none", {"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ("none", {"control": "beta-ts"}, "no control 'beta-ts'. Did you mean 'beta_ts'"),
    ],
)
def test_a_method_or_configuration_that_means_nothing_is_refused(pair, method, config, says):
    with pytest.raises(UsageError, match=says):
        foredraft.load(pair, method=method, speculative_config=config)


def test_drafters_are_told_how_tokens_are_chosen(pair):
    contexts = []

    class Listens(OracleDrafter):
        def open(self, context):
            contexts.append(context)
            return super().open(context)

    generator = foredraft.load(pair, method="none")
    generator.attach("prompt_lookup", Listens(lambda ids: ()), nodes=3)
    generator.generate("to be", max_new_tokens=2, temperature=0.7, top_k=9, repetition_penalty=1.1, seed=4)
    generator.generate("to be", max_new_tokens=2)
    told = {name: contexts[0].settings[name] for name in ("do_sample", "temperature", "top_k", "top_p", "min_p")}
    assert told == {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 1.0, "min_p": 0.0}
    assert contexts[0].settings["repetition_penalty"] == 1.1
    assert contexts[1].settings["do_sample"] is False


def test_use_changes_the_method_and_refuses_unknown_ones(pair):
    generator = foredraft.load(pair, speculative_config={"method": "none"})
    with pytest.raises(UsageError, match="Did you mean 'prompt_lookup'"):
        generator.use("prompt_lokup")
    assert generator.method == generator.drafter.name == "none"
    before = generator.generate("the", max_new_tokens=12, eos_token_id=[])
    generator.use("prompt_lookup", {"prompt_lookup_max": 3}, nodes=4)
    after = generator.generate("the", max_new_tokens=12, eos_token_id=[])
    assert generator.method == generator.drafter.name == "prompt_lookup"
    assert before.token_ids == after.token_ids
    assert all(step.drafted <= 4 for step in after.steps)
    with pytest.raises(UsageError, match="num_speculative_tokens is -2"):
        generator.use("prompt_lookup", nodes=-2)
    with pytest.raises(UsageError, match="no control 'beta'"):
        generator.use("prompt_lookup", control="beta")
    generator.use("prompt_lookup", control="exit_threshold", control_options={"cap": 1})
    capped = generator.generate("the", max_new_tokens=12, eos_token_id=[])
    assert capped.token_ids == before.token_ids
    assert max(step.drafted for step in after.steps) > max(step.drafted for step in capped.steps) == 1


@pytest.fixture(scope="module")
def table(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "small.trigrams"
    backend = tokenizer.backend_tokenizer
    build_trigram_table(text_documents(TEXT * 3), backend, len(tokenizer), path)
    open_table(path, tokenizer_hash(backend))
    return path


def loaded_with(pair, path, **options):
    return foredraft.load(pair, method="adaptix", speculative_config={"table": str(path), **options})


def test_a_table_drafts_without_changing_the_text(pair, plain, table):
    generator = loaded_with(pair, table, num_speculative_tokens=8, learn="off", feedback="off")
    result = generator.generate("the quick brown", max_new_tokens=30)
    assert result.token_ids == plain.generate("the quick brown", max_new_tokens=30).token_ids
    assert result.statistics.drafted > 0


def test_a_table_of_another_tokenizer_is_refused(table):
    other = trained_tokenizer(290, TEXT[:1])
    with pytest.raises(StoreError, match="tokenizer"):
        loaded_with((tiny_llama(len(other)), other), table)


def damaged(table, tmp_path, how):
    content = bytearray(table.read_bytes())
    path = tmp_path / "damaged.trigrams"
    if how == "empty":
        content = bytearray()
    elif how == "truncated":
        content = content[: len(content) // 2]
    elif how == "last byte missing":
        content = content[:-1]
    elif how == "magic flipped":
        content[0] ^= 1
    elif how == "header flipped":
        content[40] ^= 4
    elif how.startswith("bit"):
        content[len(content) * int(how.split()[-1]) // 8] ^= 16
    path.write_bytes(content)
    return path


HARM = [
    "empty",
    "truncated",
    "last byte missing",
    "magic flipped",
    "header flipped",
    *(f"bit {n}" for n in range(1, 8)),
]


@pytest.mark.parametrize("how", HARM)
def test_a_damaged_table_is_refused(pair, table, tmp_path, how):
    assert loaded_with(pair, damaged(table, tmp_path, "copied")).method == "adaptix"
    with pytest.raises(StoreError):
        loaded_with(pair, damaged(table, tmp_path, how))


def test_a_table_that_is_not_there_is_refused(pair, tmp_path):
    with pytest.raises(StoreError, match="nowhere"):
        loaded_with(pair, tmp_path / "nowhere.trigrams")


def test_shared_knowledge_is_kept(pair, plain):
    generator = loaded_with(pair, "none", share=True, num_speculative_tokens=6, feedback="off")
    runs = [generator.generate("the lazy dog", max_new_tokens=30, eos_token_id=[]) for _ in range(2)]
    assert runs[1].statistics.accepted > runs[0].statistics.accepted, "the second text was known from the first"
    expected = plain.generate("the lazy dog", max_new_tokens=30, eos_token_id=[]).token_ids
    assert expected == runs[0].token_ids == runs[1].token_ids


@pytest.mark.slow
def test_the_embedded_model_writes_the_same_with_every_method():
    generator = foredraft.load(TOY, method="none", dtype="float32", device="cpu")
    options = {"max_new_tokens": 24, "temperature": 0.7, "seed": 1}
    talk = [{"role": "user", "content": "Write one sentence about rivers."}]
    expected = generator.generate(talk, **options)
    assert expected.text
    for method, config in (("prompt_lookup", {}), ("adaptix", {"table": "none"})):
        generator.use(method, config, nodes=8)
        assert generator.generate(talk, **options).token_ids == expected.token_ids


@pytest.mark.parametrize(
    "kind",
    [torch.tensor, np.array, lambda ids: torch.tensor([ids]), lambda ids: np.array([ids]), np.uint8],
)
def test_arrays_and_tensors_of_one_row_are_token_ids(plain, kind):
    encoded = plain.encode(kind([5, 6, 7]))
    assert (encoded.dtype, encoded.tolist()) == (np.int64, [5, 6, 7])


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "flat list of token ids; this one is a NoneType"),
        (5, "this one is a int"),
        (b"text", "decode the bytes"),
        ({"role": "user", "content": "a"}, "put a message in a list"),
        ({"input_ids": [1, 2]}, "pass the input_ids"),
        ([[1, 2], [3]], "flat list"),
        ([1, None], "this list holds None"),
        ([True, 5], "this list holds True"),
        (["a", "b"], "this list holds 'a'"),
        ([2**70], "token id 1180591620717411303424"),
        (np.array([[1, 2], [3, 4]]), "shape"),
        (np.array([1.5]), "holds 1.5"),
        (torch.tensor(5), "shape"),
        (torch.tensor([True]), "holds True"),
        (torch.zeros(0), "empty"),
        ({1, 2}, "this one is a set"),
        ([{"role": "user"}], "Message 0 has no content"),
        ([{"role": None, "content": "a"}], "Message 0 has role None"),
        ([{"role": "user", "content": ["a"]}], "Message 0 has content"),
        ([{"role": "user", "content": "a"}, "b"], "Message 1 is 'b'"),
        ("a\udc80", "at character 1, which UTF-8 cannot encode"),
    ],
)
def test_what_is_no_prompt_is_refused_in_a_sentence(plain, prompt, says):
    with pytest.raises(UsageError, match=says):
        plain.encode(prompt)


def test_a_batch_encoding_is_refused(plain, tokenizer):
    with pytest.raises(UsageError, match="pass the input_ids"):
        plain.encode(tokenizer("the quick"))


def test_what_a_chat_template_refuses_is_said(plain, tokenizer, monkeypatch):
    refusing = {"raise_exception('roles must alternate')": "roles must alternate", "1 / 0": "division by zero"}
    for expression, reason in refusing.items():
        monkeypatch.setattr(tokenizer, "chat_template", f"{{{{ {expression} }}}}")
        with pytest.raises(UsageError, match=rf"template rejects the conversation \({reason}"):
            plain.encode([{"role": "user", "content": "a"}])
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    with pytest.raises(UsageError, match="UTF-8 cannot encode"):
        plain.encode([{"role": "user", "content": "\ud800"}])


def test_a_variable_of_the_template_that_is_not_the_callers_is_refused_and_not_ignored(plain, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", f"{{{{ documents }}}}{TEMPLATE}")
    said = [{"role": "u", "content": "hello"}]
    with pytest.raises(UsageError, match="variable documents cannot be set"):
        plain.encode(said, variables={"documents": [{"text": "hello"}]})
    assert len(plain.encode(said, variables={"add_generation_prompt": True, "unknown": 1}))


@pytest.mark.parametrize(
    ("method", "config", "says"),
    [
        (None, [], "speculative_config is \\[\\]; give a mapping"),
        (None, "adaptix", "speculative_config is 'adaptix'"),
        (None, {"method": ["adaptix"]}, "method is \\['adaptix'\\]"),
        (5, {}, "method is 5"),
        ("none", {"num_speculative_tokens": True}, "num_speculative_tokens is True; it must be a whole number"),
        ("none", {"num_speculative_tokens": "5"}, "num_speculative_tokens is '5'"),
        ("none", {"num_speculative_tokens": 1025}, "num_speculative_tokens is 1025; .*0 to 1024"),
        ("adaptix", {"depth": "4"}, "depth of method 'adaptix' is '4'; it must be a whole number"),
    ],
)
def test_a_configuration_of_another_type_is_refused(pair, method, config, says):
    with pytest.raises(UsageError, match=says):
        foredraft.load(pair, method=method, speculative_config=config)


def test_an_end_id_that_the_model_does_not_have_is_refused(plain):
    with pytest.raises(UsageError, match="eos_token_id holds 307; the model has ids 0 to 306"):
        plain.generate("the", eos_token_id=[0, 307])


def test_a_conversation_goes_on_after_a_line_that_is_not_utf_8(monkeypatch, capsys):
    heard = []

    def answer(_generator, _options, messages, _ink, batch):
        assert batch == "kept"
        heard.append(messages[-1]["content"])
        return SimpleNamespace(text="yes"), False

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode() + b"\xff\xfe\r\nmore\r\n\nrest\n")))
    monkeypatch.setattr(chat, "write", answer)
    target, drafter = SimpleNamespace(window=None), SimpleNamespace(source_names=())
    tokenizer = SimpleNamespace(chat_template=TEMPLATE)
    generator = SimpleNamespace(
        tokenizer=tokenizer, target=target, drafter=drafter, conversation=iter(["kept"]).__next__
    )
    chat.converse(generator, {}, None, color=False)
    assert heard == ["é", "more"]
    assert "not UTF-8" in capsys.readouterr().err


def test_a_model_that_is_to_be_compiled_is_compiled_as_it_was_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    compiled = []
    compiler = "foredraft.model.compiled.build.compile_forward"
    monkeypatch.setattr(compiler, lambda model, *_arguments, **_options: compiled.append(model))
    loaded = foredraft.load(TOY, method="none", device="cpu", compile=True, attn_implementation="eager")
    assert compiled == [loaded.target.model]
    assert loaded.target.model.config._attn_implementation == "eager"


def test_a_model_that_cannot_be_compiled_runs_uncompiled_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.warns(ForedraftWarning, match="dtype is float16; foredraft compiles float32, bfloat16"):
        loaded = foredraft.load(TOY, method="none", dtype="float16", device="cpu", compile=True)
    assert loaded.target.compiled is None
