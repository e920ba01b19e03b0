"""Every supported model family, tiny and random: tree rows, plain decoding and every drafter, exactly.

Also which models are refused, with which sentence. Weights are scaled up, as the usual initialisation scores all tokens
nearly alike and writes one token for ever.
"""

import copy
from functools import wraps

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedConfig

from foredraft.contracts import SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import UnsupportedModelError
from foredraft.graph.layout import lay_out
from foredraft.model.growth import Rollout
from foredraft.model.loading import load_model
from foredraft.model.support import cache_argument, inspect
from foredraft.model.target import TorchTarget
from support.drafts import path_to
from support.families import (
    FAMILIES,
    LONG,
    NEW_TOKENS,
    SETTINGS,
    SHORT,
    VOCABULARY,
    WINDOW,
    configuration,
    each_of,
    of_families,
    plain,
    prompt_of,
    random_tree,
    target_of,
    tiny_model,
    written,
)
from support.outlines import assert_outlined
from support.pairs import pairs
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in

DRAFTERS = ("oracle", "adversary", "random", "prompt_lookup", "adaptix", "draft_graph", "lookahead")
RUNS = pairs(list(FAMILIES), DRAFTERS, list(SETTINGS))
RUNS += [("llama", "rest", "T=0.7 top_p=0.9")]  # it drafts from the text alone, as prompt_lookup does
RUNS += [(family, "draft_model", "greedy") for family in FAMILIES]  # the family drafts for itself


QUICK = ("llama", "gpt2", "gemma3_text")
FAMILY = each_of(FAMILIES, QUICK)


@FAMILY
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_without_weights_is_described_as_with_them(family, saved, tmp_path):
    tiny_model(configuration(family)).to(saved).save_pretrained(tmp_path)
    for dtype in ("auto", "float32"):
        assert_outlined(str(tmp_path), dtype)
    (tmp_path / "generation_config.json").unlink()  # the configuration then says which tokens end a text
    assert_outlined(str(tmp_path), "auto")


def drafter_of(family, name, prompt, text):
    known = continuation_in(np.concatenate([prompt, np.array(text, np.int64)]))
    if name == "oracle":
        return OracleDrafter(known, distractors=1, vocabulary=VOCABULARY)
    if name == "adversary":
        return AdversaryDrafter(known, vocabulary=VOCABULARY)
    if name == "random":
        return RandomTreeDrafter(5, vocabulary=VOCABULARY)
    resources = Resources(VOCABULARY, draft_model=lambda _: target_of(family))
    options = {"model": "itself", "least_probability": 0.0} if name.startswith("draft_") else {}
    return make_drafter(name, {"table": "none"} if name == "adaptix" else options, resources)


def worst_row_error(target, ids, cache, rng):
    """The largest relative error between a tree's rows and full forwards of transformers' own."""
    tokens, parents = random_tree(rng, 10)
    rows = target.forward(lay_out(int(ids[-1]), tokens, parents, len(ids) - 1), cache).logits
    paths = [path_to(parents, node) for node in range(-1, len(tokens))]
    errors = []
    for row, path in enumerate(paths):
        full = torch.from_numpy(np.concatenate([ids, tokens[path].astype(np.int64)]))[None]
        with torch.inference_mode():
            expected = target.model(full, attention_mask=torch.ones_like(full)).logits[0, -1]
        errors.append(float((rows[row] - expected).norm() / expected.norm()))
    path = paths[int(rng.integers(1, len(paths)))]
    cache.commit([0, *(node + 1 for node in path[:-1])])
    return max(errors), np.concatenate([ids, tokens[path].astype(np.int64)])


def test_attention_caps_its_scores_where_the_configuration_says_so(tmp_path):
    """Before 5.21, transformers took `sdpa`, which does not."""
    tiny_model(configuration("gemma2")).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").config._attn_implementation == "eager"


@FAMILY
def test_the_configuration_has_the_layers_that_the_test_is_about(family):
    support = inspect(configuration(family))
    assert support.tested
    assert support.family == family
    assert (WINDOW in support.windows) is ("sliding_window" in FAMILIES[family])
    if family in ("qwen2", "gemma2", "gemma3_text", "gpt_oss", "cohere2"):
        assert set(support.layer_types) == {"full_attention", "sliding_attention"}


