"""The compiled forward: the same scores and texts as the model's own, found only by what it was compiled for."""

import copy
import gc
import json
import shutil
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._inductor.exc import InductorError
from torch.torch_version import TorchVersion

import foredraft.model.compiled.build as compiling_module
import naive.compiled
from foredraft.api import Generator
from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import main
from foredraft.engine.batch import steps
from foredraft.errors import ForedraftError, ForedraftWarning, StoreError, UsageError
from foredraft.graph.layout import lay_out, lay_out_text
from foredraft.model import machine
from foredraft.model.compiled.attention import compiled_attention
from foredraft.model.compiled.build import compile_forward
from foredraft.model.compiled.export import FunctionalForward, row_arguments
from foredraft.model.compiled.library import CompiledLibrary, weights_beside
from foredraft.model.compiled.package import (
    MOST_ROWS,
    RECORD,
    CompiledForward,
    compiled_folder,
    find_compiled,
    kept_forward,
    package_hash,
    package_path,
    read_record,
    write_record,
)
from foredraft.model.layers import LAST, usual_taps
from foredraft.model.loading import Outline, load_model
from foredraft.model.machine import multiplies_by_pairs
from foredraft.model.mask import joined_mask
from foredraft.model.named_target import load_target
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from forward_against_bandwidth import weight_bytes
from support.causal_types import tiny_configuration
from support.compilation import METHODS, SAMPLINGS, compiled_by, compiled_once, record_of, written
from support.families import FAMILIES, VOCABULARY, configuration, each_of, prompt_of, random_tree, tiny_model
from support.llamas import llama, small_model

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def compiled_cache(packages, tmp_path_factory):
    """A cache folder that holds the compiled forward of `small_model`, in two dtypes."""
    folder = tmp_path_factory.mktemp("compiled-cache")
    for dtype in DTYPES:
        compiled_once(small_model(dtype), packages)
        shutil.copytree(compiled_folder(small_model(dtype), packages), compiled_folder(small_model(dtype), folder))
    return folder


@pytest.fixture
def cache(compiled_cache):
    return compiled_cache


EXIT = {"head": "none", "layers": 1}


@pytest.fixture(scope="module")
def parts_cache(compiled_cache, tmp_path_factory):
    """A cache folder that holds the compiled forwards of `small_model`, and of its layers before an exit."""
    folder = tmp_path_factory.mktemp("parts-cache")
    shutil.copytree(compiled_cache, folder, dirs_exist_ok=True)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv(CACHE_VARIABLE, str(folder))
        Generator(TorchTarget(small_model()), None, method="eesd", options=EXIT, nodes=6).compile()
    return folder


def compiled_target(cache, dtype=torch.float32):
    """Return `small_model` as a target that runs its package."""
    model = small_model(dtype)
    folder = compiled_folder(model, cache)
    return compiled_by(model, folder, read_record(folder))


@each_of(FAMILIES)
def test_the_functional_forward_scores_and_writes_as_the_model_does(family):
    model = tiny_model(configuration(family))
    target, ids = TorchTarget(model), prompt_of(12)
    functional = FunctionalForward(model)
    expected, given = target.new_cache(), target.new_cache()
    for each in (expected, given):
        target.prefill(ids[:-1], each)
    tokens, parents = random_tree(np.random.default_rng(4), 9)
    layout = lay_out(int(ids[-1]), tokens, parents, len(ids) - 1)
    expected_scores = target.forward(layout, expected, hidden=(LAST,))
    buffers = given.reserved_buffers(layout.rows)
    places = {window: [(0, span.stored)] for window, span in given.spans.items()}
    arguments = row_arguments([layout], places, np.arange(layout.rows), target.dtype)
    layers, own = len(buffers) // 2, family == "falcon"  # whose attention is its own
    arguments = (*arguments[:5], None, *arguments[6:]) if own else arguments  # then all rows have the first slots
    with torch.inference_mode(), nullcontext() if own else compiled_attention(functional, naive.compiled.attend):
        scores, hidden = functional(*arguments, buffers[:layers], buffers[layers:], [])
    for ours, theirs in ((scores, expected_scores.logits), (hidden, expected_scores.hidden)):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(given.reserved_buffers(0), expected.reserved_buffers(0), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "supported", "pairs"),
    [("AuthenticAMD", True, True), ("AuthenticAMD", False, False), ("GenuineIntel", True, False)],
)
def test_how_bfloat16_is_multiplied_follows_from_the_processor_alone(monkeypatch, vendor, supported, pairs):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    monkeypatch.setattr(machine, "processor_lines", lambda *_names: [f"vendor_id\t: {vendor}"])
    multiplies_by_pairs.cache_clear()
    assert multiplies_by_pairs() is pairs
    multiplies_by_pairs.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_hides_the_same_slots_in_every_dtype(dtype):
    for nodes in (0, 1, 12):
        tokens, parents = random_tree(np.random.default_rng(nodes), nodes)
        layout = lay_out(1, tokens, parents, 9)
        usual, quick = (joined_mask([layout], [9], each) for each in (torch.float64, dtype))
        assert quick.dtype == dtype
        assert quick.shape == (1, 1, nodes + 1, nodes + 10)
        assert torch.equal(quick == torch.finfo(dtype).min, usual == torch.finfo(torch.float64).min)
        assert torch.equal(quick == 0, usual == 0)


