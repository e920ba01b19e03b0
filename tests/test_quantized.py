"""Quantised checkpoints are dequantised, run by their library with the same text drafted or not, or refused."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitNetQuantConfig, BitsAndBytesConfig, TorchAoConfig

from foredraft.api import load
from foredraft.cli.info import uncompiled
from foredraft.errors import ForedraftWarning, UsageError
from foredraft.model.compiled.block_layers import quantised_weights
from foredraft.model.compiled.blocks import QuantisedRows, stored_integers
from foredraft.model.loading import load_model, load_tokenizer
from foredraft.model.packed import packed_tensors
from foredraft.model.quantised import load_quantised
from foredraft.model.support import warn_where_rows_depend
from foredraft.model.target import TorchTarget
from support import wrappers
from support.families import configuration, tiny_model
from support.quantised import PACKED, declare, in_words, pack_checkpoint, packed, quantise_checkpoint, same_weights
from support.toys import TOY

FORMATS_OF = {
    "gptq in 8 bits": {"Q8_0"}, "compressed-tensors in 8 bits": {"Q8_0"}, "gptq in order of activations": {"Q4_0", ""},
    "gptq_v2": {"Q4_1"}, "gptq with zero points": {"Q4_1"}, "awq": {"Q4_1"},
    "compressed-tensors with zero points": {"Q4_1"},
}  # fmt: skip
"""Formats of GGUF that hold the matrices of the kinds of `PACKED`; of the others Q4_0."""
W8A8 = SimpleNamespace(input_activations={"num_bits": 8})


def same_text_drafted_or_not(pair):
    question = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    for sampling in ({}, {"do_sample": True, "temperature": 0.7, "seed": 1}):
        plain = load(pair, method="none").generate(question, max_new_tokens=16, **sampling)
        drafted = load(pair, method="auto", speculative_config={"num_speculative_tokens": 8})
        assert drafted.generate(question, max_new_tokens=16, **sampling).token_ids == plain.token_ids


def test_a_model_that_torchao_quantised_writes_the_same_drafted_or_not():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    options = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32, quantization_config=options).eval()
    same_text_drafted_or_not((model, load_tokenizer(TOY)))


def saved(folder, family="llama", dtype="float32", **fields):
    config = configuration(family)
    for name, value in fields.items():
        setattr(config, name, value)
    tiny_model(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "activations"), [("llama", "Activations are not quantised"), ("gpt_oss", "GB.$")])
def test_weights_are_dequantised_by_the_formats_formula(family, activations, dtype, tmp_path):
    """FP8 in blocks, as in DeepSeek's and Qwen's checkpoints, and gpt-oss's MXFP4."""
    pytest.importorskip("accelerate", reason="accelerate, which transformers needs for FP8, is not installed")
    folder = saved(tmp_path, family, dtype, intermediate_size=64)
    expected = quantise_checkpoint(tmp_path)
    with pytest.warns(ForedraftWarning, match=f"dequantised to {dtype}, they take .*{activations}"):
        model = load_model(folder, dtype=dtype, device="cpu")
    assert same_weights(model.state_dict(), expected)
    assert not model.is_quantized


@pytest.mark.parametrize("kind", PACKED)
def test_packed_integers_are_read_by_the_formats_formulas(kind, tmp_path):
    folder = saved(tmp_path, intermediate_size=64)
    expected = pack_checkpoint(tmp_path, kind)
    said = "Activations are not quantised" if "config_groups" in PACKED[kind] else "GB.$"
    with pytest.warns(ForedraftWarning, match=f"are quantised .*dequantised to float32, they take .*{said}"):
        model = load_model(folder, dtype="float32", device="cpu")
    assert same_weights(model.state_dict(), expected)


