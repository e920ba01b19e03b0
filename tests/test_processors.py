"""Packages compiled for other processors: the same bits on each."""

import warnings

import numpy as np
import pytest
import torch
from torch._inductor import config

from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled import kernels
from foredraft.model.compiled.block_layers import round_weights
from foredraft.model.compiled.build import OPTIONS, compile_forward
from foredraft.model.machine import has_avx2
from support.compilation import compiled_by, model_of
from support.families import VOCABULARY


def scores_of(model, folder):
    """Compile a model; return the scores of passes of 1, 5 and 40 rows after one of 60, and the names of kernels."""
    with warnings.catch_warnings(), config.patch(force_disable_caches=True):
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        folder, record = compile_forward(model, folder)
    target, rng, scores = compiled_by(model, folder, record), np.random.default_rng(0), []
    cache = target.new_cache()
    for rows in (60, 1, 5, 40):
        layout = lay_out_text(rng.integers(0, VOCABULARY, rows), cache.length)
        scores.append(target.forward(layout, cache).logits.clone())
        cache.commit(range(rows))
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
    """Of a model with experts: its first layer is recurrent and in bfloat16, and the second has matrices of integers.

    The recurrence is by the delta rule, whose kernel has all that other recurrent layers use.
    """
    kinds = ["linear_attention", "full_attention"]
    sizes = {
        "hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "head_dim": 32,
        "moe_intermediate_size": 32, "layer_types": kinds,
    }  # fmt: skip
    model = model_of("qwen3_5_moe_text", sizes).bfloat16()
    round_weights(model, {each.data_ptr() for each in model.model.layers[0].parameters()})
    native, kernels_used = scores_of(model, tmp_path / "native")
    assert any("weights of 8 bits" in kernel for kernel in kernels_used)
    assert {"products", "products by pairs"} & set(kernels_used), "those in bfloat16"
    assert all(map(torch.equal, native, avx2_scores_of(model, tmp_path / "avx2", monkeypatch)[0]))