@FAMILY
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_tree_rows_equal_full_forwards(family, length):
    target, ids, rng = target_of(family), prompt_of(length), np.random.default_rng(2)
    cache = target.new_cache()
    target.prefill(ids[:-1], cache)
    for _ in range(3):  # the second and third tree stand on what was committed of the one before
        error, ids = worst_row_error(target, ids, cache, rng)
        assert error < 1e-4


def full_scores(target, ids):
    full = torch.from_numpy(ids)[None]
    with torch.inference_mode():
        return target.model(full, attention_mask=torch.ones_like(full)).logits[0, -1]


def error_of(row, expected):
    return float((row - expected).norm() / expected.norm())


@FAMILY
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_tree_grown_level_by_level_scores_as_full_forwards_do(family, length):
    target, ids, rng = target_of(family), prompt_of(length), np.random.default_rng(3)
    rollout = Rollout(target, most_rows=12)
    for _ in range(4):  # each tree stands on what was kept of the one before, and on tokens it did not draft
        assert error_of(rollout.start(SequenceView(ids, len(ids)))[0], full_scores(target, ids)) < 1e-4
        paths = {-1: ids}
        for count in (2, 4, 5):
            parents = rng.choice(sorted(paths), count).astype(np.int32)
            tokens = rng.permutation(np.arange(1, VOCABULARY))[:count].astype(np.int32)
            rows = rollout.expand(tokens, parents)
            start = len(paths) - 1
            for i in range(count):
                paths[start + i] = np.append(paths[int(parents[i])], tokens[i])
                assert error_of(rows[i], full_scores(target, paths[start + i])) < 1e-4
        kept = max(paths, key=lambda row: len(paths[row]))
        path = [row for row in sorted(paths) if row >= 0 and np.array_equal(paths[row], paths[kept][: len(paths[row])])]
        rollout.keep(path)
        assert rollout._cache.length == len(ids) + len(path)
        ids = np.append(paths[kept], rng.integers(1, VOCABULARY, rng.integers(1, 4)))


@FAMILY
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_plain_decoding_equals_transformers_generate(family, length):
    text = plain(family, length, "greedy")
    prompt = torch.from_numpy(prompt_of(length))[None]
    out = target_of(family).model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[],
        pad_token_id=0,
    )  # fmt: skip
    assert text == out[0, length:].tolist()
    assert len(set(text)) > 3, "a text of one repeated token would hide mistakes"


@of_families(("family", "name", "setting"), RUNS, QUICK)
def test_drafted_text_equals_plain_text(family, name, setting):
    length = SHORT if name in ("oracle", "prompt_lookup") else LONG
    text = plain(family, length, setting)
    prompt = prompt_of(length)
    drafted, records = written(target_of(family), prompt, SETTINGS[setting], drafter_of(family, name, prompt, text))
    assert drafted == text
    if name in ("oracle", "draft_model"):  # both know how the text goes on
        assert len(records) <= NEW_TOKENS // 5
    if name == "adversary":
        assert len(records) == NEW_TOKENS
        assert sum(record.drafted for record in records) > NEW_TOKENS


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_sliding_layer_does_not_keep_the_whole_context(family):
    target = target_of(family)
    cache = target.new_cache()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 700).astype(np.int64)
    for start in range(0, len(ids), 50):
        target.prefill(ids[start : start + 50], cache)
    assert cache.length == cache.get_seq_length() == 700
    assert cache.spans[WINDOW].capacity <= 256
    for layer in cache.layers:
        assert layer.keys.shape[-2] == layer.span.capacity
        assert layer.get_seq_length() == 700
    if None in cache.spans:
        assert 700 <= cache.spans[None].capacity < 1000


def configured(model_type="odd", **fields):
    """A configuration of a family that transformers does not have."""
    config = PreTrainedConfig()
    vars(config).update(fields, model_type=model_type)
    return config


