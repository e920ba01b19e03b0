"""The kernel of experts in compiled forwards: each row's product with its expert's matrix, the same in any company."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn
from torch._inductor import aoti_compile_and_package

import naive.compiled
from foredraft.drafters.none import NoDrafter
from foredraft.model.compiled.block_layers import quantised_weights
from foredraft.model.compiled.blocks import QuantisedRows, packed_blocks, read_blocks, stored_integers
from foredraft.model.compiled.build import OPTIONS, compile_forward
from foredraft.model.compiled.experts import compiled_experts
from foredraft.model.compiled.kernels import own_kernels
from foredraft.model.compiled.library import CompiledLibrary, weights_apart, weights_beside
from foredraft.model.loading import load_model
from support.causal_types import tiny_configuration
from support.compilation import compiled_by
from support.families import GREEDY, prompt_of, tiny_model, written
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls

EXPERTS, WIDTH, DEPTH = 5, 24, 64
SIZES = {
    "head_dim": 16, "max_position_embeddings": 1024, "hidden_size": 64, "intermediate_size": 64,
    "moe_intermediate_size": 64,
}  # fmt: skip


class Multiplied(nn.Module):
    """Rows by their experts' matrices.

    They are in float32 stored by rows, in bfloat16 by columns, and quantised to 4 bits and to 8.
    """

    def __init__(self):
        super().__init__()
        self.by_rows = nn.Parameter(torch.randn(EXPERTS, WIDTH, DEPTH))
        self.by_columns = nn.Parameter(torch.randn(EXPERTS, DEPTH, WIDTH).bfloat16())
        self.dequantised, values = {}, np.random.default_rng(0).normal(size=(EXPERTS * 32, DEPTH)).astype(np.float32)
        for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
            data = quants.quantize(values, kind)
            self.dequantised[kind.name] = torch.from_numpy(quants.dequantize(data, kind)).view(EXPERTS, 32, DEPTH)
            matrices = [packed_blocks(read_blocks(kind.name, each)) for each in np.split(data, EXPERTS)]
            self.register_buffer(kind.name, torch.stack(matrices))

    def matrices(self):
        return self.by_rows, self.by_columns.mT.contiguous()

    def forward(self, rows, experts):
        multiply, by_blocks = torch.ops.foredraft.multiply_experts, torch.ops.foredraft.multiply_expert_blocks
        blocks = map(self.get_buffer, self.dequantised)
        return (
            *(multiply(rows.to(each.dtype), each, experts) for each in self.matrices()),
            *(by_blocks(rows.bfloat16(), each, experts) for each in blocks),
        )


@pytest.mark.slow
def test_a_row_is_multiplied_by_its_expert_alone_and_in_any_company(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # torch's caches do not see our kernels' sources
    torch.manual_seed(0)
    model, path = Multiplied().eval(), tmp_path / "experts.pt2"
    rows, experts = torch.randn(200, DEPTH), torch.randint(0, EXPERTS - 1, (200,))  # one is never chosen
    rows[1, 7] = 60.0  # a block that stands out
    any_rows = torch.export.Dim("rows", min=2, max=256)
    with torch.no_grad(), own_kernels(), weights_apart(weights_beside(path)) as apart:
        dimensions = ({0: any_rows}, {0: any_rows})
        program = torch.export.export(model, (rows[:4], experts[:4]), strict=False, dynamic_shapes=dimensions)
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS | apart)
    package = CompiledLibrary(path)
    whole = package.run([rows, experts])
    for result, matrices, tolerance in zip(whole[:2], model.matrices(), (1e-4, 5e-2), strict=True):
        given = rows.to(result.dtype).double()
        expected = torch.stack([given[row] @ matrices[of].detach().double().T for row, of in enumerate(experts)])
        assert torch.allclose(result.double(), expected, atol=tolerance, rtol=1e-2)
    for result, weights in zip(whole[2:], model.dequantised.values(), strict=True):
        rounded = rows.bfloat16().double()
        expected = torch.stack([rounded[row] @ weights[of].double().T for row, of in enumerate(experts)])
        assert ((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 2e-2  # as of products without experts
    for count in (1, 2, 3, 5, 8, 17, 64):
        chosen = torch.randperm(200)[:count]
        for found, among_all in zip(package.run([rows[chosen], experts[chosen]]), whole, strict=True):
            assert torch.equal(found, among_all[chosen])


def test_a_rounded_mixture_multiplies_by_its_experts_integers(monkeypatch, tmp_path):
    """One with matrices by columns and biases; a rounded one with the usual ones is compiled in test_processors.py."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    config = tiny_configuration("gpt_oss")
    for name in SIZES.keys() & vars(config).keys():
        setattr(config, name, SIZES[name])
    tiny_model(config).bfloat16().save_pretrained(tmp_path / "model")
    model, ids = load_model(str(tmp_path / "model"), "q4_0", device="cpu"), torch.from_numpy(prompt_of(30))[None]
    monkeypatch.setattr(torch.ops.foredraft, "multiply_blocks", naive.compiled.multiply_blocks)
    monkeypatch.setattr(torch.ops.foredraft, "multiply_expert_blocks", naive.compiled.multiply_expert_blocks)
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
        with quantised_weights(model, QuantisedRows(stored_integers(model), model.dtype)), compiled_experts(model):
            assert not any("down_proj" in name and not name.endswith("bias") for name, _ in model.named_parameters())
            found = model(ids).logits[0]
    assert found.dtype == torch.float32
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 6e-2  # sums in bfloat16 are rounded otherwise; some rows choose other experts


@pytest.mark.slow
def test_texts_of_a_compiled_mixture_are_transformers_own(tmp_path):
    """Of one with matrices by columns, biases, a gate of its own and sinks.

    Those of mixtures with experts as most have them are in tests/test_compiled_kinds.py.
    """
    config = tiny_configuration("gpt_oss")
    for name in SIZES.keys() & vars(config).keys():
        setattr(config, name, SIZES[name])
    model, prompt = tiny_model(config), prompt_of(30)
    ids = torch.from_numpy(prompt)[None]
    options = {"max_new_tokens": 40, "eos_token_id": [], "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    folder, record = compile_forward(model, tmp_path)
    target, known = compiled_by(model, folder, record), continuation_in(np.append(prompt, expected))
    drafters = NoDrafter(), RandomTreeDrafter(5), OracleDrafter(known), OracleDrafter(known, 1), AdversaryDrafter(known)
    for drafter in drafters:
        assert written(target, prompt, GREEDY, drafter, nodes=8, new_tokens=40)[0] == expected
