"""How a forward was compiled: which recipe won, why better ones did not, and that texts are right by each of them."""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from foredraft.cache_folder import CACHE_VARIABLE
from foredraft.cli import main
from foredraft.errors import ForedraftError, ForedraftWarning
from foredraft.model.compiled import build
from foredraft.model.compiled.build import RECIPES, compile_forward
from foredraft.model.compiled.library import CompiledLibrary
from foredraft.model.compiled.package import RECORD, compiled_folder, read_record, weights_hash, write_record
from foredraft.model.target import TorchTarget
from support.compilation import METHODS, SAMPLINGS, compiled_by, record_of, written
from support.llamas import llama, small_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory):
    """A cache folder that holds the compiled forward of `small_model`."""
    folder = tmp_path_factory.mktemp("recipes-cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own calls
        compile_forward(small_model(), folder)
    return folder


@pytest.fixture
def cache(compiled_cache):
    return compiled_cache


def only(monkeypatch, *working):
    """Have every recipe fail but those that are named."""
    compile_by = build._compile

    def compile_if_working(subject, recipe, path, **options):
        if recipe not in working:
            raise RuntimeError(f"{recipe} are broken\nin a long trace")
        return compile_by(subject, recipe, path, **options)

    monkeypatch.setattr(build, "_compile", compile_if_working)


@pytest.mark.slow
def test_the_recipe_and_its_kernels_are_recorded(cache):
    record = read_record(compiled_folder(small_model(), cache))
    assert (record.recipe, record.lost, record.torch, record.warning) == ("our kernels", {}, torch.__version__, "")
    assert record.kernels == ("attention", "products")
    assert record.told()[1] == "The package is made of our kernels (attention, products)."


def test_the_commands_show_which_recipe_won(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    llama().save_pretrained(tmp_path / "model")  # saving changes a configuration, by which packages are found
    for command in (["compile"], ["info", "--dtype", "float32"]):
        assert main([*command, str(tmp_path / "model")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "The package is made of our kernels (attention, products)." in shown
        assert f"Compiled by torch {torch.__version__}." in shown


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, len(RECIPES)), ids=RECIPES[1:])
def test_a_recipe_that_worked_with_an_earlier_torch_is_missed_and_the_next_one_writes_the_same_texts(
    place, tmp_path, monkeypatch
):
    """The earlier record is that of another setting, as where torch was another."""
    model, recipe = small_model(), RECIPES[place]
    elsewhere = tmp_path / "compiled" / "another-setting" / weights_hash(model)
    elsewhere.mkdir(parents=True)
    write_record(elsewhere, record_of(RECIPES[0]))
    only(monkeypatch, recipe)
    with pytest.warns(ForedraftWarning, match="With torch 9.9 .* made of our kernels, which fails with") as said:
        folder, record = compile_forward(model, tmp_path)
    assert read_record(folder) == record
    assert record.warning in [str(each.message) for each in said]  # torch's compiler warns of its own calls too
    assert record.recipe == recipe
    assert record.lost == {each: f"RuntimeError: {each} are broken" for each in RECIPES[:place]}
    assert f"is made of {recipe} (" in " ".join(record.told())
    assert "Our kernels failed: RuntimeError: our kernels are broken." in record.told()
    target = compiled_by(model, folder, record)
    for sampling in SAMPLINGS:
        expected = written(TorchTarget(model), "none", {}, 0, sampling)
        for method, options, nodes in METHODS:
            assert written(target, method, options, nodes, sampling) == expected


def test_every_failed_recipe_gives_its_reason(tmp_path, monkeypatch):
    only(monkeypatch)
    with pytest.raises(ForedraftError) as refused:
        compile_forward(small_model(), tmp_path)
    for recipe in RECIPES:
        assert f"by {recipe}: RuntimeError: {recipe} are broken" in str(refused.value)


@pytest.mark.parametrize("rows", [1, 2, 13, 17, 48, 255])
def test_one_bit_that_differs_in_passes_of_one_size_is_found(cache, tmp_path, monkeypatch, rows):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "_compiled", lambda _subject, folder, **_: read_record(folder))  # it is in the cache
    run = CompiledLibrary.run

    def run_otherwise(package, tensors):
        logits, *others = run(package, list(tensors))
        if len(logits) == rows:
            logits.view(torch.int32)[-1, -1] ^= 1
        return logits, *others

    monkeypatch.setattr(CompiledLibrary, "run", run_otherwise)
    _, record = compile_forward(small_model(), tmp_path, again=True)
    assert not record.same_bits


def test_with_another_number_of_threads_rows_are_as_precise_as_was_chosen_last(cache, tmp_path, monkeypatch):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    folder = compiled_folder(small_model(), tmp_path)
    compiled = read_record(folder)
    write_record(folder, replace(compiled, precise=True))
    other = folder.parents[1] / "another setting" / folder.name
    shutil.copytree(folder, other)
    monkeypatch.setattr(build, "compiled_folder", lambda _model, _cache: other)
    monkeypatch.setattr(build, "_compiled", lambda _subject, _folder, *, precise: replace(compiled, precise=precise))
    (other / RECORD).unlink()
    assert compile_forward(small_model(), tmp_path)[1].precise
    write_record(other, replace(compiled, precise=False))
    assert not compile_forward(small_model(), tmp_path, again=True)[1].precise
