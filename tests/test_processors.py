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
from support.causal_types import tiny_configuration
from support.compilation import compiled_by
from support.families import VOCABULARY, tiny_model


def scores_of(model, folder):
    """Compile a model, and return the scores of passes of 1, 5 and 40 rows after one of 60."""
    with warnings.catch_warnings(), config.patch(force_disable_caches=True):
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        folder, record = compile_forward(model, folder)
    target, rng, scores = compiled_by(model, folder, record), np.random.default_rng(0), []
    cache = target.new_cache()
    for rows in (60, 1, 5, 40):
        layout = lay_out_text(rng.integers(0, VOCABULARY, rows), cache.length)
        scores.append(target.forward(layout, cache).logits.clone())
        cache.commit(range(rows))
    return scores


def avx2_scores_of(model, folder, monkeypatch):
    """Return the same, compiled for a processor that has AVX2 and no more."""
    monkeypatch.setattr(kernels, "vector_lanes", lambda: 8)
    monkeypatch.setattr(kernels, "multiplies_by_pairs", lambda: False)
    monkeypatch.setitem(OPTIONS, "aot_inductor.precompile_headers", False)  # which would be for these packages alone
    with config.patch({"cpp.march": "x86-64-v3"}):
        return scores_of(model, folder)


@pytest.mark.slow
@pytest.mark.skipif(not has_avx2(), reason="the processor has no AVX2")
@pytest.mark.parametrize(
    ("family", "sizes", "rounded"),
    [
        ("granitemoehybrid", {"hidden_size": 64, "mamba_d_head": 32, "head_dim": 16}, True),
        (
            "qwen3_5_moe_text",
            {
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 32,
                "head_dim": 32,
                "moe_intermediate_size": 32,
                "layer_types": ["linear_attention", "full_attention"],
            },
            False,
        ),
    ],
    ids=["integers", "bfloat16"],
)
def test_rows_have_the_same_bits_with_avx2_as_with_all_instructions_of_this_processor(
    family, sizes, rounded, tmp_path, monkeypatch
):
    """Granite's mixture has Mamba layers, Qwen3.5's those by the delta rule; both have attention and experts."""
    shape = tiny_configuration(family)
    for name, value in {"max_position_embeddings": 1024, **sizes}.items():
        setattr(shape, name, value)
    model = tiny_model(shape).bfloat16()
    if rounded:
        round_weights(model)
    native = scores_of(model, tmp_path / "native")
    assert all(map(torch.equal, native, avx2_scores_of(model, tmp_path / "avx2", monkeypatch)))
