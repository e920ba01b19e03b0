"""Packages compiled for other processors: the same bits on each."""

import warnings

import pytest
import torch
from torch._inductor import config

from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled import kernels
from foredraft.model.compiled.build import OPTIONS, compile_forward
from foredraft.model.loading import load_model
from foredraft.model.machine import has_avx2
from support.compilation import compiled_by, model_of
from support.families import prompt_of

PROMPT = prompt_of(60)


def scores_of(model, folder):
    """Compile a model; return the scores of passes of 1, 5 and 40 rows after one of 60, and the names of kernels."""
    with warnings.catch_warnings(), config.patch(force_disable_caches=True):
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        folder, record = compile_forward(model, folder)
    target, scores = compiled_by(model, folder, record), []
    cache = target.new_cache()
    for ids in (PROMPT, prompt_of(1), prompt_of(5), prompt_of(40)):
        scores.append(target.forward(lay_out_text(ids, cache.length), cache).logits.clone())
        cache.commit(range(len(ids)))
    return scores, record.kernels


def avx2_scores_of(model, folder, monkeypatch):
    """Return the same, compiled for a processor that has AVX2 and no more."""
    monkeypatch.setattr(kernels, "vector_lanes", lambda: 8)
    monkeypatch.setattr(kernels, "multiplies_by_pairs", lambda: False)
    monkeypatch.setitem(OPTIONS, "aot_inductor.precompile_headers", False)  # which would be for these packages alone
    with config.patch({"cpp.march": "x86-64-v3"}):
        return scores_of(model, folder)


@pytest.mark.slow
@pytest.mark.skipif(not has_avx2(), reason="the processor has no AVX2")
def test_rows_have_the_same_bits_with_avx2_as_with_all_instructions_of_this_processor(tmp_path, monkeypatch):
    """Of a rounded mixture whose first layer was changed since: it is multiplied in bfloat16, the second by integers.

    The first layer is recurrent by the delta rule, whose kernel has all that other recurrent layers use.
    """
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    sizes = {
        "hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "head_dim": 32,
        "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    model_of("qwen3_5_moe_text", sizes).bfloat16().save_pretrained(tmp_path / "model")
    model = load_model(str(tmp_path / "model"), "q4_0", device="cpu")
    with torch.no_grad():
        for weight in model.model.layers[0].parameters():
            weight.mul_(1.125)
        expected = model(torch.from_numpy(PROMPT)[None]).logits[0].float()
    native, kernels_used = scores_of(model, tmp_path / "native")
    assert {"recurrence by the delta rule", "products of rows with the matrices of their experts"} < set(kernels_used)
    assert {"products", "products by pairs"} & set(kernels_used), "those in bfloat16"
    for multiplied in ("products of weights of 4 bits", "products of experts' weights of 4 bits"):
        assert any(kernel.startswith(multiplied) for kernel in kernels_used)
    errors = (native[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 6e-2  # some rows choose other experts
    assert all(map(torch.equal, native, avx2_scores_of(model, tmp_path / "avx2", monkeypatch)[0]))
