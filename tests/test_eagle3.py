"""EAGLE-3: the text of plain decoding; heads in the format of `speculators` and raw ones; which are refused."""

import numpy as np
import pytest
import torch

from foredraft.api import Generator
from foredraft.contracts import Budget, DraftContext, SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.model.layers import eagle_layers
from foredraft.model.speculators import save_eagle3
from foredraft.model.target import TorchTarget
from foredraft.training.eagle3 import new_layers
from support.families import LONG, VOCABULARY, of_families, prompt_of
from support.llamas import small_model
from support.pairs import pairs
from support.speculators import (
    DRAFTED,
    eagle3_config,
    eagle3_tensors,
    raw_config,
    raw_tensors,
    save_drafter,
    target_of,
    writes_the_plain_text,
)

SHAPES = {
    "chain": {"out_degree": 1, "least_probability": 0.0, "least_share": 0.0},
    "tree": {"out_degree": 3, "least_probability": 0.0, "least_share": 0.0},
}


def drafter_of(family, folder, **options):
    return make_drafter("eagle3", {"model": folder, **options}, Resources(VOCABULARY, target=target_of(family)))


FORMATS = {
    "speculators": lambda folder: save_drafter(folder, eagle3_config(), eagle3_tensors()),
    "raw": lambda folder: save_drafter(folder, raw_config(), raw_tensors(), pickled=True),
    "window": lambda folder: save_drafter(folder, eagle3_config(layers=2, slides=True), eagle3_tensors(layers=2)),
}


@pytest.fixture(params=FORMATS)
def folder(request, tmp_path):
    return FORMATS[request.param](tmp_path)


@of_families(
    ("family", "form", "shape", "setting"),
    pairs(["llama", "qwen3", "gpt_oss"], list(FORMATS), list(SHAPES), ["greedy", "T=0.7 top_p=0.9"]),
    quick=("llama",),
)
def test_the_text_is_that_of_plain_decoding(family, form, shape, setting, tmp_path):
    assert writes_the_plain_text(family, setting, drafter_of(family, FORMATS[form](tmp_path), **SHAPES[shape]))


def full_draft(family, folder, ids, **options):
    """A draft after ids whose target has run them all."""
    target = target_of(family)
    drafter = drafter_of(family, folder, **options)
    states = target.prefill(ids[:-1].copy(), target.new_cache(), drafter.needs.hidden)
    drafting = drafter.open(DraftContext(VOCABULARY))
    return drafting, SequenceView(ids, len(ids), states)


def test_a_draft_stays_the_same_however_its_text_came_about(folder):
    """At once, or a few tokens at a time with drafts between that are rejected."""
    ids = prompt_of(LONG)
    options = SHAPES["tree"]
    drafting, view = full_draft("llama", folder, ids, **options)
    at_once = drafting.propose(view, Budget(20, 4))
    again = drafting.propose(view, Budget(20, 4))
    drafting, _ = full_draft("llama", folder, ids, **options)
    for end in (7, 8, 20, LONG):
        step_by_step = drafting.propose(SequenceView(ids[:end], 5, view.states[: end - 1]), Budget(20, 4))
    for each in (again, step_by_step):
        assert each.tokens.tolist() == at_once.tokens.tolist()
        np.testing.assert_allclose(each.score, at_once.score, rtol=1e-4)
    assert set(at_once.tokens.tolist()) <= {token * VOCABULARY // DRAFTED for token in range(DRAFTED)}
    assert not len(drafting.propose(SequenceView(ids, 5), Budget(20, 4))), "no states are known"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
def test_a_compiled_head_drafts_as_the_uncompiled_one(packages, tmp_path, monkeypatch):
    """`compile` compiles it with the target; a row of it has the same bits in any pass. Its layer slides."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(packages))
    model, reads = small_model(), eagle_layers(2)
    layers = new_layers(model)
    layers.config.layer_types, layers.config.sliding_window = ["sliding_attention"], 16
    save_eagle3(tmp_path / "head", model, "llama", layers, reads, None, torch.float32, lm_head=True)
    options = {"model": str(tmp_path / "head"), **SHAPES["tree"]}
    target = TorchTarget(model)
    generator = Generator(target, None, method="eagle3", options=options)
    ids = prompt_of(LONG)
    states = target.prefill(ids[:-1].copy(), target.new_cache(), generator.drafter.needs.hidden)

    def drafted():
        drafting = generator.drafter.open(DraftContext(VOCABULARY))
        return drafting.propose(SequenceView(ids, len(ids), states), Budget(20, 4))

    uncompiled = drafted()
    assert len(generator.compile()) == 2
    assert all(each.compiled is not None for each in generator.drafter.needs.models)
    compiled = drafted()
    assert len(compiled) == 20
    assert compiled.tokens.tolist() == uncompiled.tokens.tolist()
    np.testing.assert_allclose(compiled.score, uncompiled.score, rtol=1e-4)
