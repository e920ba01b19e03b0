"""The server, by the clients that people use: what is asked for is honoured or refused, and texts are the library's."""

import asyncio
import json
import logging
import re
import signal
import socket
import struct
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
import torch
from transformers import ByT5Tokenizer

from foredraft.api import Generator, load
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.errors import PromptTooLongError
from foredraft.server import app
from foredraft.server.bodies import Speculation
from foredraft.server.running import Listening
from foredraft.server.service import Service
from support.llamas import small_model, tiny_llama
from support.tokenizers import gguf_tokenizer, pretrained_words, words
from support.toys import TOY

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "Write a function that adds the numbers of a list."}]
CALLING = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
]}  # fmt: skip
KEY, OTHER = "a-key-of-the-tests", "another-key-of-tests"
TEMPLATE = (
    '{% if tools %}<|user|>Tools: {{ tools | tojson }} <tool_call>{"name{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}<|assistant|>"
)


def served(keys=(), **limits):
    """Run a server over the toy in a thread; return it, its generator and the thread."""
    generator = load(TOY, method="auto", speculative_config={"table": "none"}, compile=False, dtype="float32")
    listening = Listening(Service(generator, "toy", {"table": "none"}, **limits), port=0, keys=keys)
    thread = threading.Thread(target=listening.run)
    thread.start()
    return listening, generator, thread


PATIENCE = 60  # seconds that an answer may take on a busy machine; httpx gives up after 5


@pytest.fixture(scope="module")
def server():
    listening, generator, thread = served()
    yield listening, generator
    listening.stop()
    thread.join()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[0].address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def plain(server):
    """What the library writes, without drafts."""
    writer = load(TOY, method="none", compile=False, dtype="float32")
    return lambda prompt=QUESTION, **options: writer.generate(prompt, **options)


def asked(client, messages=QUESTION, **fields):
    extra = {
        name: fields.pop(name) for name in ("speculative", "top_k", "ignore_eos", "return_sources") if name in fields
    }
    return client.chat.completions.create(model="toy", messages=messages, extra_body=extra, **fields)


def test_an_answer_is_what_the_library_writes(client, plain):
    answer = asked(client, temperature=0, max_tokens=60)
    written = plain(max_new_tokens=60)
    assert answer.choices[0].message.content == written.text
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[written.finish_reason]
    assert answer.usage.completion_tokens == len(written.token_ids)
    assert answer.usage.prompt_tokens == written.prompt_length
    followed = [*QUESTION, answer.choices[0].message.model_dump(), *QUESTION]
    assert asked(client, followed, temperature=0, max_tokens=5).usage.completion_tokens == 5


def test_log_probabilities_are_of_the_text(client):
    answer = asked(client, temperature=0.8, seed=5, max_tokens=500, logprobs=True).choices[0]
    assert answer.finish_reason == "stop", "the toy ends this text itself"
    assert "".join(each.token for each in answer.logprobs.content) == answer.message.content


def test_answers_do_not_depend_on_drafting_or_company(client, plain):
    """Requests at the same time, drafted in several ways: each is the text alone, by its seed."""
    ways = [False, True, {"method": "prompt_lookup"}, {"method": "adaptix", "num_speculative_tokens": 5}] * 2
    found = [None] * len(ways)

    def ask(number):
        fields = {"temperature": 0.8, "seed": number, "max_tokens": 40}
        found[number] = asked(client, speculative=ways[number], **fields).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain(max_new_tokens=40, temperature=0.8, seed=number).text for number in range(len(ways))]


def test_a_request_changes_what_it_names_of_the_servers_own_drafting():
    config = {"table": "none", "control": "measured"}
    default = load(TOY, speculative_config=config, compile=False, dtype="float32")
    service = Service(default, "toy", config)
    fewer = service.generator_for("", Speculation(num_speculative_tokens=3))
    assert (fewer.method, fewer.amount.name, fewer.amount.most_nodes) == ("auto", "measured", 3)
    other = service.generator_for("", Speculation(method="prompt_lookup"))
    assert (other.method, other.drafter.name) == ("prompt_lookup", "prompt_lookup")
    service.close()


