"""Compiled models with recurrent layers: transformers' own texts, and the same bits whatever stands beside a row."""

import numpy as np
import pytest
import torch

from foredraft.api import Generator
from foredraft.contracts import Rows
from foredraft.drafters.none import NoDrafter
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.graph.tree import chain_parents
from foredraft.model.compiled.recurrence import Lineage
from foredraft.model.joint_passes import joint_passes
from foredraft.model.mask import seen_rows
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.batches import counted, drafters, emitted, leased
from support.compilation import compiled_once, model_of
from support.drafts import path_to
from support.families import GREEDY, prompt_of, random_tree, written
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in

NEW_TOKENS = 40
PROMPT = prompt_of(30)
SAMPLED = SamplingOptions(do_sample=True, temperature=0.7, seed=3)
SIZES = {
    "jamba": {"hidden_size": 64},
    "lfm3": {"hidden_size": 64},
    "qwen3_5_moe_text": {
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "moe_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi_linear": {
        "hidden_size": 64, "linear_head_dim": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "moe_intermediate_size": 32,
    },
    "mamba2": {"hidden_size": 64, "num_heads": 8},
}  # fmt: skip
"""Families that are compiled, with values of a multiple of 16 numbers. They have layers of Mamba; of a convolution
alone, beside a window; of the delta rule; of the same with decays of a key's numbers; and of Mamba-2, with no attention
beside them. Three have experts, and one latents, others of which are in tests/test_latents.py. More families with
Mamba-2 are in tests/test_compiled_kinds.py; one of the delta rule is in bfloat16 in tests/test_processors.py."""


@pytest.fixture(scope="module", params=list(SIZES))
def compiled(request, tmp_path_factory):
    """A compiled model as a target, and the model as it is."""
    model, own = (model_of(request.param, {"head_dim": 16, **SIZES[request.param]}) for _ in range(2))
    return compiled_once(model, tmp_path_factory.mktemp("compiled")), own


def after(target, tokens, count=None):
    """The scores of the last token of a text whose tokens after the first `count` are run one at a time."""
    cache, count = target.new_cache(), len(PROMPT) - 1 if count is None else count
    target.prefill(tokens[:count], cache)
    for place in range(count, len(tokens)):
        logits = target.forward(lay_out_text(tokens[place : place + 1], place), cache).logits
        cache.commit([0])
    return logits[0]


@pytest.mark.slow
def test_texts_equal_plain_texts_and_those_of_transformers(compiled):
    target, own = compiled
    for sampling in (GREEDY, SAMPLED):
        plain, _ = written(target, PROMPT, sampling, NoDrafter(), new_tokens=NEW_TOKENS)
        right = continuation_in(np.append(PROMPT, plain))
        for drafter in (RandomTreeDrafter(5), OracleDrafter(right), OracleDrafter(right, 1), AdversaryDrafter(right)):
            assert written(target, PROMPT, sampling, drafter, nodes=8, new_tokens=NEW_TOKENS)[0] == plain
        if sampling is GREEDY:
            ids = torch.from_numpy(PROMPT)[None]
            options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "pad_token_id": 0, "do_sample": False}
            theirs = own.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert plain == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_row_has_the_same_bits_in_a_pass_of_up_to_64_and_alone(compiled, shape, held):
    target, rng = compiled[0], np.random.default_rng(4)
    for rows in (6, 7, 8, 16, 33, 64):
        tokens, parents = random_tree(rng, rows - 1)
        parents = parents if shape == "tree" else chain_parents(rows - 1)
        layout, cache = lay_out(int(PROMPT[-1]), tokens, parents, len(PROMPT) - 1), target.new_cache()
        target.prefill(PROMPT[:-1], cache)
        found = []
        if held:  # the first rows are run by a pass before
            seen, (ids, at) = seen_rows(layout), (layout.token_ids, layout.positions)
            found.append(target.forward(Layout(ids[:held], at[:held], seen[:held, :held], layout.at), cache).logits)
            cache.hold()
            layout = Layout(ids[held:], at[held:], seen[held:], layout.at, at[:held])
        together = torch.cat([*found, target.forward(layout, cache).logits])
        for row in {0, rows // 2, rows - 1}:
            path, node = [], row - 1
            while node >= 0:
                path.insert(0, int(tokens[node]))
                node = int(parents[node])
            assert torch.equal(together[row], after(target, np.append(PROMPT, path).astype(np.int64)))


@pytest.mark.slow
def test_a_prompt_leaves_the_same_bits_whole_and_in_pieces(compiled):
    target, text = compiled[0], prompt_of(300)
    cache = target.new_cache()
    for start, end in ((0, 1), (1, 18), (18, 255), (255, 299)):
        target.run(lay_out_text(text[start:end], start), cache)
        cache.commit(range(end - start))
    assert torch.equal(target.forward(lay_out_text(text[299:], 299), cache).logits[0], after(target, text, 299))


@pytest.mark.slow
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(compiled):
    """Four texts in one pass, whose trees follow paths of the trees before, and each alone in a cache of its own."""
    target, rng = compiled[0], np.random.default_rng(8)
    batch = joint_passes(target, None)
    texts = [prompt_of(length) for length in (2, 30, 201, 70)]
    leases, alone = [leased(batch, ids) for ids in texts], [target.new_cache() for _ in texts]
    for ids, cache in zip(texts, alone, strict=True):
        target.prefill(ids[:-1], cache)
    for nodes in (0, 1, 3, 15, 5, 40, 0):
        trees = [random_tree(rng, nodes) for _ in texts]
        layouts = [lay_out(int(ids[-1]), *tree, len(ids) - 1) for ids, tree in zip(texts, trees, strict=True)]
        for lease, layout in zip(leases, layouts, strict=True):
            batch.reserve(lease, layout)
        together = batch.forward([Rows(*each) for each in zip(layouts, leases, strict=True)])
        for number, (result, layout, (tokens, parents)) in enumerate(zip(together, layouts, trees, strict=True)):
            assert torch.equal(result.scores.logits, target.forward(layout, alone[number]).logits)
            path = max((path_to(parents, node) for node in range(-1, nodes)), key=len)
            for cache in (leases[number], alone[number]):
                cache.commit([0, *(node + 1 for node in path[:-1])])
            texts[number] = np.append(texts[number], tokens[path] if path else rng.integers(1, 90, 1))


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("end", [30, 60, 45])
def test_a_reused_prefix_leaves_the_same_bits(compiled, end):
    """A second turn goes on at the end of the first one's prompt, of its text, or between the two."""
    target = compiled[0]
    batch, text = joint_passes(target, None), prompt_of(61)
    lease = leased(batch, text[:31])
    for place in range(30, 60):
        layout = lay_out_text(text[place : place + 1], place)
        batch.reserve(lease, layout)
        batch.forward([Rows(layout, lease)])
        lease.commit([0])
    batch.close(lease)
    turn = np.append(text[:end], prompt_of(80)[60:])
    again = batch.open(turn, 300, "")
    assert again.length == {30: 30, 60: 60, 45: 30}[end]
    batch.close(again)
    again = leased(batch, turn)
    last = lay_out_text(turn[-1:], len(turn) - 1)
    batch.reserve(again, last)
    (result,) = batch.forward([Rows(last, again)])
    assert torch.equal(result.scores.logits[0], after(target, turn, len(turn) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [False, True], ids=["whole passes", "passes in parts"])
def test_texts_in_shared_passes_are_those_of_plain_decoding(compiled, parts, monkeypatch):
    """Also where a pass of several texts finds no memory, and each has then one of its own."""
    target = compiled[0]
    writer, given = Generator(target, None, method="none", nodes=9), [prompt_of(20 + 9 * number) for number in range(8)]
    expected = [written(target, prompt, GREEDY, NoDrafter(), new_tokens=NEW_TOKENS)[0] for prompt in given]
    batch, runs = writer.batch(), []
    passes = counted(batch, monkeypatch)
    theirs = type(batch.passes._run).__call__

    def limited(self, *arguments):
        if parts and len(Lineage(*arguments[6]).sequences) > 1:
            raise MemoryError
        return theirs(self, *arguments)

    monkeypatch.setattr(type(batch.passes._run), "__call__", limited)
    for number, (prompt, text) in enumerate(zip(given, expected, strict=True)):
        drafter = drafters(prompt, text)[number % 4]
        runs.append(batch.join(writer.begin(prompt, GREEDY, max_new_tokens=NEW_TOKENS, drafter=drafter)))
    while len(batch):
        batch.step()
    assert [emitted(run) for run in runs] == expected
    assert parts or len(passes) < 2 * NEW_TOKENS


@pytest.mark.slow
def test_a_batch_goes_on_compiled_after_the_text_during_which_the_model_was_compiled(compiled):
    target = compiled[0]
    expected, _ = written(target, PROMPT, GREEDY, NoDrafter(), new_tokens=NEW_TOKENS)
    later = TorchTarget(target.model)
    writer = Generator(later, None, method="none")
    batch = writer.batch()
    for number in range(3):
        run = batch.join(writer.begin(PROMPT, GREEDY, max_new_tokens=NEW_TOKENS))
        batch.step()
        later.compiled = target.compiled
        while len(batch):
            batch.step()
        assert run.cached_tokens == (0, 0, len(PROMPT) - 1)[number]
        if number:
            assert emitted(run) == expected
