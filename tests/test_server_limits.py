"""What no client may do to the others: formats, headers and prompts have limits, and refusals say what there is."""

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import llguidance.hf
import pytest
import torch

from foredraft.api import load
from foredraft.errors import UsageError
from foredraft.server import processors
from foredraft.server.bodies import Tools
from foredraft.server.dialects import Dialect
from foredraft.server.processors import Constraint, matcher_of
from foredraft.server.running import Listening, listen
from foredraft.server.service import Service
from foredraft.server.speech import grammar_of
from support.toys import TOY

SITE = "https://a.page"
MANY = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}


@pytest.fixture(scope="module")
def generator():
    return load(TOY, method="auto", speculative_config={"table": "none"}, compile=False, dtype="float32")


@pytest.fixture(scope="module")
def tokens(generator):
    size = generator.target.vocabulary
    return llguidance.hf.from_tokenizer(generator.tokenizer, n_vocab=size, eos_token=list(generator.eos_token_ids()))


@pytest.fixture(scope="module")
def address(generator):
    listening = Listening(Service(generator, "toy", {"table": "none"}), port=0, origins=(SITE,))
    thread = threading.Thread(target=listening.run)
    thread.start()
    yield listening.address
    listening.stop()
    thread.join()


def asked(address, **fields):
    body = {"model": "toy", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 5, **fields}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)


def matched(tokens, shape):
    return matcher_of(tokens, grammar_of(shape, Tools(), Dialect(None, None), {}, None))


def written_by_a_lover_of_white_space(generator, tokens, schema, wanted):
    """Write `wanted`, except that white space comes first wherever it is allowed, but in strings; return the text."""
    tokenizer, ids = generator.tokenizer, []
    white = [token for token in range(tokens.vocab_size) if tokens.decode_bytes([token]).isspace()]
    constraint = Constraint(matched(tokens, schema), tokens.vocab_size, 0)
    for _ in range(400):
        scores = torch.zeros(1, tokens.vocab_size)
        written = "".join(tokenizer.decode(ids).split())
        for token in range(tokens.vocab_size):
            piece = tokens.decode_str([token])
            if piece and wanted.startswith(written + piece):
                scores[0, token] = len(piece)
        scores[0, white] = 0.0 if written.count('"') % 2 else 100.0
        scores[0, list(generator.eos_token_ids())] = 50.0  # it ends as soon as it may
        chosen = int(constraint(torch.tensor([ids], dtype=torch.int64), scores).argmax())
        if chosen in generator.eos_token_ids():
            return tokenizer.decode(ids)
        ids.append(chosen)
    raise AssertionError("it does not end")


@pytest.mark.slow
def test_json_of_a_model_that_loves_white_space_ends_whole(generator, tokens):
    wanted = {"names": ["ann", "bob", "cy"], "size": 12}
    compact = json.dumps(wanted, separators=(",", ":"))
    text = written_by_a_lover_of_white_space(generator, tokens, {"type": "object"}, compact)
    assert json.loads(text) == wanted
    assert "  " not in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (r"[^\s\S]", "No text matches"),
        ({"$ref": "#"}, "No text matches"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "No text matches"),
        ("(a", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ({"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}, "too big"),
    ],
)
@pytest.mark.slow
def test_a_format_that_cannot_be_followed_is_refused_with_the_reason(tokens, shape, reason):
    with pytest.raises(UsageError, match=reason):
        matched(tokens, shape)


@pytest.mark.slow
def test_a_format_that_takes_long_to_prepare_is_refused(tokens, monkeypatch):
    matched(tokens, "a|b")
    monkeypatch.setattr(processors, "_FORMAT_SECONDS", 0.0)
    with pytest.raises(UsageError, match="seconds to prepare; use a simpler one"):
        matched(tokens, "a|b")


@pytest.mark.slow
def test_an_object_of_a_thousand_optional_properties_can_be_written(generator, tokens):
    constraint, ids = Constraint(matched(tokens, MANY), tokens.vocab_size, 0), []
    for part in ('{"p', '7": "', 'x"', "}"):
        ids += generator.tokenizer(part, add_special_tokens=False).input_ids
        allowed = constraint(torch.tensor([ids]), torch.zeros(1, tokens.vocab_size)).isfinite()
        assert allowed.any()


@pytest.mark.slow
def test_formats_are_refused_and_prompts_too_long_for_any_tokens(address):
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"$ref": "#"}}}
    refused = asked(address, response_format=form)
    assert (refused.status_code, "No text matches" in refused.text) == (400, True)
    long = asked(address, messages=[{"role": "user", "content": "word " * 700_000}])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "characters" in long.json()["error"]["message"]