def test_several_answers_follow_the_seeds(client, plain):
    answer = asked(client, temperature=0.8, seed=3, max_tokens=20, n=3)
    expected = [plain(max_new_tokens=20, temperature=0.8, seed=3 + number).text for number in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected


def test_a_stream_is_the_answer_in_pieces(client):
    fields = {"temperature": 0.8, "seed": 4, "max_tokens": 50, "n": 2}
    whole = asked(client, **fields)
    texts, finishes = ["", ""], [None, None]
    for chunk in asked(client, stream=True, stream_options={"include_usage": True}, return_sources=True, **fields):
        for choice in chunk.choices:
            text = choice.delta.content or ""
            texts[choice.index] += text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            assert "".join(piece for piece, _ in chunk.sources) == text
        last = chunk
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.metrics["steps"] > 0


def test_a_stop_string_is_not_part_of_the_answer(client, plain):
    text = plain(max_new_tokens=60).text
    stop = text[20:23]
    for stream in (False, True):
        answer = asked(client, temperature=0, max_tokens=60, stop=["never written", stop], stream=stream)
        if stream:
            chunks = list(answer)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            assert answer.choices[0].message.content == text[: text.index(stop)]
            assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_models(client, server, plain):
    """At drafted positions and others: those of one pass over the whole text."""
    answer = asked(client, temperature=0, max_tokens=30, logprobs=True, top_logprobs=3)
    generator, written = server[1], plain(max_new_tokens=30)
    ids = [*generator.encode(QUESTION).tolist(), *written.token_ids]
    with torch.inference_mode():
        scores = generator.target.model(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    rows = scores[len(ids) - len(written.token_ids) - 1 : -1]
    told = answer.choices[0].logprobs.content
    expected = [float(row[token]) for row, token in zip(rows, written.token_ids, strict=True)]
    assert [each.logprob for each in told] == pytest.approx(expected, abs=1e-3)
    for each, row in zip(told, rows, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_parts_of_a_character_have_their_own_bytes(client):
    """The bytes of all tokens are the text, also where a character has several tokens."""
    fields = {"max_tokens": 60, "response_format": {"type": "regex", "pattern": "日本語 🙂"}}
    tokens = asked(client, logprobs=True, top_logprobs=0, **fields).choices[0].logprobs.content
    assert any(each.token.startswith("bytes:") for each in tokens), "no part of a character"
    assert b"".join(bytes(each.bytes) for each in tokens).decode().startswith("日本語 🙂")
    completion = client.completions.create(
        model="toy", prompt="Yes or no:", max_tokens=3, logprobs=2,
        extra_body={"response_format": {"type": "regex", "pattern": "no"}},
    )  # fmt: skip
    assert completion.choices[0].logprobs.token_logprobs[0] > -100


def test_penalties_and_biases_are_those_of_plain_decoding(client, server):
    fields = {"temperature": 0, "max_tokens": 40, "frequency_penalty": 0.9, "presence_penalty": 0.5}
    penalised = asked(client, **fields).choices[0].message.content
    assert penalised == asked(client, speculative=False, **fields).choices[0].message.content
    free = asked(client, temperature=0, max_tokens=40).choices[0].message.content
    assert penalised != free
    first = asked(client, temperature=0, max_tokens=1, logprobs=True).choices[0].logprobs.content[0].token
    token = server[1].tokenizer.encode(first, add_special_tokens=False)[0]
    banned = asked(client, temperature=0, max_tokens=1, logit_bias={str(token): -100}).choices[0].message.content
    assert banned != first


def test_text_of_a_shape(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "kinds": {"enum": ["red", "green"]}},
        "required": ["name", "kinds"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    texts = set()
    for speculative in (None, False):
        fields = {"temperature": 0.8, "seed": 1, "max_tokens": 120, "speculative": speculative}
        texts.add(asked(client, response_format=given, **fields).choices[0].message.content)
    found = json.loads(texts.pop())
    assert not texts
    assert set(found) == {"name", "kinds"}
    regex = {"type": "regex", "pattern": "[ab]{3}-(red|green)"}
    answer = client.completions.create(
        model="toy", prompt="The code is", max_tokens=40, seed=2, extra_body={"response_format": regex}
    )
    assert re.fullmatch("[ab]{3}-(red|green)", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="is not supported"):
        asked(client, response_format={"type": "regex", "pattern": "((("})


def test_a_prediction_is_drafted_from(client, plain):
    """A prediction with an edit: the text is the same, in fewer passes; what was refused is told and not counted."""
    text = plain(max_new_tokens=80).text
    middle = len(text) // 2
    expected = f"{text[:middle]} something else {text[middle + 5 :]}"
    fields = {"temperature": 0, "max_tokens": 80, "speculative": {"num_speculative_tokens": 16}}
    without = asked(client, **fields)
    answer = asked(client, prediction={"type": "content", "content": expected}, **fields)
    assert answer.choices[0].message.content == text
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 40
    assert details.rejected_prediction_tokens > 0
    assert answer.usage.completion_tokens == without.usage.completion_tokens
    assert answer.metrics["steps"] < without.metrics["steps"]
    wrong = asked(client, prediction={"type": "content", "content": "Nothing of the kind. " * 20}, **fields)
    assert wrong.choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match="prediction"):
        asked(client, prediction={"type": "content", "content": "x"}, **fields | {"speculative": False})
    nothing = {"speculative": {"num_speculative_tokens": 0}}
    with pytest.raises(openai.BadRequestError, match="prediction has no effect with num_speculative_tokens 0"):
        asked(client, prediction={"type": "content", "content": "x"}, **fields | nothing)


def test_a_prediction_goes_with_everything_else(client):
    """Each of these changes what a row's scores become, or how many texts there are: the answers stay those without."""
    fields = {"temperature": 0.7, "seed": 3, "max_tokens": 50, "frequency_penalty": 0.4, "logit_bias": {"7": 1.5},
              "logprobs": True, "top_logprobs": 2, "n": 3}  # fmt: skip
    without = asked(client, speculative=False, **fields)
    expected = {"type": "content", "content": without.choices[0].message.content}
    answer = asked(client, prediction=expected, speculative={"num_speculative_tokens": 64}, **fields)
    for one, other in zip(answer.choices, without.choices, strict=True):
        assert one.message.content == other.message.content
        assert [each.token for each in one.logprobs.content] == [each.token for each in other.logprobs.content]
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 20


@pytest.mark.parametrize(
    "extra",
    [{"top_p": 0.8}, {"extra_body": {"top_k": 5}}, {"extra_body": {"min_p": 0.1}},
     {"extra_body": {"repetition_penalty": 1.3}}],
    ids=str,
)  # fmt: skip
def test_filters_are_those_of_the_library(client, plain, extra):
    text = client.chat.completions.create(
        model="toy", messages=QUESTION, temperature=1.0, seed=9, max_tokens=30, **extra
    )
    options = {name: each for name, each in extra.items() if name != "extra_body"} | extra.get("extra_body", {})
    assert text.choices[0].message.content == plain(temperature=1.0, seed=9, max_new_tokens=30, **options).text


def test_null_is_the_default(server, plain):
    names = ("n", "stream", "frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "stop", "user",
             "stream_options", "response_format", "prediction", "logit_bias", "tools", "ignore_eos")  # fmt: skip
    body = {"model": "toy", "messages": QUESTION, "temperature": 0, "max_tokens": 12} | dict.fromkeys(names)
    answer = httpx.post(f"{server[0].address}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.json()["choices"][0]["message"]["content"] == plain(max_new_tokens=12).text
    invalid = httpx.post(f"{server[0].address}/v1/chat/completions", content=json.dumps(body | {"top_p": float("nan")}))
    assert invalid.status_code == 400


def test_completions_take_texts_and_ids(client, plain):
    ids = [5, 6, 7, 8]
    answer = client.completions.create(model="toy", prompt=["def add(a, b):", "Once"], max_tokens=12, temperature=0)
    expected = [plain(prompt, max_new_tokens=12).text for prompt in ("def add(a, b):", "Once")]
    assert [choice.text for choice in answer.choices] == expected
    of_ids = client.completions.create(model="toy", prompt=ids, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in of_ids) == plain(ids, max_new_tokens=12).text


def test_a_completion_keeps_the_space_after_its_prompt():
    tokenizer = gguf_tokenizer("space before")
    generator = load((tiny_llama(len(tokenizer)), tokenizer), method="none", compile=False)
    listening = Listening(Service(generator, "small", {}), port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    fields = {"model": "small", "max_tokens": 3, "temperature": 1.0}
    try:
        bodies = [fields | {"prompt": "Hello", "seed": seed} for seed in range(20)]
        answers = [httpx.post(f"{listening.address}/v1/completions", json=body, timeout=PATIENCE) for body in bodies]
    finally:
        listening.stop()
        thread.join()
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    written = [generator.generate("Hello", max_new_tokens=3, temperature=1.0, seed=seed).text for seed in range(20)]
    whole = [text for text in written if "\ufffd" not in text]  # a stream shows what precedes a wrong byte
    assert set(whole) <= set(texts)
    assert any(text.startswith(" ") for text in whole)


def test_a_tokenizer_in_python_does_without_formats_and_log_probabilities():
    """As those of remote code are, such as Kimi's: what needs the bytes of tokens is refused, and all else works."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    service = Service(load((tiny_llama(len(tokenizer)), tokenizer), method="none", compile=False), "small", {})
    listening = Listening(service, port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    body = {"prompt": "Hello", "max_tokens": 3}
    try:
        answers = [httpx.post(f"{listening.address}/v1/completions", json=body | fields, timeout=PATIENCE)
                   for fields in ({}, {"logprobs": 1}, {"response_format": {"type": "json_object"}})]  # fmt: skip
    finally:
        listening.stop()
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    assert all("need another tokenizer" in answer.json()["error"]["message"] for answer in answers[1:])


def test_too_many_prompts_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="needs 65 texts"):
        client.completions.create(model="toy", prompt=["12"] * 65, max_tokens=1)


def test_responses(client, plain):
    text = plain([{"role": "system", "content": "Be brief."}, *QUESTION], max_new_tokens=30).text
    given = {"model": "toy", "input": QUESTION, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 30}
    answer = client.responses.create(**given)
    assert answer.output_text == text
    kinds = []
    for event in client.responses.create(stream=True, **given):
        kinds.append(event.type)
        last = event
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert last.response.output_text == text
    assert last.response.status == answer.status


def test_messages_of_anthropics_client(server, plain):
    text = plain([{"role": "system", "content": "Be brief."}, *QUESTION], max_new_tokens=30)
    given = {
        "model": "toy",
        "max_tokens": 30,
        "messages": QUESTION,
        "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=server[0].address, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**given)
        assert answer.content[0].text == text.text
        assert answer.usage.output_tokens == len(text.token_ids)
        with client.messages.stream(**given) as stream:
            assert "".join(stream.text_stream) == text.text
            assert stream.get_final_message().stop_reason == answer.stop_reason
        stop = text.text[10:13]
        stopped = client.messages.create(stop_sequences=[stop], **given)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
        counted = client.messages.count_tokens(model="toy", messages=QUESTION, system="Be brief.")
        assert counted.input_tokens == text.prompt_length
        begun = [*QUESTION, {"role": "assistant", "content": "It"}]
        with pytest.raises(anthropic.BadRequestError, match="cannot be continued"):
            client.messages.create(model="toy", max_tokens=3, messages=begun)
        assert client.messages.count_tokens(model="toy", messages=begun).input_tokens
        with pytest.raises(anthropic.NotFoundError, match="has only the model"):
            client.messages.create(model="other", max_tokens=3, messages=QUESTION)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"return_sources": True}, "needs stream"),
        ({"response_format": {"type": "text", "pattern": "a"}}, "pattern"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "the same field"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias holds token 99999999"),
        ({"speculative": {"method": "medusa"}}, "cannot select the method 'medusa'"),
        ({"speculative": {"options": {"nonsense": 1}}}, "nonsense"),
        ({"speculative": {"options": {"table": "/etc/passwd"}}}, "table names a file of the server"),
        ({"speculative": {"options": {"memory": "off"}}}, "memory names a file of the server"),
        ({"speculative": {"options": {"learn": "shared"}}}, "learn is 'shared'; give a number"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "leave out tools"),
        ({"messages": [*QUESTION, CALLING]}, "leave out tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
        ),
        ({f"field{number}": 1 for number in range(200)}, "at most 100"),
        ({"maxTokens": 3}, "no field 'maxTokens'"),
        ({"repetition_penalty": 1e-310}, "repetition_penalty"),
        ({"stop": "x" * 2000}, "stop"),
        ({"n": 65}, "n: "),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "window"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(server, fields, words):
    body = {"model": "toy", "messages": QUESTION} | fields
    answer = httpx.post(f"{server[0].address}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (answer.json()["error"]["code"] == "context_length_exceeded") == (words == "window")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"text": {"format": {"type": "text", "name": "a", "schema": {}}}}, "type json_schema needs schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "type json_schema needs schema"),
    ],
)
def test_a_response_that_cannot_be_as_asked_is_refused(server, fields, words):
    answer = httpx.post(f"{server[0].address}/v1/responses", json={"model": "toy", "input": "Hello"} | fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_bodies_that_are_no_requests(server):
    for body in (b"", b"{", b"[]", b'{"messages": 3}', b"\xff\xfe", b'"' * 100):
        answer = httpx.post(f"{server[0].address}/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert "Traceback" not in answer.text
    too_large = httpx.post(f"{server[0].address}/v1/chat/completions", content=b" " * (5 << 20))
    assert too_large.status_code == 413
    assert httpx.get(f"{server[0].address}/nowhere").status_code == 404


def test_facts(server, client, plain):
    address = server[0].address
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    assert httpx.get(f"{address}/health").text == "ok"
    ids = httpx.post(f"{address}/tokenize", json={"prompt": "adds numbers"}).json()["tokens"]
    assert server[1].tokenizer.decode(ids) == "adds numbers"
    bare = httpx.post(
        f"{address}/tokenize",
        json={"prompt": "adds numbers", "add_special_tokens": False, "return_token_strs": True},
    ).json()
    own = server[1].tokenizer
    assert bare["tokens"] == own("adds numbers", add_special_tokens=False).input_ids
    assert bare["token_strs"] == own.convert_ids_to_tokens(bare["tokens"])
    counted = httpx.post(f"{address}/tokenize", json={"messages": QUESTION}).json()["count"]
    assert counted == plain(max_new_tokens=1).prompt_length
    for refused in (
        {"messages": QUESTION, "add_special_tokens": True},
        {"prompt": "adds", "chat_template_kwargs": {"a": 1}},
    ):
        assert httpx.post(f"{address}/tokenize", json=refused).status_code == 400
    asked(client, temperature=0, max_tokens=30)
    metrics = httpx.get(f"{address}/metrics").text
    for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"):
        assert float(re.search(rf"vllm:spec_decode_{name}{{.*}} (.+)", metrics)[1]) > 0
    assert "vllm:time_to_first_token_seconds_bucket" in metrics


def test_more_texts_than_can_ever_be_taken_are_not_to_be_tried_again():
    listening, _, thread = served(most_at_once=2, most_waiting=1)
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 5}
    refused = httpx.post(f"{listening.address}/v1/chat/completions", json=body | {"n": 4}, timeout=PATIENCE)
    assert refused.status_code == 400
    assert "the limit is 3" in refused.json()["error"]["message"]
    listening.stop()
    thread.join()


def until(holds):
    """Wait until something holds, for at most 20 seconds."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_answer_that_nobody_reads_is_not_written_on(server, client):
    writer = server[0]._service.writer
    stream = asked(client, temperature=0, max_tokens=1000, ignore_eos=True, stream=True)
    next(iter(stream))
    until(lambda: writer.running == 1)
    [run] = writer._joined
    stream.close()
    until(lambda: writer.running == 0)
    assert run.seq.finish is None


def test_a_client_that_goes_before_the_first_event_is_not_written_for():
    """By the application alone, so that the client is gone before the response begins."""
    listening = Listening(Service(load(TOY, method="none", compile=False), "toy", {}), port=0)

    async def send(_message):
        """Nobody reads."""

    ask_alone(listening, send, stays=False)


SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [(b"host", b"127.0.0.1")],
         "query_string": b"", "asgi": {"spec_version": "2.3"}}  # fmt: skip


def ask_alone(listening, send, *, stays):
    """Ask the application itself for a stream, and check that its text is not written to its end."""
    writer, asked_for = listening._service.writer, []
    submit = writer.submit
    writer.submit = lambda jobs: (asked_for.extend(jobs), submit(jobs))
    body = {"messages": QUESTION, "max_tokens": 900, "ignore_eos": True, "stream": True}
    given = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive():
        message = next(given, None)
        if message is None and stays:
            await asyncio.Event().wait()
        return message or {"type": "http.disconnect"}

    asyncio.run(asyncio.wait_for(listening.config.app(SCOPE, receive, send), PATIENCE))
    assert b'request_success_total{finished_reason="abort",model_name="toy"} 1.0' in listening._service.metrics.text()
    until(lambda: writer.running + writer.waiting == 0)
    assert [job.run.seq.finish for job in asked_for] == [None]
    writer.close(0.0)
    listening._socket.close()


def test_a_client_that_stays_but_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.1)
    service = Service(load(TOY, method="none", compile=False), "toy", {}, timeout=0.5)
    started = []

    async def send(message):
        started.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    ask_alone(Listening(service, port=0), send, stays=True)
    assert started == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_fails_is_told_why_and_takes_its_siblings_along(server, monkeypatch, stream):
    batch, others = server[0]._service.writer.batch, []
    join = batch.join

    def joined(run):
        if not others:
            others.append(None)
            raise PromptTooLongError("The prompt needs more room than there is.")
        others.append(join(run))
        return run

    monkeypatch.setattr(batch, "join", joined)
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 900, "ignore_eos": True, "n": 2, "stream": stream}
    with httpx.Client(base_url=server[0].address, timeout=PATIENCE) as client:
        failed = client.post("/v1/chat/completions", json=body)
        told = json.loads(failed.text.split("data: ")[-1])["error"]
        assert (failed.status_code, told["code"]) == (200 if stream else 400, "context_length_exceeded")
        assert client.get("/health").status_code == 200, "the connection can be used again"
    until(lambda: server[0]._service.writer.running == 0)
    assert [run.seq.finish for run in others[1:]] in ([], [None])


def test_an_error_is_numbered_like_the_events_of_responses(server, monkeypatch):
    def refuse(_run):
        raise PromptTooLongError("The prompt needs more room than there is.")

    monkeypatch.setattr(server[0]._service.writer.batch, "join", refuse)
    body = {"input": QUESTION, "stream": True}
    streamed = httpx.post(f"{server[0].address}/v1/responses", json=body, timeout=PATIENCE)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line[:5] == "data:"]
    kinds = ["response.created", "response.in_progress", "error"]
    assert [(event["sequence_number"], event["type"]) for event in events] == list(enumerate(kinds))


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.3)
    place = urlsplit(server[0].address)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_leaves_within_its_body_is_no_failure_of_the_server(server, caplog):
    given = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive():
        return next(given)

    async def send(message):
        sent.append(message)

    asyncio.run(server[0].config.app(SCOPE, receive, send))
    assert sent[0]["status"] == 499
    assert not caplog.records