def rows_of(target, nodes, length):
    """Return the logits of a tree of `nodes` behind `length` tokens, and of the single row that follows its root."""
    ids, cache = prompt_of(length), target.new_cache()
    target.prefill(ids[:-1], cache)
    tokens, parents = random_tree(np.random.default_rng(nodes), nodes)
    tree = target.forward(lay_out(int(ids[-1]), tokens, parents, length - 1), cache).logits
    cache.commit([0])
    return tree, target.forward(lay_out_text(np.array([5]), length), cache).logits


@pytest.mark.slow
def test_compiled_rows_score_as_the_model_does(cache):
    plain, compiled = TorchTarget(small_model()), compiled_target(cache)
    for nodes in (0, 1, 2, 7, 31, 63):
        for length in (2, 40, 300):
            for ours, theirs in zip(rows_of(compiled, nodes, length), rows_of(plain, nodes, length), strict=True):
                assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_compiled_rows_are_the_same_to_the_last_bit_in_a_tree_and_alone(cache, dtype):
    target, ids = compiled_target(cache, dtype), prompt_of(40)
    tokens, parents = random_tree(np.random.default_rng(7), 23)
    cache_of_tree = target.new_cache()
    target.prefill(ids[:-1], cache_of_tree)
    tree = target.forward(lay_out(int(ids[-1]), tokens, parents, len(ids) - 1), cache_of_tree).logits
    assert tree.dtype == torch.float32
    assert dtype == torch.float32 or not torch.equal(tree, tree.to(dtype).float())  # as they were summed, not rounded
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        alone = target.new_cache()
        target.prefill(ids[:-1], alone)
        for place, token in enumerate([int(ids[-1]), *(int(tokens[each]) for each in path)]):
            row = target.forward(lay_out_text(np.array([token]), len(ids) - 1 + place), alone).logits
            alone.commit([0])
        assert torch.equal(tree[node + 1], row[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_prompt_leaves_the_same_bits_whole_and_token_by_token(cache, dtype):
    """It is longer than a pass may be, and the first of it goes to a cache that nothing was written to."""
    target, ids = compiled_target(cache, dtype), prompt_of(MOST_ROWS + 30)
    whole, apart = target.new_cache(), target.new_cache()
    target.prefill(ids, whole)
    for place, token in enumerate(ids):
        target.forward(lay_out_text(np.array([token]), place), apart)
        apart.commit([0])
    assert whole.length == apart.length == len(ids)
    for ours, theirs in zip(whole.reserved_buffers(0), apart.reserved_buffers(0), strict=True):
        assert torch.equal(ours[:, :, : len(ids)], theirs[:, :, : len(ids)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(("method", "options", "nodes"), METHODS, ids=[each[0] for each in METHODS])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_compiled_texts_equal_plain_texts(cache, dtype, method, options, nodes, sampling):
    # in float32 also those of the model as it is; in bfloat16 that one rounds otherwise
    plain = TorchTarget(small_model()) if dtype == torch.float32 else compiled_target(cache, dtype)
    expected = written(plain, "none", {}, 0, sampling)
    assert written(compiled_target(cache, dtype), method, options, nodes, sampling) == expected


def test_the_bytes_of_a_pass_leave_out_an_embedding_that_is_only_looked_up():
    untied, tied = (llama(tie_word_embeddings=tie) for tie in (False, True))
    embedding = VOCABULARY * 32 * 4
    assert weight_bytes(untied) == 4 * sum(weight.numel() for weight in untied.parameters()) - embedding
    assert weight_bytes(tied) == weight_bytes(untied)


def test_a_package_is_loaded_where_the_temporary_folder_takes_none(cache, monkeypatch):
    folder = compiled_folder(small_model(), cache)
    before = set(folder.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/none")
    CompiledForward(folder, read_record(folder))
    assert set(folder.iterdir()) == before


@pytest.mark.skipif(not machine.has_avx2(), reason="without, products are torch's everywhere")
def test_a_forward_whose_products_would_be_torchs_is_not_compiled(tmp_path, monkeypatch):
    """As where the folder in which torch tries its instructions takes no programs."""
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    with pytest.raises(ForedraftError, match="TORCHINDUCTOR_CACHE_DIR"):
        compile_forward(small_model(), tmp_path)


def test_passes_round_alike_up_to_the_most_rows_that_are_compiled(cache):
    folder = compiled_folder(small_model(), cache)
    record = read_record(folder)
    forward = CompiledForward(folder, record)
    assert forward.rounds_alike(MOST_ROWS)
    assert not forward.rounds_alike(MOST_ROWS + 1)


def test_a_drafting_model_that_is_not_compiled_is_told(cache):
    target = compiled_target(cache, torch.float32)
    with pytest.warns(ForedraftWarning, match=r"'eesd' drafts with a model that is not compiled.*`foredraft compile`"):
        Generator(target, None, method="eesd", options=EXIT)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_layers_before_an_early_exit_are_compiled_and_write_the_same_text(parts_cache, monkeypatch, sampling):
    monkeypatch.setenv(CACHE_VARIABLE, str(parts_cache))
    folder = compiled_folder(small_model(), parts_cache)
    target = compiled_by(small_model(), folder, read_record(folder))
    expected = written(target, "none", {}, 0, sampling)
    generator = Generator(target, None, method="eesd", options=EXIT, nodes=6)  # a warning would fail the test
    (part,) = generator.drafter.needs.models
    monkeypatch.setattr(part.model, "forward", None)
    run = generator.begin(prompt_of(20), SamplingOptions(**sampling), max_new_tokens=48)
    records = list(steps(run))
    assert [token for record in records for token in record.emitted] == expected
    assert sum(record.drafted for record in records) > 0


@pytest.mark.parametrize("hidden", [(LAST,), *usual_taps(small_model())], ids=["last", "layers", "norm"])
def test_states_that_a_drafter_asks_for_are_the_compiled_passes(hidden, cache, monkeypatch):
    """The heads that go by them draft for compiled passes too."""
    target, plain = compiled_target(cache), TorchTarget(small_model())
    caches = [each.new_cache() for each in (plain, target)]
    tokens, parents = random_tree(np.random.default_rng(4), 9)
    layout = lay_out(5, tokens, parents, 11)
    found, read = [], []
    for each, own in zip((plain, target), caches, strict=True):
        read.append(each.prefill(prompt_of(11), own, hidden))
        found.append(each.forward(layout, own, hidden=hidden).hidden)
        monkeypatch.setattr(small_model(), "forward", None)  # the passes of `target` are the compiled ones
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*read, atol=1e-4, rtol=1e-4)
    assert len(read[0]) == (1 if hidden == (LAST,) else 11), "only scored rows have last states"
    assert target.forward(layout, caches[1]).hidden is None


def test_other_states_are_those_of_the_uncompiled_model(cache):
    target, plain = compiled_target(cache), TorchTarget(small_model())
    read = [each.prefill(prompt_of(11), each.new_cache(), (1, 0)) for each in (plain, target)]
    assert torch.equal(*read)


def test_a_second_compilation_keeps_what_is_there(cache):
    folder = compiled_folder(small_model(), cache)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.pt2")}
    told = []
    compile_forward(small_model(), cache, progress=lambda share, what: told.append(what))
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.glob("*.pt2")}
    assert told == []


def test_other_weights_and_other_threads_find_nothing(cache):
    assert find_compiled(small_model(), cache) is not None
    assert find_compiled(llama(seed=1), cache) is None
    assert find_compiled(llama(num_hidden_layers=3), cache) is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert find_compiled(small_model(), cache) is None
    finally:
        torch.set_num_threads(threads)


def test_the_same_weights_in_other_code_find_nothing(cache):
    """A class of the user's, or a newer version of a checkpoint's own code, may compute something else.

    So may another state of its objects, such as the active adapter of PEFT's modules, which hold several.
    """

    class Louder(torch.nn.Linear):
        def forward(self, rows):
            return self._factors[self.active] * super().forward(rows)

    model = copy.deepcopy(small_model())
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__, layer._factors, layer.active = Louder, {"loud": 2, "quiet": 0.5}, "loud"
    assert find_compiled(model, cache) is None
    folders = [compiled_folder(model, cache)]
    layer.active = "quiet"
    folders.append(compiled_folder(model, cache))
    layer._factors["quiet"] = 0.25
    folders.append(compiled_folder(model, cache))
    assert len(set(folders)) == 3


def test_the_same_weights_from_another_place_find_what_was_compiled(cache):
    moved = copy.deepcopy(small_model())
    moved.config._name_or_path = "elsewhere"
    assert find_compiled(moved, cache) is not None


def kept_checkpoint(cache, tmp_path, monkeypatch, *, dtype_named=True):
    """Return a folder with `small_model`, whose package is in a cache that is used until the test ends."""
    folder, own_cache = str(tmp_path / "model"), tmp_path / "cache"
    copy.deepcopy(small_model()).save_pretrained(folder)  # which adds to its configuration
    if not dtype_named:
        config = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps({name: config[name] for name in config if name != "dtype"}))
    package = compiled_folder(load_model(folder), own_cache)  # a saved configuration has further fields
    shutil.copytree(compiled_folder(small_model(), cache), package)
    monkeypatch.setenv(CACHE_VARIABLE, str(own_cache))
    return folder


@pytest.mark.parametrize("dtype_named", [True, False])
def test_weights_of_a_compiled_model_are_read_for_the_first_pass_that_needs_them(
    cache, tmp_path, monkeypatch, dtype_named
):
    folder = kept_checkpoint(cache, tmp_path, monkeypatch, dtype_named=dtype_named)
    first, again = load_target(folder), load_target(folder)
    assert [isinstance(each.outline, Outline) for each in (first, again)] == [False, True]
    for name in ("vocabulary", "parameters", "dtype", "device", "ids"):
        assert getattr(first, name) == getattr(again, name)
    texts = [written(each, "prompt_lookup", {}, 10, SAMPLINGS[1]) for each in (first, again)]
    assert texts[0] == texts[1]
    assert isinstance(again.outline, Outline)
    layers = (1, 0)  # states that compiled passes do not return
    read = [each.prefill(prompt_of(11), each.new_cache(), layers) for each in (first, again)]
    assert torch.equal(*read)
    assert torch.equal(again.outline.lm_head.weight, small_model().lm_head.weight)


def test_changed_files_are_not_taken_for_those_that_were_compiled(cache, tmp_path, monkeypatch):
    folder = kept_checkpoint(cache, tmp_path, monkeypatch)
    load_target(folder)
    unread = load_target(folder)
    llama(seed=1).save_pretrained(folder)
    with pytest.raises(UsageError, match=r"changed after the model was loaded; load it again\.$"):
        _ = unread.model
    target = load_target(folder)
    assert target.compiled is None
    assert torch.equal(target.outline.lm_head.weight, llama(seed=1).lm_head.weight)


def damaged(cache, tmp_path, change):
    """Return a copy of the cache in which `change` was done to the folder of packages."""
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    change(compiled_folder(small_model(), copy))
    return copy


def package_of(folder):
    return package_path(folder, read_record(folder))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def without_shapes(folder):
    record = json.loads((folder / RECORD).read_text())
    del record["shapes"]
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: truncate(package_of(folder)),
        lambda folder: package_of(folder).unlink(),
        lambda folder: truncate(weights_beside(package_of(folder))),
        lambda folder: weights_beside(package_of(folder)).unlink(),
        lambda folder: (folder / RECORD).write_text("{"),
        lambda folder: (folder / RECORD).write_text("[]"),
        without_shapes,
    ],
    ids=["truncated", "gone", "weights-truncated", "weights-gone", "no-json", "another-shape", "incomplete"],
)
def test_a_damaged_cache_is_told_and_not_used(cache, tmp_path, change, monkeypatch):
    copy = damaged(cache, tmp_path, change)
    for use in (find_compiled, compile_forward):
        with pytest.raises(StoreError, match=r"damaged.*--again"):
            use(small_model(), copy)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(copy))
    with pytest.warns(ForedraftWarning, match="goes on without it"):
        assert kept_forward(small_model()) is None