WORDS = "word " * 8000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": WORDS}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": WORDS}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "a", "reasoning_content": WORDS}]}),
    ],
)
def test_a_long_body_keeps_no_short_one_waiting(generator, monkeypatch, route, body):
    """Wherever its text is: here it is tokenized only when the short one is answered."""
    service, answered = Service(generator, "toy", {"table": "none"}), threading.Event()
    encode = service.encode

    def encoded(prompt, *more, **options):
        if len(str(prompt)) > 1000:
            assert answered.wait(20)
        return encode(prompt, *more, **options)

    monkeypatch.setattr(service, "encode", encoded)
    listening = Listening(service, port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(httpx.post, listening.address + route, json=body, timeout=60)
            time.sleep(0.5)  # it has arrived
            assert httpx.post(f"{listening.address}/tokenize", json={"prompt": "a"}, timeout=60).status_code == 200
            answered.set()
            assert long.result().status_code in (200, 400)
    finally:
        listening.stop()
        thread.join()


@pytest.mark.slow
def test_bodies_of_many_items_and_long_formats_are_refused_before_they_are_read(address):
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in (
        {"messages": [{"role": "user", "content": "a"}] * 5000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]},
        {"tools": [tool] * 5000},
    ):
        refused = asked(address, **fields)
        assert (refused.status_code, "at most 4096" in refused.text) == (400, True)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}
    refused = asked(address, messages=[parts] * 5)
    assert (refused.status_code, "at most 16384" in refused.text) == (400, True)
    refused = asked(address, response_format={"type": "regex", "pattern": "a(b|c)*" * 150_000})
    assert (refused.status_code, "1,050,0" in refused.text) == (400, True)


@pytest.mark.slow
def test_too_large_headers_are_refused_and_bodies_may_be_larger(address):
    with suppress(httpx.TransportError):  # the connection may be closed before all of them are sent
        assert httpx.get(f"{address}/health", headers={"x-a": "x" * 200_000}).status_code == 400
    assert httpx.get(f"{address}/health", headers={"x-a": "x" * 60_000}).status_code == 200
    with httpx.Client() as client:  # one connection
        text = "word " * 100_000
        for _ in range(2):
            counted = client.post(f"{address}/tokenize", content=" " * 500_000 + '{"prompt": "a"}', timeout=60)
            assert counted.status_code == 200
        assert client.post(f"{address}/v1/nothing", content=text).status_code == 404


def _sent(address, **fields):
    """A connection on which a whole request was sent."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"model": "toy", "prompt": "Hello.", "ignore_eos": True, **fields}).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_client_that_is_gone_is_cancelled(address, stream):
    def cancelled():
        line = re.search(r'finished_reason="abort",model_name="toy"} (\d+)', httpx.get(f"{address}/metrics").text)
        return int(line[1]) if line else 0

    before = cancelled()
    _sent(address, stream=stream, max_tokens=4000).close()
    until = time.monotonic() + 10
    while cancelled() == before:
        assert time.monotonic() < until, "it is still written"
        time.sleep(0.1)


def test_answers_are_sent_at_once():
    async def is_sent_at_once():
        taken = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda _, writer: taken.set_result(writer), sock=listening):
            _, client = await asyncio.open_connection(*listening.getsockname())
            accepted = await taken
            delay_is_off = accepted.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()
            accepted.close()
        return delay_is_off

    listening = listen("127.0.0.1", 0)
    assert asyncio.run(is_sent_at_once())


@pytest.mark.slow
def test_a_connection_stays_open_for_longer_than_httpx_keeps_it(address):
    """After 5 seconds httpx closes an idle connection; what it sends as the server closes one would be lost."""
    kept = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    kept.connect()
    kept.auto_open = 0  # it connects once
    for idle in (6, 0):
        kept.request("GET", "/health")
        answer = kept.getresponse()
        assert (answer.status, answer.read()) == (200, b"ok")
        time.sleep(idle)
    kept.close()


@pytest.mark.slow
def test_wrong_routes_and_methods_say_what_there_is(address):
    missing = httpx.post(f"{address}/v1/embeddings", json={})
    assert missing.status_code == 404
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    wrong = httpx.get(f"{address}/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert {httpx.head(f"{address}/{path}").status_code for path in ("", "health", "metrics", "v1/models")} == {200}


@pytest.mark.slow
def test_pages_of_an_allowed_site_may_use_the_server_and_those_of_others_may_not(address):
    url, body = f"{address}/tokenize", {"prompt": "a", "model": "toy"}
    asks = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = httpx.options(url, headers=asks)
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, SITE)
    allowed = httpx.post(url, json=body, headers={"Origin": SITE})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
    other = httpx.post(url, json=body, headers={"Origin": "https://another.page"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(generator):
    """A step may take no time here, so that pieces are as small as they may be."""
    batch, long, short = generator.batch(step_seconds=1e-9), list(range(5, 305)), [7, 8, 9]
    first, second = (generator.join(batch, ids, max_new_tokens=4, eos_token_id=()) for ids in (long, short))
    for _ in range(6):
        batch.step()
    assert second.ended, "it has written four tokens"
    assert 0 < int(first.seq.cache.length) < 100, "of which one piece was in each step"
    while len(batch):
        batch.step()
    for run, ids in ((first, long), (second, short)):
        assert generator.result(run).token_ids == generator.generate(ids, max_new_tokens=4, eos_token_id=()).token_ids