REFUSED = {
    "bloom": (lambda: AutoConfig.for_model("bloom"), "ALiBi"),
    "mpt": (lambda: AutoConfig.for_model("mpt"), "ALiBi"),
    "falcon with alibi": (lambda: AutoConfig.for_model("falcon", alibi=True), "ALiBi.*rotary or learned"),
    "rwkv": (lambda: AutoConfig.for_model("rwkv"), "recurrent state"),
    "a state without types of layers": (lambda: configured(num_hidden_layers=1, state_size=16), "recurrent state"),
    "gpt_neo": (lambda: AutoConfig.for_model("gpt_neo"), "Layer 1.*local_attention.*row's index"),
    "unknown layers": (lambda: configured(num_hidden_layers=1, layer_types=["strange"]), "Layer 0.*strange"),
    "t5": (lambda: AutoConfig.for_model("t5"), "encoder-decoder"),
    "gemma3 as an encoder": (lambda: AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True), "encoder"),
    "musicgen": (lambda: AutoConfig.for_model("musicgen"), "encoder-decoder"),
    "an assistant": (lambda: AutoConfig.for_model("gemma4_unified_assistant"), "drafts for another model"),
    "sliding without a window": (
        lambda: configured(num_hidden_layers=1, layer_types=["sliding_attention"]), "sets no sliding_window",
    ),
    "a window that is not read": (
        lambda: AutoConfig.for_model("llama", sliding_window=5), "sets sliding_window 5, which the code of llama",
    ),
    "layers that differ": (
        lambda: AutoConfig.for_model("qwen3", per_layer_config={0: {"sliding_window": 5}}), "differ.*sliding_window",
    ),
    "llama as an encoder": (lambda: AutoConfig.for_model("llama", is_causal=False), "encoder"),
    "short chunks": (lambda: AutoConfig.for_model("llama4_text", attention_chunk_size=64), "chunk_size is 64.*1025 on"),
    "without layers": (configured, "no stack of decoder layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_verified_is_refused_with_a_sentence(name):
    config, says = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        inspect(config())
    assert str(caught.value).endswith((".", ")."))


def test_a_model_that_also_sees_is_refused_for_its_text_model():
    text = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30}
    with pytest.raises(UnsupportedModelError, match=r"this minimax_m3_vl_text model is of type.*blocks of tokens"):
        inspect(AutoConfig.for_model("minimax_m3_vl", text_config=text))


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "mllama"])
def test_a_model_that_also_sees_is_described_by_its_text_model(name):
    config = AutoConfig.for_model(name)
    assert inspect(config) == inspect(config.get_text_config())
    assert inspect(config).family == config.text_config.model_type


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_change_with_the_length_limit_the_window(rope):
    support = inspect(llama_with(rope))
    assert support.window == 100
    assert rope in support.window_note
    assert "100 of 400" in support.window_note


def llama_with(rope):
    parameters = {"rope_type": rope, "original_max_position_embeddings": 100}
    return configured("llama", num_hidden_layers=1, max_position_embeddings=400, rope_parameters=parameters)


def test_other_positions_leave_the_window_as_it_is():
    assert (inspect(llama_with("yarn")).window, inspect(llama_with("yarn")).window_note) == (400, "")
    assert inspect(configured("llama", num_hidden_layers=1)).window is None


def test_the_window_of_a_decoder_with_learned_positions_is_their_number():
    whisper = AutoConfig.for_model("whisper", is_encoder_decoder=False, is_decoder=True)
    assert inspect(whisper).window == whisper.max_target_positions == 448
    assert inspect(AutoConfig.for_model("gpt2", n_positions=77)).window == 77


def test_attention_that_depends_on_a_rows_index_limits_the_window_to_where_it_does_not():
    llama4, doge = inspect(AutoConfig.for_model("llama4_text")), inspect(AutoConfig.for_model("doge"))
    assert llama4.window == 8192 - 1024
    assert doge.window == inspect(AutoConfig.for_model("doge", keep_window_size=10**6)).window == 2048
    assert "row's index" in llama4.window_note
    assert inspect(AutoConfig.for_model("doge", keep_window_size=77)).window == 77
    for family in ("deepseek_v32", "glm_moe_dsa", "dots3_note"):
        indexed = inspect(AutoConfig.for_model(family))
        assert indexed.window == 2048
        assert "chooses the tokens" in indexed.window_note