def made_of(old):
    """Return what compiles the package `old`, which has other bytes each time."""
    record = read_record(old.parent)

    def made(_subject, path, *, precise):
        shutil.copy(weights_beside(old), weights_beside(path))
        path.write_bytes(old.read_bytes() + b" ")  # what follows an archive is not read
        return replace(record, sha256=package_hash(path), precise=precise)

    return made


def test_compiling_again_keeps_the_old_package_until_its_end_and_then_the_new_one_alone(cache, tmp_path, monkeypatch):
    copy = damaged(cache, tmp_path, lambda folder: (folder / "forward.part.weights").touch())  # of a killed one
    folder = compiled_folder(small_model(), copy)
    old, other = package_of(folder), folder / "forward-other.pt2"

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling_module, "_compiled", made_of(old))
    for step in ("_same_bits", "place_file", "write_record"):
        with monkeypatch.context() as patch:
            patch.setattr(compiling_module, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                compile_forward(small_model(), copy, again=True)
        assert find_compiled(small_model(), copy) is not None
        assert package_of(folder) == old
        assert not [*folder.glob("forward.part*")]
    loaded = find_compiled(small_model(), copy)
    expected = written(compiled_target(cache), "none", {}, 0, {})
    other.touch()
    compile_forward(small_model(), copy, again=True)
    assert sorted(folder.glob("forward*")) == sorted((package_of(folder), weights_beside(package_of(folder))))
    for compiled in (find_compiled(small_model(), copy), loaded):
        assert written(TorchTarget(small_model(), compiled), "none", {}, 0, {}) == expected


def test_the_weights_of_a_package_leave_memory_with_it(cache, tmp_path):
    copy = damaged(cache, tmp_path, lambda _folder: None)
    weights = str(weights_beside(package_of(compiled_folder(small_model(), copy))))
    loaded = find_compiled(small_model(), copy)
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs a system that lists what is mapped")
    assert weights in Path("/proc/self/maps").read_text()
    del loaded
    gc.collect()
    assert weights not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("rows", [1, 2, 13, 17, 48, 255])
def test_a_forward_with_one_other_bit_in_passes_of_one_size_is_refused(cache, tmp_path, monkeypatch, rows):
    old = package_of(compiled_folder(small_model(), cache))
    monkeypatch.setattr(compiling_module, "_compiled", made_of(old))
    run = CompiledLibrary.run

    def run_otherwise(package, tensors):
        logits, *others = run(package, list(tensors))
        if len(logits) == rows:
            logits.view(torch.int32)[-1, -1] ^= 1
        return logits, *others

    monkeypatch.setattr(CompiledLibrary, "run", run_otherwise)
    with pytest.raises(ForedraftError, match="rounds otherwise beside other rows"):
        compile_forward(small_model(), tmp_path)
    assert find_compiled(small_model(), tmp_path) is None


def test_with_another_number_of_threads_rows_are_as_precise_as_was_chosen_last(cache, tmp_path, monkeypatch):
    copy = damaged(cache, tmp_path, lambda folder: write_record(folder, replace(read_record(folder), precise=True)))
    folder = compiled_folder(small_model(), copy)
    other = folder.parents[1] / "another setting" / folder.name
    monkeypatch.setattr(compiling_module, "_compiled", made_of(package_of(folder)))
    monkeypatch.setattr(compiling_module, "compiled_folder", lambda _model, _cache: other)
    assert compile_forward(small_model(), copy)[1].precise
    write_record(other, replace(read_record(other), precise=False))
    assert not compile_forward(small_model(), copy, again=True)[1].precise


def test_the_commands_show_what_was_compiled(cache, tmp_path, monkeypatch, capsys):
    folder = kept_checkpoint(cache, tmp_path, monkeypatch)
    for command in (["compile"], ["info", "--dtype", "float32"]):
        assert main([*command, folder]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"Compiled by torch {torch.__version__}; kernels: attention, products." in shown


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = record_of()
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "elsewhere") is None


def falcon():
    config = configuration("falcon")
    config.max_position_embeddings, config.hidden_size, config.num_attention_heads = 1024, 64, 4
    return tiny_model(config)


def steered():
    model = llama()
    model.model.layers[1].register_forward_hook(lambda _layer, _given, states: states + 1)
    return model


def replaced():
    model = llama()
    model.model.layers[0].mlp.forward = lambda states: states
    return model


def quantised():
    model = llama()
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: llama().to(torch.float16), "float16; foredraft compiles float32, bfloat16"),
        (quantised, "weights are quantised.*compiles the model's GGUF file"),
        (lambda: llama(max_position_embeddings=128), "window of 128 tokens is too short"),
        (lambda: llama(head_dim=8), "heads have 8 numbers, .* multiples of 16; it runs uncompiled"),
        (falcon, "falcon model attends in a way of its own.*it runs uncompiled"),
        (steered, r"module model\.layers\.1 of this model has a hook.*all models with these weights"),
        (replaced, r"module model\.layers\.0\.mlp of this model"),
        (lambda: tiny_model(tiny_configuration("llama4_text")), "Experts .*Llama4TextExperts"),
        (lambda: tiny_model(tiny_configuration("qwen3_moe")), "down_proj of 32 x 16 .*multiples of 8 x 32"),
        # foredraft's own functions of its recurrent layers are no reason
        (lambda: TorchTarget(tiny_model(tiny_configuration("lfm2"))).model, "window of 256 tokens is too short"),
    ],
    ids=[
        "float16",
        "quantised",
        "short-window",
        "small-heads",
        "falcon",
        "hook",
        "replaced",
        "llama4",
        "moe",
        "recurrent",
    ],
)
def test_what_cannot_be_compiled_is_refused(model, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        compile_forward(model(), tmp_path)


def test_a_torch_that_compiles_not_all_families_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cpu"))
    with pytest.raises(UsageError, match=r"torch 2\.9\.1\+cpu; foredraft compiles with 2\.13 or newer"):
        compile_forward(small_model(), tmp_path)


def test_a_model_too_large_for_the_containers_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    with pytest.raises(UsageError, match=r"needs 0\.0 GiB of memory, and there are 0\.0 GiB"):
        compile_forward(small_model(), tmp_path)


def test_no_compiler_and_no_room_are_one_sentence_each(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    def broken(*_args, **_options):
        raise RuntimeError("No working C++ compiler found\nin a long trace")

    monkeypatch.setattr(compiling_module, "_compiled", broken)
    with pytest.raises(ForedraftError, match=r"cannot be compiled \(RuntimeError: No working C.* Install a C\+\+"):
        compile_forward(small_model(), tmp_path)

    def full(*_args, **_options):
        raise InductorError(OSError(28, "No space left on device"), None)

    monkeypatch.setattr(compiling_module, "_compiled", full)
    with pytest.raises(ForedraftError, match=r"No space left.*Make room"):
        compile_forward(small_model(), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=2**20))  # enough for its weights
    with pytest.raises(ForedraftError, match=r"written \(it needs 64 MiB in .*, where 1 MiB are free\).*Make room"):
        compile_forward(small_model(), tmp_path)
    assert read_record(compiled_folder(small_model(), tmp_path)) is None
