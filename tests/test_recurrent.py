"""Models with recurrent layers: rows of chains and trees, and of wrong branches, score as transformers' own forward.

The truth is one pass of the unchanged model over the whole text, without a cache.
"""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from foredraft.api import Generator
from foredraft.drafters import Resources, make_drafter
from foredraft.engine.batch import steps
from foredraft.errors import UnsupportedModelError, UsageError
from foredraft.graph.layout import Layout, lay_out, lay_out_text
from foredraft.graph.tree import depths
from foredraft.model.compiled.build import compile_forward
from foredraft.model.families import TESTED_FAMILIES
from foredraft.model.heads import ExitHead, exit_model
from foredraft.model.mask import seen_rows
from foredraft.model.recurrent import adoption
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support.batches import emitted, theirs
from support.causal_types import STATES, tiny_configuration
from support.families import GREEDY, VOCABULARY, prompt_of, random_tree, tiny_model, written
from support.scripted import RandomTreeDrafter

KINDS = ("lfm2", "qwen3_next", "kimi_linear", "bamba", "nemotron_h", "falcon_h1", "mamba", "zamba", "recurrent_gemma")
"""One family of each operator, and those with attention beside it, several scans in a layer, or code of their own."""
QUICK = ("lfm2", "qwen3_next")
TOLERANCE = 1e-4  # of the largest score; transformers keeps states in float32
each_kind = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in KINDS]
)


def model_of(family):
    return tiny_model(tiny_configuration(family))


def path_of(node, parents):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(parents[node])
    return path


def error_of(logits, text, own):
    """The largest difference from the model's scores after `text`, relative to the largest score."""
    with torch.inference_mode():
        expected = own(torch.from_numpy(np.array(text, np.int64))[None], use_cache=False).logits[0, -1]
    return float((logits - expected).abs().max() / expected.abs().max())


def in_two_passes(target, layout, cache):
    """Logits of a layout's rows, run in two passes, the first one's rows held."""
    cut, seen = layout.rows // 2, seen_rows(layout)
    first = Layout(layout.token_ids[:cut], layout.positions[:cut], seen[:cut, :cut], layout.at)
    logits = target.forward(first, cache).logits
    cache.hold()
    rest = Layout(layout.token_ids[cut:], layout.positions[cut:], seen[cut:], layout.at, layout.positions[:cut])
    return torch.cat([logits, target.forward(rest, cache).logits])


@each_kind
@pytest.mark.parametrize("held", [False, True], ids=["one pass", "held rows"])
def test_every_row_of_a_tree_scores_as_the_model_scores_its_path(family, held):
    """The deepest path is committed each time: a wrong state after a rejected draft would show in all later rows."""
    own = model_of(family)
    target, rng = TorchTarget(copy.deepcopy(own)), np.random.default_rng(3)
    prompt = prompt_of(23)
    cache = target.new_cache()
    target.prefill(prompt[:9], cache)
    target.prefill(prompt[9:-1], cache)
    cache.prompt = 10**6  # one pass of the model takes all tokens for its prompt's
    text = prompt.tolist()
    for _ in range(4):
        tokens, parents = random_tree(rng, int(rng.integers(5, 12)))
        layout = lay_out(text[-1], tokens, parents, len(text) - 1)
        logits = in_two_passes(target, layout, cache) if held else target.forward(layout, cache).logits
        for node in range(len(tokens)):
            path = path_of(node, parents)
            assert error_of(logits[node + 1], text + [int(tokens[each]) for each in path], own) < TOLERANCE
        path = path_of(int(np.argmax(depths(parents))), parents)
        cache.commit([0, *(each + 1 for each in path[:-1])])  # the last one is the next root
        text += [int(tokens[each]) for each in path]


@each_kind
def test_a_pass_that_fails_changes_nothing(family):
    target = TorchTarget(model_of(family))
    cache, layout = target.new_cache(), lay_out(5, np.array([7, 8, 9], np.int32), np.array([-1, 0, -1], np.int32), 12)
    target.prefill(prompt_of(12), cache)
    last = [module for module in target.model.modules() if "forward" in vars(module)][-1]
    forward = last.forward

    def fails(*_args, **_options):
        raise ZeroDivisionError

    last.forward = fails
    with pytest.raises(ZeroDivisionError):
        target.forward(layout, cache)
    last.forward = forward
    again = target.forward(layout, cache).logits
    fresh = target.new_cache()
    target.prefill(prompt_of(12), fresh)
    assert torch.equal(again, target.forward(layout, fresh).logits)


@each_kind
def test_a_text_goes_on_exactly_after_one_that_was_interrupted_in_a_commit(family, monkeypatch):
    """Ctrl-C may come between two layers whose states are committed, and the batch keeps what was computed."""
    target, prompt = TorchTarget(model_of(family)), prompt_of(30)
    writer = Generator(target, None, method="none")
    batch = writer.batch()
    if not batch.passes.keeps_prefixes:
        pytest.skip("texts of this family share nothing")
    run = writer.begin(prompt, GREEDY, max_new_tokens=20)
    records = steps(run, batch)
    for _ in zip(range(5), records, strict=False):
        pass

    def interrupted(*_places):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch.passes._arena.states, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(records)
    text = theirs(target, prompt, 16)
    assert emitted(run) == text[:5]
    again = writer.begin(np.append(prompt, text[:8]), GREEDY, max_new_tokens=8)
    for _ in steps(again, batch):
        pass
    assert again.cached_tokens > len(prompt)
    assert emitted(again) == text[8:]