@pytest.mark.parametrize(("kind", "formats"), [(kind, FORMATS_OF.get(kind, {"Q4_0"})) for kind in PACKED])
def test_compiled_passes_multiply_packed_integers(kind, formats, tmp_path):
    """But those of down projections whose groups are no blocks of neighbours. Minima are rounded in blocks."""
    pytest.importorskip("gguf", reason="gguf, which reads blocks, is not installed")
    folder = saved(tmp_path, dtype="float16", intermediate_size=64)
    expected = pack_checkpoint(tmp_path, kind)
    with pytest.warns(ForedraftWarning, match="dequantised to bfloat16"):
        model = load_model(folder, device="cpu")
    for name, said in expected.items():
        assert (model.state_dict()[name] - said).abs().max() <= said.abs().max() / 256, name
    tensors = stored_integers(model)
    assert tensors.formats() == formats
    with quantised_weights(model, QuantisedRows(tensors, model.dtype)) as count:
        assert count == sum("_proj." in name and ("" not in formats or "down" not in name) for name in expected)


def test_experts_in_packed_integers_are_put_together(tmp_path):
    """There, transformers has one tensor for the matrices that a checkpoint has for each expert."""
    folder = saved(tmp_path, "mixtral", intermediate_size=64)
    expected = pack_checkpoint(tmp_path, "gptq")
    with pytest.warns(ForedraftWarning, match="are quantised"):
        state = load_model(folder, dtype="float32", device="cpu").state_dict()
    together = next(each for name, each in state.items() if name.endswith("0.mlp.experts.down_proj"))
    assert torch.equal(together[1], expected["model.layers.0.block_sparse_moe.experts.1.w2.weight"])


def test_packed_integers_of_a_text_model_are_read_whoever_declares_them(tmp_path):
    """A wrapper's config.json may have the `quantization_config` in its `text_config` alone."""
    wrappers.saved(wrappers.wrapper_of("gemma3"), tmp_path)
    path, states = tmp_path / "config.json", []
    said = pack_checkpoint(tmp_path, "gptq")
    for part in (None, "text_config"):
        config = json.loads(path.read_text())
        if part:
            config[part]["quantization_config"] = config.pop("quantization_config")
        path.write_text(json.dumps(config))
        with pytest.warns(ForedraftWarning, match="are quantised"):
            states.append(load_model(str(tmp_path), dtype="float32", device="cpu").state_dict())
    name = "layers.0.self_attn.q_proj.weight"
    expected = next(each for own, each in said.items() if own.endswith(name) and "vision" not in own)
    assert all(torch.equal(state[f"model.{name}"], expected) for state in states)