def test_clients_that_leave_their_streams_do_not_fill_the_log(server, caplog):
    body = json.dumps({"messages": QUESTION, "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 16}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    place = urlsplit(server[0].address)
    for _ in range(3):
        with socket.create_connection((place.hostname, place.port), timeout=PATIENCE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
            client.sendall(head.encode() + body)
            client.recv(1000)
        until(lambda: server[0]._service.writer.running == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_answer_that_takes_too_long_fails():
    listening, _, thread = served(timeout=0.3)
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 900, "ignore_eos": True}
    url = f"{listening.address}/v1/chat/completions"
    late = httpx.post(url, json=body, timeout=PATIENCE)
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=PATIENCE)
    assert streamed.status_code == 200, "the answer had begun"
    assert json.loads(streamed.text.split("data: ")[-1])["error"]["type"] == "timeout_error"
    until(lambda: listening._service.writer.running == 0)
    listening.stop()
    thread.join()


def test_too_many_requests_are_told_to_come_back():
    listening, _, thread = served(most_at_once=1, most_waiting=1)
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 900, "ignore_eos": True, "stream": True}
    url = f"{listening.address}/v1/chat/completions"
    with (
        httpx.Client(timeout=PATIENCE) as client,
        client.stream("POST", url, json=body) as one,
        client.stream("POST", url, json=body),
    ):
        refused = httpx.post(url, json=body | {"n": 2}, timeout=PATIENCE)
        assert (refused.status_code, one.status_code) == (429, 200)
        assert int(refused.headers["retry-after"]) > 0
    listening.stop()
    thread.join()


@pytest.mark.parametrize("by_signal", [False, True])
def test_stopping_finishes_what_was_begun(by_signal):
    listening, _, thread = served()
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{listening.address}/v1/chat/completions", json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        next(lines)
        stop = partial(listening.handle_exit, signal.SIGTERM, None) if by_signal else listening.stop
        stopping = threading.Thread(target=stop)
        stopping.start()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    stopping.join()
    thread.join()


def test_a_second_signal_stops_at_once_and_prints_no_traceback(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)  # restored afterwards
    listening, _, thread = served()
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{listening.address}/v1/chat/completions", json=body, timeout=PATIENCE) as stream:
        next(stream.iter_lines())
        for _ in range(2):
            listening.handle_exit(signal.SIGTERM, None)
        thread.join()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_keys_keep_strangers_out():
    listening, _, thread = served(keys=(KEY, OTHER))
    url = f"{listening.address}/v1"
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 5}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        refused = httpx.post(f"{url}/chat/completions", json=body, headers=headers)
        assert refused.status_code == 401
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": OTHER}):
        assert httpx.post(f"{url}/chat/completions", json=body, headers=headers).status_code == 200
    listening.stop()
    thread.join()