@pytest.mark.parametrize(("family", "taps"), [("lfm2", "conv_L_cache"), ("mamba", "conv_kernel")])
def test_a_convolution_of_one_tap_keeps_no_inputs(family, taps):
    config = tiny_configuration(family)
    setattr(config, taps, 1)
    target, drafter = TorchTarget(tiny_model(config)), RandomTreeDrafter(3, VOCABULARY)
    text, records = written(target, prompt_of(23), GREEDY, drafter, new_tokens=20)
    assert text == theirs(target, prompt_of(23), 20)
    assert sum(record.drafted for record in records) > 20


@pytest.mark.parametrize("joint", [False, True], ids=["alone", "in batches"])
def test_threads_write_texts_with_one_model(joint):
    """What a pass puts into the model's layers is its own, whoever else writes meanwhile, also with another target."""
    model, prompts = model_of("qwen3_next"), [prompt_of(30 + n) for n in range(4)]
    targets = [TorchTarget(model) for _ in range(2)]

    def write(number):
        prompt, target = prompts[number], targets[number % 2]
        writer = Generator(target, None, method="prompt_lookup", nodes=6)
        run = writer.begin(prompt, GREEDY, max_new_tokens=20)
        for _ in steps(run, writer.batch() if joint else None):
            pass
        return emitted(run)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(write, range(4))) == [theirs(targets[0], prompt, 20) for prompt in prompts]


def scores_of(target):
    cache = target.new_cache()
    cache.prompt = 12
    return target.forward(lay_out_text(prompt_of(12), 0), cache).logits


@each_kind
def test_the_model_s_own_generate_is_as_before_and_copies_have_states_of_their_own(family):
    own = model_of(family)
    given = {"attention_mask": torch.ones(1, 12, dtype=torch.int64), "max_new_tokens": 12, "do_sample": False}
    prompt = torch.from_numpy(prompt_of(12))[None]
    before = own.generate(prompt, **given)
    target = TorchTarget(own)
    assert torch.equal(own.generate(prompt, **given), before)
    scores = scores_of(target)
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):  # noqa: S301  # it was just written
        with torch.no_grad():
            for each in copied.parameters():
                each.mul_(1.25)
        other = TorchTarget(copied)
        changed = scores_of(other)
        assert not torch.equal(changed, scores)
        assert torch.equal(scores_of(target), scores)
        assert error_of(changed[-1], prompt_of(12), copied) < TOLERANCE


METHODS = {
    "eesd": {"head": "none", "layers": 1, "least_probability": 0.0, "least_share": 0.0},
    "draft_graph": {"model": "own", "least_probability": 0.0, "least_share": 0.0, "tau": 1},
    "auto": {"store": "none", "table": "none"},
    "lookahead": {},
}


# the configurations of the last three compute the types of their layers
_RUN = [(method, family) for method in METHODS for family in QUICK]
_RUN += [("eesd", family) for family in ("mamba", "falcon_h1", "jamba")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "family"), _RUN)
def test_methods_that_run_models_and_ngrams_write_the_plain_text(method, family):
    """The exit's layers and the draft model have states of their own, and hold the rows of a growing tree."""
    target, draft = TorchTarget(model_of(family)), TorchTarget(model_of("qwen3_next"))
    resources = Resources(VOCABULARY, draft_model=lambda _: draft, target=target)
    for sampling in (GREEDY, SamplingOptions(do_sample=True, temperature=0.7, seed=4)):
        plain, _ = written(target, prompt_of(23), sampling, make_drafter("none", {}, resources))
        text, records = written(target, prompt_of(23), sampling, make_drafter(method, METHODS[method], resources))
        assert text == plain
        assert sum(record.drafted for record in records) > 20


def test_an_exit_whose_layer_types_the_configuration_cannot_give_is_a_refusal():
    config = tiny_configuration("jamba")  # its last layer has attention, as every second one
    config.num_hidden_layers = 4
    model = tiny_model(config)
    with pytest.raises(UnsupportedModelError, match="of 3 layers gives others than these have"):
        exit_model(model, 2, ExitHead(model))


def test_layers_to_skip_are_not_known_of_recurrent_models():
    resources = Resources(VOCABULARY, target=TorchTarget(model_of("lfm2")))
    with pytest.raises(UnsupportedModelError, match="sub-layers of lfm2 models cannot be skipped"):
        make_drafter("layer_skip", {}, resources)


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_next", "torch_chunk_gated_delta_rule"), ("lfm2", "causal_conv1d_fn")]
)
def test_a_function_that_a_release_of_transformers_renames_is_a_refusal(family, name, monkeypatch):
    monkeypatch.delitem(adoption._OPERATORS, name)
    with pytest.raises(UnsupportedModelError, match=r"functions that foredraft replaces|after a rejected draft"):
        TorchTarget(model_of(family))


def test_a_layer_wrapped_by_another_library_is_a_refusal():
    model = model_of("lfm2")
    mixer = next(module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    mixer.forward = lambda *args, **options: type(mixer).forward(mixer, *args, **options)
    with pytest.raises(UnsupportedModelError, match="are wrapped"):
        TorchTarget(model)


def test_compiling_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="recurrent layers of this zamba model cannot be compiled"):
        compile_forward(model_of("zamba"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "family"), [(kept, family) for kept, names in STATES.items() for family in names])
def test_the_inventory_of_states_says_what_each_family_keeps(kept, family):
    target = TorchTarget(model_of(family))
    cache = target.new_cache()
    target.prefill(prompt_of(8), cache)
    layers = [layer for layer, recurrent in zip(cache.layers, target.support.recurrent, strict=True) if recurrent]
    assert layers
    assert all(layer._convolutions for layer in layers)
    assert all(bool(layer._recurrences) == ("matrix" in kept) for layer in layers)
    assert family in TESTED_FAMILIES
