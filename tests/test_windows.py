"""Models with sliding windows and states in batches: passes that texts share, and prefixes that are computed once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedTokenizerFast

from foredraft.api import Generator
from foredraft.contracts import Rows
from foredraft.engine.batch import steps, write_all
from foredraft.graph.layout import lay_out, lay_out_text
from foredraft.model.joint_passes import JointPasses, joint_passes
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.server.running import Listening
from foredraft.server.service import Service
from support.batches import counted, drafters, emitted, finish, leased, streamed, theirs
from support.causal_types import tiny_configuration
from support.compilation import GEMMA4, compiled_once, model_of
from support.drafts import path_to
from support.families import VOCABULARY, WINDOW, random_tree, tiny_model
from support.tokenizers import word_tokenizer, words

SLIDING, FULL = "sliding_attention", "full_attention"
_USUAL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "sliding_window": WINDOW, "tie_word_embeddings": False,
    "layer_types": [SLIDING, SLIDING, FULL], "num_hidden_layers": 3,
}  # fmt: skip
SHAPES = {
    "gemma3_text": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": [SLIDING, FULL, SLIDING]},
    "ministral": {"layer_types": [SLIDING] * 3},
    "gemma4_text": {  # of which two layers read the keys of others, and whole attention has larger heads
        "num_hidden_layers": 5, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
        "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    },
}  # fmt: skip
STATES = ("lfm2", "qwen3_next", "kimi_linear", "bamba", "falcon_h1", "mamba", "recurrent_gemma")
"""Families with a convolution alone, the delta rule, Mamba-2 and others; one has attention in the same layers."""
pytestmark = pytest.mark.slow
EACH_WINDOW = pytest.mark.parametrize("family", SHAPES)
EACH = pytest.mark.parametrize("family", [*SHAPES, *STATES])
NEW_TOKENS = 3 * WINDOW


@pytest.fixture(scope="module")
def made():
    """The target of each family, made once."""
    targets = {}

    def target_of(family):
        if family not in targets:
            ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
            if family in SHAPES:
                given = _USUAL | SHAPES[family]
                config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **ids, **given)
            else:
                config = tiny_configuration(family)
                config.max_position_embeddings = 2048
            targets[family] = TorchTarget(tiny_model(config))
        return targets[family]

    return target_of


def prompts(count):
    """Prompts from half a window to several windows long."""
    rng = np.random.default_rng(count)
    return [rng.integers(1, VOCABULARY, 8 + 11 * number).astype(np.int64) for number in range(count)]


@pytest.mark.parametrize(
    ("family", "count"),
    [(family, 8) for family in (*SHAPES, *STATES)]
    + [(family, count) for family in ("gemma3_text", "bamba") for count in (1, 4)],
)
def test_drafted_texts_in_shared_passes_are_transformers_own(made, family, count, monkeypatch):
    target = made(family)
    writer = Generator(target, None, method="none", nodes=9)
    batch, runs = writer.batch(), []
    passes = counted(batch, monkeypatch)
    expected = [theirs(target, prompt, NEW_TOKENS) for prompt in prompts(count)]
    for number, (prompt, text) in enumerate(zip(prompts(count), expected, strict=True)):
        drafter = drafters(prompt, text)[number % 4]
        runs.append(batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=NEW_TOKENS, drafter=drafter)))
    while len(batch):
        batch.step()
    assert [emitted(run) for run in runs] == expected
    assert len(passes) <= NEW_TOKENS + 2 + sum(map(len, prompts(count))) // 64
    assert sum(len(run.records) for run in runs) > NEW_TOKENS or count == 1


@EACH_WINDOW
def test_a_prefix_is_reused_after_wrong_drafts_and_a_cancelled_stream(made, family, monkeypatch):
    """A, half of B, A again, then a new end after what both share: each text is the one that is written alone."""
    target, rng = made(family), np.random.default_rng(6)
    writer = Generator(target, None, method="none", nodes=9)
    batch = writer.conversation()
    passes = counted(batch, monkeypatch)
    system, *ends = (rng.integers(1, VOCABULARY, size).astype(np.int64) for size in (5 * WINDOW + 3, 20, 31, 7))
    one, other, third = (np.append(system, end) for end in ends)

    def write(prompt, drafter, known, most=NEW_TOKENS):
        passes.clear()
        expected = theirs(target, prompt, NEW_TOKENS)
        run, text = streamed(writer, batch, prompt, drafters(prompt, expected)[drafter], NEW_TOKENS, most)
        assert run.cached_tokens == known
        assert text == (expected if most == NEW_TOKENS else expected[: len(text)])
        return np.append(prompt, text)

    write(one, 2, 0)
    write(other, 3, len(system), most=10)
    again = write(one, 3, len(one) - 1)
    assert passes[0] < 11, "the prompt was computed again"
    write(again, 2, len(again) - 1)
    write(third, 0, len(system))


@pytest.mark.parametrize("family", STATES)
def test_a_prefix_is_reused_where_a_state_was_kept(made, family, monkeypatch):
    """A, half of B, A again; then on from the ends of turns, from a prompt's end, and from the middle of a long one."""
    target, rng = made(family), np.random.default_rng(6)
    writer = Generator(target, None, method="none", nodes=9)
    batch = writer.conversation()
    passes = counted(batch, monkeypatch)
    system, end, *ends = (rng.integers(1, VOCABULARY, size).astype(np.int64) for size in (83, 20, 31, 7, 530, 12, 30))
    one, other = np.append(system, end), np.append(system, ends[0])

    def write(prompt, drafter, known, most=24):
        passes.clear()
        expected = theirs(target, prompt, 24)
        run, text = streamed(writer, batch, prompt, drafters(prompt, expected)[drafter], 24, most)
        assert run.cached_tokens == known
        computed = -(-(len(prompt) - 1 - known) // 256)  # passes of prompts, which hold 256 rows
        assert sum(passes[:computed]) == len(prompt) - 1 - known
        assert text == expected[: len(text)]
        return np.append(prompt, text)

    first = write(one, 2, 0)
    half = write(other, 3, 0, most=10)
    write(one, 3, len(one) - 1)
    write(first, 2, len(first) - 1)
    write(np.append(half, ends[1]), 0, len(half) - 1)
    write(np.append(first[: len(one) + 5], ends[1]), 3, len(one) - 1)  # as templates that drop a part of the answer
    write(np.append(ends[2], ends[3]), 1, 0)
    write(np.append(ends[2], ends[4]), 2, 512)


def test_states_that_find_no_room_are_those_least_recently_used(made):
    """In room for few states each of many texts is written, four at once; a later one can only use what is left."""
    target = made("bamba")
    size = joint_passes(target, None)._run.state_size
    writer = Generator(target, None, method="none", nodes=9)
    batch, given = writer.batch(40 * size), prompts(12)
    expected = [theirs(target, prompt, NEW_TOKENS) for prompt in given]
    for _ in range(2):
        texts = (
            writer.begin(prompt, SamplingOptions(), max_new_tokens=NEW_TOKENS, drafter=drafters(prompt, text)[3])
            for prompt, text in zip(given, expected, strict=True)
        )
        assert [emitted(run) for run in write_all(batch, texts, 4)] == expected


@EACH
@torch.inference_mode()
def test_rows_of_several_trees_score_as_full_forwards_do(made, family):
    """Texts of other lengths in one pass; the second and third trees stand on a path through the one before."""
    target, rng = made(family), np.random.default_rng(4)
    batch = joint_passes(target, None)
    texts = [rng.integers(1, VOCABULARY, length) for length in (2, WINDOW, 3 * WINDOW + 5, 9 * WINDOW)]
    leases = [leased(batch, ids) for ids in texts]
    for _ in range(3):
        trees = [random_tree(rng, 12) for _ in texts]
        layouts = [lay_out(int(ids[-1]), *tree, len(ids) - 1) for ids, tree in zip(texts, trees, strict=True)]
        for lease, layout in zip(leases, layouts, strict=True):
            batch.reserve(lease, layout)
        results = batch.forward([Rows(*each) for each in zip(layouts, leases, strict=True)])
        for number, ((tokens, parents), result) in enumerate(zip(trees, results, strict=True)):
            paths = [path_to(parents, node) for node in range(-1, len(tokens))]
            for row, path in enumerate(paths):
                full = torch.from_numpy(np.concatenate([texts[number], tokens[path].astype(np.int64)]))[None]
                expected = target.model(full, attention_mask=torch.ones_like(full)).logits[0, -1]
                assert (result.scores.logits[row] - expected).norm() < 1e-4 * expected.norm()
            path = max(paths, key=len)
            leases[number].commit([0, *(node + 1 for node in path[:-1])])
            texts[number] = np.concatenate([texts[number], tokens[path].astype(np.int64)])


def test_keys_are_computed_from_latents_of_slots_in_use_alone(made):
    """Kimi's attention computes keys from what it keeps; the memory for keys and values may hold far more texts."""
    target, seen = made("kimi_linear"), []
    batch = Generator(target, None, method="none").batch(cache_bytes=1 << 28)
    (latents,) = (each for name, each in target.model.named_modules() if name.endswith("kv_b_proj"))
    hook = latents.register_forward_pre_hook(lambda _module, given: seen.append(given[0].shape[-2]))
    for length in (9, 30):
        prompt = np.arange(length, dtype=np.int64)
        batch.join(Generator(target, None, method="none").begin(prompt, SamplingOptions(), max_new_tokens=4))
    try:
        finish(batch)
    finally:
        hook.remove()
    assert 0 < max(seen) < 4096 < batch.passes._arena.most_slots


@pytest.fixture(scope="module")
def compiled(packages):
    """The model of Gemma 4's shape as a target whose forward is compiled."""
    return compiled_once(model_of("gemma4_text", GEMMA4), packages)


def test_a_row_of_a_compiled_model_has_the_same_bits_in_any_company(compiled):
    """Alone in a cache that keeps windows, and among others in one that keeps all; 1 to 64 rows."""
    rng, batch = np.random.default_rng(8), joint_passes(compiled, None)
    assert isinstance(batch, JointPasses)
    texts = [rng.integers(1, VOCABULARY, length) for length in (3, WINDOW, 5 * WINDOW - 1, 201)]
    leases, alone = [leased(batch, ids) for ids in texts], [compiled.new_cache() for _ in texts]
    for ids, cache in zip(texts, alone, strict=True):
        compiled.prefill(ids[:-1], cache)
    for nodes in (0, 1, 3, 15, 5, 0):
        layouts = [
            lay_out(int(ids[-1]), *random_tree(rng, nodes), each.length)
            for ids, each in zip(texts, leases, strict=True)
        ]
        for lease, layout in zip(leases, layouts, strict=True):
            batch.reserve(lease, layout)
        together = batch.forward([Rows(*each) for each in zip(layouts, leases, strict=True)])
        for number, (result, layout) in enumerate(zip(together, layouts, strict=True)):
            assert torch.equal(result.scores.logits, compiled.forward(layout, alone[number]).logits)
            leases[number].commit([0])
            alone[number].commit([0])
            by_itself = compiled.new_cache()
            compiled.prefill(leases[number].tokens[:-1], by_itself)
            last = lay_out_text(layout.token_ids[:1], layout.at)
            assert torch.equal(compiled.forward(last, by_itself).logits[0], result.scores.logits[0])


def test_texts_of_a_compiled_model_are_those_of_plain_decoding(compiled, monkeypatch):
    writer = Generator(compiled, None, method="none", nodes=9)
    plain = [writer.begin(prompt, SamplingOptions(), max_new_tokens=NEW_TOKENS) for prompt in prompts(8)]
    expected = [[token for record in steps(run) for token in record.emitted] for run in plain]
    batch = writer.batch()
    passes, runs = counted(batch, monkeypatch), []
    for number, (prompt, text) in enumerate(zip(prompts(8), expected, strict=True)):
        drafter = drafters(prompt, text)[number % 4]
        runs.append(batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=NEW_TOKENS, drafter=drafter)))
    while len(batch):
        batch.step()
    assert [emitted(run) for run in runs] == expected
    assert len(passes) < 2 * NEW_TOKENS