def test_a_compiled_server_reuses_prefixes_for_one_key_alone(packages, monkeypatch):
    """Requests at the same time are one pass a step; each text is the one alone."""
    monkeypatch.setenv(CACHE_VARIABLE, str(packages))
    tokenizer = pretrained_words()
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }} {% endfor %}"
    generator = load((small_model(), tokenizer), method="auto", speculative_config={"table": "none"}, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        generator.compile()
    alone = Generator(generator.target, generator.tokenizer, method="none")
    fields = [{"temperature": 0.8, "seed": number, "max_tokens": 30} for number in range(6)]
    question = [{"role": "system", "content": words(range(2, 92))}, {"role": "user", "content": words(range(20, 50))}]
    expected = [alone.generate(question, **each).text for each in renamed(fields)]
    service = Service(generator, "toy", {"table": "none"})
    assert service.writer.batch.passes.keeps_prefixes
    drafters = [service.generator_for(key, None).drafter for key in (KEY, KEY, OTHER)]
    assert drafters[0] is drafters[1] is not drafters[2], "what is learned is kept apart"
    listening = Listening(service, port=0, keys=(KEY, OTHER))
    thread = threading.Thread(target=listening.run)
    thread.start()
    url = f"{listening.address}/v1/chat/completions"

    def ask(key, **given):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(url, json={"messages": question} | given, headers=headers, timeout=PATIENCE).json()

    with ThreadPoolExecutor(len(fields)) as pool:
        answers = list(pool.map(lambda given: ask(KEY, **given), fields))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected
    cached = [ask(key, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] for key in (KEY, OTHER)]
    assert cached[0] > 0 == cached[1]
    metrics = httpx.get(f"{listening.address}/metrics", headers={"x-api-key": KEY}).text
    assert float(re.search(r"vllm:prefix_cache_hits_total{.*} (.+)", metrics)[1]) >= cached[0]
    listening.stop()
    thread.join()


def renamed(fields):
    """Requests' fields as the library's arguments."""
    return [{"max_new_tokens" if name == "max_tokens" else name: each for name, each in one.items()} for one in fields]


def test_pages_of_other_sites_are_kept_out(server):
    address = server[0].address
    body = {"model": "toy", "messages": QUESTION, "max_tokens": 2}
    origins = [{"origin": origin} for origin in ("https://evil.example", "null", "http://[")]
    for headers in (*origins, {"host": "evil.example:80"}, {"host": "["}):
        assert httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers).status_code == 403
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 403
    assert httpx.post(f"{address}/v1/chat/completions", json=body, headers={"origin": address}).status_code == 200