@pytest.mark.parametrize(
    ("kind", "changed", "error"),
    [
        ("gptq", {"bias": torch.ones(32)}, "has a weight .*bias that a llama model"),
        ("gptq", {"scales": torch.ones(3, 32)}, r"q_proj.weight .*cannot be unpacked .*scales \(32, 3\)"),
        ("gptq", {"scales": torch.ones(1, 32).int()}, "q_proj.weight .*cannot be unpacked"),
        ("gptq", {"scales": None}, "q_proj.weight .*cannot be unpacked"),
        ("gptq", {"qzeros": torch.ones(1, 4)}, "q_proj.weight .*cannot be unpacked .*words are torch.float32"),
        ("gptq", {"g_idx": torch.full((32,), 7)}, "q_proj.weight .*cannot be unpacked"),
        ("gptq", {"g_idx": torch.zeros(64).int()}, "q_proj.weight .*cannot be unpacked"),
        ("gptq", {"g_idx": torch.zeros(32).bool()}, "q_proj.weight .*cannot be unpacked"),
        ("gptq", packed((64, 32), "gptq")[0], r"q_proj.weight of .* is \(64, 32\), and by its config.json \(32, 32\)"),
        ("compressed-tensors in 8 bits", {"weight_scale": None}, "q_proj.weight .*cannot be unpacked"),
        ("compressed-tensors in 8 bits", {"weight_scale": torch.ones(1, 32)}, "q_proj.weight .*cannot be unpacked"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_packed_matrices_that_do_not_fit_are_refused(kind, changed, error, tmp_path):
    folder, file = saved(tmp_path, intermediate_size=64), tmp_path / "model.safetensors"
    pack_checkpoint(tmp_path, kind)
    wrong = {f"model.layers.0.self_attn.q_proj.{end}": each for end, each in changed.items()}
    state = {name: each.contiguous() for name, each in (load_file(file) | wrong).items() if each is not None}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UsageError, match=error):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(("width", "size", "groups"), [(48, 32, [32, 16]), (48, 48, [48]), (64, 48, [48, 16])])
def test_the_last_group_may_be_smaller_than_the_size_that_settings_name(width, size, groups, tmp_path):
    """Without `g_idx`, as AutoRound writes them; two groups of equal sizes would be another model."""
    codes, scales = (
        torch.randint(16, (8, width)),
        torch.rand(8, len(groups)) + 0.5,
    )  # float32: products are rounded once
    words = {"qweight": in_words(codes, 4).T, "qzeros": torch.full((len(groups), 1), 0x77777777), "scales": scales.T}
    file = tmp_path / "model.safetensors"
    save_file(
        {f"a.{end}": each.int().contiguous() if "q" in end else each.contiguous() for end, each in words.items()}, file
    )
    read = packed_tensors([file], {"quant_method": "gptq", "group_size": size}).state(
        torch.float32, lambda weight: weight
    )
    spread = scales.repeat_interleave(torch.tensor(groups), 1)
    assert torch.equal(read["a.weight"], spread * (codes - 8))


def test_scales_that_float16_has_no_room_for_are_not_put_into_blocks(tmp_path):
    """In 4 bits with zero points, minima are up to 15 times a scale."""
    parts, _ = packed((32, 32), "gptq_v2")
    for scale, formats in ((4000.0, {"Q4_1"}), (5000.0, {""})):
        state = {f"a.{end}": each.contiguous() for end, each in parts.items()} | {
            "a.scales": torch.full((1, 32), scale)
        }
        save_file(state, tmp_path / "model.safetensors")
        settings = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
        assert packed_tensors([tmp_path / "model.safetensors"], settings).formats() == formats


def test_blocks_that_are_no_part_of_a_matrix_are_refused(tmp_path):
    """By transformers, 40 rows with 2 scales are 2 blocks of 20 rows, and not of 32 and 8."""
    pytest.importorskip("accelerate", reason="accelerate, which transformers needs for FP8, is not installed")
    folder = saved(tmp_path, intermediate_size=40)
    quantise_checkpoint(tmp_path, 32)
    with pytest.raises(UsageError, match=r"down_proj.weight, 32 x 40 numbers, .*GGUF file"):
        load_model(folder, device="cpu")


def test_a_scale_of_experts_that_transformers_leaves_out_is_refused(tmp_path):
    """Test with a model that is loaded already, as compressed-tensors is not installed."""
    name = "model.layers.0.mlp.experts.3.up_proj.weight_global_scale"
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    config = configuration("llama")
    config.quantization_config = {"quant_method": "compressed-tensors"}
    with pytest.raises(UsageError, match=rf"cannot run it here: it leaves {name} out"):
        load_quantised(tmp_path, config, "cpu", lambda: (SimpleNamespace(), {"missing_keys": ()}))


def test_weights_that_memory_has_no_room_for_are_not_dequantised(tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.model.quantised.usable_memory", lambda: 10_000)
    folder = saved(tmp_path, "gpt_oss", intermediate_size=64)
    quantise_checkpoint(tmp_path)
    with pytest.raises(
        UsageError, match=r"its weights take .* GB, and there are 0\.0 GB of memory\. Take the model's GGUF"
    ):
        load_model(folder, device="cpu")


def test_weights_that_transformers_does_not_read_are_told_as_such(tmp_path):
    """As those of a mixture's experts in GPTQ, which transformers fills with random numbers."""
    config = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    with pytest.raises(UsageError, match=r"cannot run it here: it finds no weight a\.b\. Take the model's GGUF file"):
        load_quantised(tmp_path, config, "cpu", lambda: (SimpleNamespace(), {"missing_keys": {"a.b"}}))


def test_a_library_that_cannot_run_its_first_pass_is_an_error_with_what_to_do(tmp_path):
    def fails(_):
        raise RuntimeError("other dtypes")

    config, model = (
        SimpleNamespace(quantization_config={"quant_method": "torchao"}),
        Mock(side_effect=fails, is_quantized=True),
    )
    with pytest.raises(UsageError, match=r"\(quant_method torchao\).*RuntimeError: other dtypes\. Take"):
        load_quantised(tmp_path, config, "cpu", lambda: (model, {"missing_keys": ()}))


@pytest.mark.parametrize(
    ("settings", "package", "sentence"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "optimum",
            "Install optimum and gptqmodel, or take the model's GGUF file",
        ),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel", "Install what it names, or take"),
        ({"quant_method": "compressed-tensors"}, "compressed_tensors", "compressed-tensors.*Install what it names"),
        ({"bits": 4, "group_size": 64}, None, r"quant_method None\).*does not know this kind\. Take the model's GGUF"),
        ({"quant_method": "modelopt"}, None, "does not know this kind"),
        ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, None, "leave transform_config out"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, None, "leave rotation out"),
    ],
    ids=["gptq", "awq", "compressed-tensors", "mlx", "modelopt", "rotations", "rotations of gptqmodel"],
)
def test_what_transformers_cannot_run_says_what_to_do(settings, package, sentence, tmp_path):
    if package is not None and find_spec(package):
        pytest.skip(f"{package} is installed")
    folder = saved(tmp_path)
    declare(tmp_path, settings)
    with pytest.raises(UsageError, match=sentence):
        load_model(folder, device="cpu")


def test_a_quantised_model_is_not_said_to_be_compilable():
    quantised, other = (SimpleNamespace(model=SimpleNamespace(is_quantized=each)) for each in (True, False))
    assert "GGUF file" in uncompiled(quantised)
    assert "foredraft compile MODEL" in uncompiled(other)


@pytest.mark.parametrize(
    "settings",
    [
        BitNetQuantConfig(),
        SimpleNamespace(quantization_config=SimpleNamespace(config_groups={"a": W8A8})),
        SimpleNamespace(quant_type="Int8DynamicActivationInt8WeightConfig()"),
    ],
    ids=["bitnet", "compressed-tensors", "torchao"],
)
def test_kinds_that_quantise_activations_are_named(settings):
    config = configuration("llama")
    config.quantization_config = settings
    with pytest.warns(ForedraftWarning, match="quantises activations.*may differ from plain decoding's"):
        warn_where_rows_depend(config)


@pytest.mark.parametrize(("settings", "warned"), [({}, 1), ({"llm_int8_threshold": 0.0}, 0)])
def test_eight_bits_that_depend_on_other_rows_are_named(settings, warned, recwarn):
    """Test by configuration, as bitsandbytes is not installed."""
    model = tiny_model(configuration("llama"))
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True, **settings)
    TorchTarget(model)
    said = [str(each.message) for each in recwarn if issubclass(each.category, ForedraftWarning)]
    assert len(said) == warned
    assert all("Load it with llm_int8_threshold=0.0" in each for each in said)


def test_a_model_that_bitsandbytes_quantised_writes_the_same_drafted_or_not():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which transformers needs for bitsandbytes, is not installed")
    for options in (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ):
        pair = (
            AutoModelForCausalLM.from_pretrained(
                TOY, dtype=torch.float32, quantization_config=options, device_map="cpu"
            ),
            load_tokenizer(TOY),
        )
        same_text_drafted_or_not(pair)
