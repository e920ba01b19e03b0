"""Heads and draft models that score frequent tokens only: the text of plain decoding, and files without an LM head."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foredraft.control import FixedControl
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import StoreError, UsageError
from foredraft.model import head_files
from foredraft.model.candidates import Imitation, candidates
from foredraft.model.head_files import IDS, card_for, save_head, weights_of
from foredraft.model.heads import (
    ExitHead,
    FirstLayers,
    MedusaHeads,
    RankedHead,
    draft_model,
    load_draft_model,
    load_exit_head,
    load_medusa,
)
from foredraft.model.layers import model_parts, shorter
from foredraft.model.target import TorchTarget
from foredraft.pairing import pair_draft_model
from foredraft.sampling import SamplingOptions
from foredraft.training.tasks import distribution_loss
from foredraft.training.traces import Traces, frequent_tokens
from support.exits import LAYERS, plain, target_of, written
from support.families import SETTINGS, VOCABULARY, each_of
from support.heads import head_of

IDS_KEPT = torch.arange(VOCABULARY - 1, 0, -3)
"""A third of the tokens, not in ascending order."""


def head_folder(family, folder):
    model = target_of(family).model
    card = card_for(model, "eesd", family, layers=2, dtype="float32")
    save_head(folder, card, weights_of(ExitHead(model, IDS_KEPT)))
    return str(folder)


def draft_folder(family, folder, layers=2):
    model = target_of(family).model
    card = card_for(model, "draft", family, layers=layers, dtype="float32")
    save_head(folder, card, weights_of(FirstLayers(model, layers, IDS_KEPT)))
    return str(folder)


def medusa_folder(family, folder):
    model = target_of(family).model
    card, heads, _ = load_medusa(head_of(family, folder / "whole"), model)
    save_head(folder, card, {**heads.state_dict(), IDS: IDS_KEPT.int()})
    return str(folder)


def drafter_of(method, family, folder):
    target = target_of(family)
    if method == "eesd":
        return make_drafter("eesd", {"head": head_folder(family, folder)}, Resources(VOCABULARY, target=target))
    if method == "medusa":
        return make_drafter("medusa", {"head": medusa_folder(family, folder)}, Resources(VOCABULARY, target=target))
    options = {"model": draft_folder(family, folder), "least_probability": 0.0}
    resources = Resources(VOCABULARY, draft_model=lambda name: pair_draft_model(name, target, None), target=target)
    return make_drafter(method, options, resources)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["eesd", "medusa", "draft_model", "draft_tree", "draft_graph"])
@each_of(["llama", "gemma2", "gpt2"])
def test_the_text_is_that_of_plain_decoding_and_only_kept_tokens_are_drafted(family, method, setting, tmp_path):
    drafter = drafter_of(method, family, tmp_path)
    drafts = []
    target = target_of(family)
    propose_of = type(drafter).open

    def open_and_watch(context):
        drafting = propose_of(drafter, context)
        whole = drafting.propose

        def propose(view, budget):
            drafts.append(whole(view, budget))
            return drafts[-1]

        drafting.propose = propose
        return drafting

    drafter.open = open_and_watch
    text, _ = written(target, family, setting, drafter, FixedControl(6))
    assert text == plain(family, setting)
    drafted = {int(token) for draft in drafts for token in draft.tokens}
    assert drafted
    assert drafted <= set(IDS_KEPT.tolist())


def test_a_head_file_holds_ids_and_no_lm_head(tmp_path):
    model = target_of("llama").model
    head_folder("llama", tmp_path)
    names = set(load_file(tmp_path / "head.safetensors"))
    assert IDS in names
    assert "lm_head.weight" not in names
    _, head = load_exit_head(tmp_path, model)
    assert torch.equal(head.lm_head.weight, model.get_output_embeddings().weight[IDS_KEPT])


def test_a_trained_lm_head_is_kept_in_the_file(tmp_path):
    model = target_of("llama").model
    head = ExitHead(model, IDS_KEPT).requires_grad_(requires_grad=True)
    with torch.no_grad():
        head.lm_head.weight += 1
    save_head(tmp_path, card_for(model, "eesd", "llama", layers=1, dtype="float32"), weights_of(head))
    assert torch.equal(load_exit_head(tmp_path, model)[1].lm_head.weight, head.lm_head.weight)


@pytest.mark.parametrize("ids", [[1, 1], [-1, 2], [VOCABULARY], []])
def test_ids_that_the_model_does_not_have_are_refused(ids):
    with pytest.raises(UsageError, match="must be different ids below"):
        RankedHead(target_of("llama").model, torch.tensor(ids, dtype=torch.int64))


@each_of(["llama", "gpt2", "gemma2"])
def test_a_draft_model_is_the_target_without_the_layers_between(family):
    model, count = target_of(family).model, LAYERS - 1
    parts = model_parts(model)
    own = model.get_submodule(parts.layers)
    skipping = shorter(model, parts, {**dict(enumerate(own[: count - 1])), LAYERS - 1: own[-1]})
    drafting = draft_model(model, FirstLayers(model, count))
    assert drafting.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert drafting.config.num_hidden_layers == count
    assert model.config.num_hidden_layers == LAYERS
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            drafting(ids, use_cache=False).logits, skipping(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4
        )


def test_a_draft_model_of_another_target_is_refused(tmp_path):
    folder = draft_folder("llama", tmp_path)
    _, drafting = load_draft_model(folder, target_of("llama").model)
    assert TorchTarget(drafting).vocabulary == VOCABULARY
    with pytest.raises(UsageError, match="train draft"):
        load_draft_model(folder, target_of("qwen3").model)
    (tmp_path / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(StoreError, match="is damaged"):
        load_draft_model(folder, target_of("llama").model)
    with pytest.raises(UsageError, match="layers is 4"):
        FirstLayers(target_of("llama").model, LAYERS)


@pytest.mark.parametrize(
    ("ids", "best"), [([7, 2, 5], 2), ([2, 1, 0], 1), (None, 1)], ids=["some tokens", "by rank", "a model of fewer"]
)
@pytest.mark.parametrize("sampled", [False, True])
def test_candidates_are_tokens_that_are_scored(ids, best, sampled):
    scored = None if ids is None else np.array(ids, np.int32)
    imitation = Imitation(SamplingOptions(do_sample=sampled, seed=3), vocabulary=10, ids=scored)
    found = candidates(torch.tensor([[0.1, 9.0, 1.0]]), 3, imitation, np.array([4]))
    assert found.tokens[0, 0] == best
    assert sorted(found.tokens[0].tolist()) == sorted(ids or range(3))


def test_frequent_tokens_are_those_that_the_target_wrote_most_often():
    windows = np.array([[5, 5, 5, 2], [2, 2, 9, 9], [9, 9, 9, 9], [1, 1, 1, 1]], np.int32)
    kinds, held = np.array([0, 1, 2, 0], np.uint8), np.array([False, False, False, True])
    nothing = np.empty(0)
    traces = Traces(windows, kinds, held, nothing, nothing, "")
    assert frequent_tokens(traces, 5, 12).tolist() == [2, 5, 9, 0, 1]  # 2 and 5 equally often, and then the smaller id


def test_the_loss_leaves_out_what_is_not_scored():
    logits, places = torch.tensor([[0.3, -1.0, 2.0]]), torch.full((6,), -1)
    places[torch.tensor([4, 0, 2])] = torch.arange(3)
    whole = torch.full((1, 6), -1e9)
    whole[0, [4, 0, 2]] = logits[0]
    top = torch.tensor([[2, 4]]), torch.tensor([[0.6, 0.4]])
    torch.testing.assert_close(distribution_loss(logits, *top, places), distribution_loss(whole, *top))
    unscored = torch.tensor([[2, 5]]), torch.tensor([[0.6, 0.4]])
    alone = torch.tensor([[2]]), torch.tensor([[0.6]])
    with_rest = distribution_loss(logits, *alone, places) - distribution_loss(logits, *unscored, places)
    assert float(with_rest) > 0  # 0.4 that go to other scored tokens cost; 0.4 of a token that is not scored do not


def test_medusa_heads_bring_the_rows_that_score_them(tmp_path):
    _, heads, lm_head = load_medusa(medusa_folder("llama", tmp_path), target_of("llama").model)
    assert isinstance(heads, MedusaHeads)
    assert lm_head.weight.shape[0] == len(IDS_KEPT)


def test_heads_of_a_checkout_are_found_for_their_own_model_only(tmp_path, monkeypatch):
    monkeypatch.setattr(head_files, "SHIPPED", tmp_path)
    head_folder("llama", tmp_path / "some" / "eesd")
    draft_folder("llama", tmp_path / "some" / "draft")
    target = target_of("llama")
    resources = Resources(VOCABULARY, draft_model=lambda name: pair_draft_model(name, target, None), target=target)
    for method in ("eesd", "draft_graph"):
        drafter = make_drafter(method, {}, resources)
        assert written(target, "llama", "greedy", drafter)[0] == plain("llama", "greedy")
    with pytest.raises(UsageError, match="needs heads trained for this model"):
        make_drafter("eesd", {}, Resources(VOCABULARY, target=target_of("qwen3")))


def test_weights_in_eight_bits_are_right_to_half_a_step_of_their_row(tmp_path):
    model = target_of("llama").model
    first = FirstLayers(model, 2, IDS_KEPT)
    save_head(tmp_path, card_for(model, "draft", "llama", layers=2, dtype="int8"), weights_of(first))
    _, drafting = load_draft_model(tmp_path, model)
    loaded, largest = dict(drafting.model.layers.named_parameters()), 127
    for name, weight in first.layers.named_parameters():
        step = weight.abs().amax(-1, keepdim=True) / largest
        assert ((loaded[name] - weight).abs() <= step / 2 + 1e-6).all() or weight.dim() == 1