def test_tools_are_told_and_their_calls_found(server, client, monkeypatch):
    """By a template that knows them; the model's text is made to be a call by a constraint of its form."""
    monkeypatch.setattr(server[1].tokenizer, "chat_template", TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    form = r'Well: <tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'
    fields = {"temperature": 0.8, "seed": 1, "max_tokens": 200, "response_format": {"type": "regex", "pattern": form}}
    answer = asked(client, tools=tools, **fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    call = answer.message.tool_calls[0].function
    assert (call.name, set(json.loads(call.arguments))) == ("add", {"a"})
    assert answer.message.content == "Well:"
    content, calls = "", []
    for chunk in asked(client, tools=tools, stream=True, **fields):
        content += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
    assert (content, "".join(each.function.arguments for each in calls)) == ("Well:", call.arguments)
    uncalled = asked(client, tools=tools, tool_choice="none", **fields).choices[0]
    assert (uncalled.finish_reason, uncalled.message.tool_calls) == ("stop", None)
    told = [*QUESTION, {"role": "assistant", "tool_calls": [answer.message.tool_calls[0].model_dump()]},
            {"role": "tool", "tool_call_id": "1", "content": "7"}]  # fmt: skip
    counted = httpx.post(f"{server[0].address}/tokenize", json={"messages": told}).json()["tokens"]
    shown = server[1].tokenizer.decode(counted)
    assert f"add({call.arguments.replace(' ', '')})" in shown.replace(" ", ""), "arguments are not an object"
    known = httpx.post(f"{server[0].address}/tokenize", json={"messages": QUESTION, "tools": tools}).json()["tokens"]
    assert '"name": "add"' in server[1].tokenizer.decode(known)
    form = form.replace("Well: ", "") + " Done"
    after = asked(client, tools=tools, **fields | {"response_format": {"type": "regex", "pattern": form}}).choices[0]
    assert (after.message.content, len(after.message.tool_calls)) == ("Done", 1)


def test_the_page_needs_nothing_else(server):
    page = httpx.get(server[0].address)
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"(?m)^\s*//.*$", "", page.text), "it names another address"