@pytest.fixture(params=["gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "bamba"])
def server(request, made):
    """A server over one of the models, and the rows of each of its passes."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(VOCABULARY))
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }} {% endfor %}"
    service = Service(Generator(made(request.param), tokenizer, method="none"), "tiny", {})
    with pytest.MonkeyPatch.context() as patches:
        passes = counted(service.writer.batch, patches)
        listening = Listening(service, port=0)
        thread = threading.Thread(target=listening.run)
        thread.start()
        yield f"{listening.address}/v1/chat/completions", service, passes
        listening.stop()
        thread.join()


def asked(url, messages, tokens):
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()


def test_a_server_computes_the_turns_before_once(server):
    url, service, passes = server
    messages = [{"role": "system", "content": words(range(2, 92))}, {"role": "user", "content": words(range(20, 50))}]
    first = asked(url, messages, 40)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = first["choices"][0]["message"]
    follow = [*messages, answer, {"role": "user", "content": words(range(5, 12))}]
    passes.clear()
    second = asked(url, follow, 40)
    print(second["usage"], passes)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 90 + 30 + 40 - 1
    assert sum(passes) == 7 + 1 + 39, "only the new words are computed"
    prompt = service.encode(follow)
    expected = theirs(service.generator.target, prompt, 40)
    assert second["choices"][0]["message"]["content"].split() == words(expected).split()


def test_a_servers_streams_share_passes(server):
    url, service, passes = server
    questions = [[{"role": "user", "content": words(range(2 + number, 50))}] for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda question: asked(url, question, 60), questions))
    print(len(passes), passes)
    assert len(passes) < 2 * 60, "eight texts of 60 tokens"
    assert max(passes) >= 8
    for question, answer in zip(questions, answers, strict=True):
        expected = theirs(service.generator.target, service.encode(question), 60)
        assert answer["choices"][0]["message"]["content"].split() == words(expected).split()
