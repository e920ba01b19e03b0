"""The kernel of experts in compiled forwards: each row's product with its expert's matrix, the same in any company."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import nn
from torch._inductor import aoti_compile_and_package

from foredraft.drafters.none import NoDrafter
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.blocks import packed_blocks, read_blocks
from foredraft.model.compiled.build import OPTIONS, compile_forward
from foredraft.model.compiled.kernels import own_kernels
from foredraft.model.compiled.library import CompiledLibrary, weights_apart, weights_beside
from foredraft.model.compiled.package import package_path
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
    """Rows by their experts' matrices: in float32 stored by rows, and in bfloat16 by columns."""

    def __init__(self):
        super().__init__()
        self.by_rows = nn.Parameter(torch.randn(EXPERTS, WIDTH, DEPTH))
        self.by_columns = nn.Parameter(torch.randn(EXPERTS, DEPTH, WIDTH).bfloat16())

    def matrices(self):
        return self.by_rows, self.by_columns.mT.contiguous()

    def forward(self, rows, experts):
        return tuple(
            torch.ops.foredraft.multiply_experts(rows.to(each.dtype), each, experts) for each in self.matrices()
        )


def packaged(model, rows, experts, path):
    """Compile a module of rows and their experts, for any number of rows, and load it."""
    any_rows = torch.export.Dim("rows", min=2, max=256)
    with torch.no_grad(), own_kernels(), weights_apart(weights_beside(path)) as apart:
        dimensions = ({0: any_rows}, {0: any_rows})
        program = torch.export.export(model, (rows[:4], experts[:4]), strict=False, dynamic_shapes=dimensions)
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS | apart)
    return CompiledLibrary(path)


@pytest.mark.slow
def test_a_row_is_multiplied_by_its_expert_alone_and_in_any_company(tmp_path):
    torch.manual_seed(0)
    model = Multiplied().eval()
    rows, experts = torch.randn(200, DEPTH), torch.randint(0, EXPERTS - 1, (200,))  # one is never chosen
    package = packaged(model, rows, experts, tmp_path / "experts.pt2")
    whole = package.run([rows, experts])
    for result, matrices, tolerance in zip(whole, model.matrices(), (1e-4, 5e-2), strict=True):
        given = rows.to(result.dtype).double()
        expected = torch.stack([given[row] @ matrices[of].detach().double().T for row, of in enumerate(experts)])
        assert torch.allclose(result.double(), expected, atol=tolerance, rtol=1e-2)
    for count in (2, 3, 5, 8, 17, 64):
        chosen = torch.randperm(200)[:count]
        for found, among_all in zip(package.run([rows[chosen], experts[chosen]]), whole, strict=True):
            assert torch.equal(found, among_all[chosen])


class MultipliedByBlocks(nn.Module):
    """Rows by their experts' matrices, quantised to 4 bits and to 8."""

    def __init__(self):
        super().__init__()
        self.weights, values = {}, np.random.default_rng(0).normal(size=(EXPERTS * 32, DEPTH)).astype(np.float32)
        for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
            data = quants.quantize(values, kind)
            self.weights[kind.name] = torch.from_numpy(quants.dequantize(data, kind)).view(EXPERTS, 32, DEPTH)
            matrices = [packed_blocks(read_blocks(kind.name, each)) for each in np.split(data, EXPERTS)]
            self.register_buffer(kind.name, torch.stack(matrices))

    def forward(self, rows, experts):
        blocks = map(self.get_buffer, self.weights)
        return tuple(torch.ops.foredraft.multiply_expert_blocks(rows, each, experts) for each in blocks)


@pytest.mark.slow
def test_a_row_is_multiplied_by_its_experts_integers_in_any_company(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # torch's caches do not see our kernels' sources
    torch.manual_seed(0)
    model = MultipliedByBlocks().eval()
    rows, experts = torch.randn(200, DEPTH).bfloat16(), torch.randint(0, EXPERTS - 1, (200,))  # one is never chosen
    rows[1, 7] = 60.0  # a block that stands out
    package = packaged(model, rows, experts, tmp_path / "experts.pt2")
    whole = package.run([rows, experts])
    for result, weights in zip(whole, model.weights.values(), strict=True):
        expected = torch.stack([rows[row].double() @ weights[of].double().T for row, of in enumerate(experts)])
        assert ((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 2e-2  # as of products without experts
    for count in (1, 2, 5, 8, 17, 64):
        chosen = torch.randperm(200)[:count]
        for found, among_all in zip(package.run([rows[chosen], experts[chosen]]), whole, strict=True):
            assert torch.equal(found, among_all[chosen])


@pytest.mark.slow
def test_a_compiled_rounded_mixture_multiplies_by_its_experts_integers(monkeypatch, tmp_path):
    """One with matrices by columns and biases; a rounded one with the usual experts is in tests/test_processors.py."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    config = tiny_configuration("gpt_oss")
    for name in SIZES.keys() & vars(config).keys():
        setattr(config, name, SIZES[name])
    tiny_model(config).bfloat16().save_pretrained(tmp_path / "model")
    model, prompt = load_model(str(tmp_path / "model"), "q4_0", device="cpu"), prompt_of(30)
    folder, record = compile_forward(model, tmp_path / "cache")
    assert any("experts' weights of 4 bits" in kernel for kernel in record.kernels)
    weights = torch.load(weights_beside(package_path(folder, record)), weights_only=True)
    assert {each.dtype for name, each in weights.items() if "down_proj" in name and "bias" not in name} == {torch.uint8}
    target = compiled_by(model, folder, record)
    found = target.forward(lay_out_text(prompt, 0), target.new_cache()).logits
    with torch.no_grad():
        scores = model(torch.from_numpy(prompt)[None]).logits[0].float()
    errors = (torch.as_tensor(found) - scores).norm(dim=-1) / scores.norm(dim=-1)
    assert errors.median() < 6e-2  # 3 to 5 % of rows in 8 bits; some rows choose other experts
    expected = written(target, prompt, GREEDY, NoDrafter(), nodes=8, new_tokens=40)[0]
    assert written(target, prompt, GREEDY, RandomTreeDrafter(5), nodes=8, new_tokens=40)[0] == expected


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