def untested(forward_of):
    """A tiny llama under a family name that foredraft does not know, with a forward of its own."""
    model = copy.deepcopy(target_of("llama").model)
    model.config.model_type = "unheard_of"
    original = model.forward
    model.forward = wraps(original)(lambda **given: original(**forward_of(given)))
    return model


def test_an_untested_family_that_scores_rightly_is_accepted():
    target = TorchTarget(untested(lambda given: given))
    assert not target.support.tested


def ignores_the_mask(given):
    mask = given["attention_mask"]
    if mask is not None and mask.ndim == 4:  # a causal triangle instead: siblings see each other
        rows, stored = mask.shape[-2], mask.shape[-1] - mask.shape[-2]
        blocked = ~torch.ones(rows, mask.shape[-1]).tril(stored).bool()
        mask = torch.zeros_like(mask).masked_fill(blocked, torch.finfo(mask.dtype).min)
    return {**given, "attention_mask": mask}


def ignores_positions(given):
    positions = given["position_ids"]
    count = positions.shape[1]
    return {**given, "position_ids": positions[:, :1] + torch.arange(count)}


@pytest.mark.parametrize("mistake", [ignores_the_mask, ignores_positions])
def test_the_probe_refuses_an_untested_family_that_scores_tree_rows_wrongly(mistake):
    with pytest.raises(UnsupportedModelError, match="differently after a rejected draft or inside a tree"):
        TorchTarget(untested(mistake))


def raises_an_error(given):
    if given["attention_mask"].ndim == 4:
        raise IndexError("too many indices")
    return given


def test_what_the_code_of_an_untested_family_raises_is_a_sentence():
    with pytest.raises(UnsupportedModelError, match=r"does not run with .*\(IndexError: too many indices\)"):
        TorchTarget(untested(raises_an_error))


def running_sum(states, before):
    """What a recurrent layer adds to each row, and what it keeps: the sum of all states up to there."""
    sums = before + states.cumsum(1)
    return sums, sums[:, -1:]


def token_shift(states, before):
    """The state of the row before, as in RWKV."""
    return torch.cat([before, states[:, :-1]], 1), states[:, -1:]


def with_hidden_state(recurrence, *, in_the_cache):
    """A tiny llama under an unknown name whose first layer has a recurrent state beside its attention."""
    model = untested(lambda given: given)
    layer = model.model.layers[0]

    def recur(layer, _args, given, output):
        cache = given.get("past_key_values", given.get("cache"))
        holder = cache if in_the_cache and cache is not None else layer
        first = cache is None or cache.get_seq_length(1) == 0  # the last layer has not been written to
        before = torch.zeros_like(output[:, :1]) if first else holder.hidden_state
        added, holder.hidden_state = recurrence(output, before)
        return output + 0.1 * added

    layer.register_forward_hook(recur, with_kwargs=True)
    return model


def scores_in_passes(model, ids, most):
    """The logits after each token, of plain passes of `most` tokens with transformers' own cache."""
    given = {"attention_mask": None, "position_ids": None, cache_argument(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        passes = [model(input_ids=part, **given) for part in torch.from_numpy(ids)[None].split(most, 1)]
    return torch.cat([each.logits[0] for each in passes])


@pytest.mark.parametrize("in_the_cache", [False, True])
@pytest.mark.parametrize("recurrence", [running_sum, token_shift])
def test_the_probe_refuses_a_hidden_recurrent_state(recurrence, in_the_cache):
    model, ids = with_hidden_state(recurrence, in_the_cache=in_the_cache), prompt_of(SHORT)
    at_once = scores_in_passes(model, ids, SHORT)
    torch.testing.assert_close(scores_in_passes(model, ids, 1), at_once)  # so plain decoding shows nothing
    inspect(model.config)  # nor does the configuration
    with pytest.raises(UnsupportedModelError, match=r"rejected draft .* as models with a recurrent state"):
        TorchTarget(model)
