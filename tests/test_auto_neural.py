"""`auto` with a neural drafter among its sources: early exits, Medusa's heads, the target's own layers."""

import itertools

import numpy as np
import pytest

import foredraft
from draft_counts import count_drafts
from foredraft.contracts import NO_BUDGET, Budget, Draft, Needs, Verdict
from foredraft.drafters import Resources, auto, make_drafter
from foredraft.drafters.auto import AutoDrafter, AutoOptions
from foredraft.errors import ForedraftWarning
from foredraft.graph.tree import chain_parents
from foredraft.index.library import Library
from foredraft.index.own_words import NO_WORDS, TOP
from foredraft.testing.recording import Recorder
from support.drafts import opened, propose
from support.exits import plain, target_of, written
from support.families import SETTINGS, VOCABULARY, of_families
from support.heads import head_folder, head_of
from support.pairs import pairs
from support.speculators import dflash_config, dflash_tensors, eagle3_config, eagle3_tensors, save_drafter
from support.toys import TOY, TOY_HEADS
from support.worth import asked

FAMILIES = ["llama", "gpt2", "gemma2", "gpt_neox"]


CHAIN = {"out_degree": 1, "least_probability": 0.0}


class RestingControl:
    """Asks and rests, by turns."""

    def __init__(self, nodes):
        self._turns = itertools.cycle([Budget(nodes, 8)] * 3 + [NO_BUDGET] * 2)

    def budget(self, depth, _lanes=1):
        budget = next(self._turns)
        return budget if budget.nodes == 0 else Budget(budget.nodes, min(budget.depth, depth))

    def trim(self, drafts, _budgets):
        return drafts

    def observe(self, *_seconds):
        """Learn nothing."""


def blended(kind, family, folder):
    drafter = {
        "eesd chain": lambda: {"method": "eesd", "head": head_folder(family, 1, folder), **CHAIN},
        "eesd tree": lambda: {"method": "eesd", "head": "none", "layers": 2, "least_probability": 0.0},
        "medusa": lambda: {"method": "medusa", "head": head_of(family, folder)},
        "eagle3": lambda: {"method": "eagle3", "model": save_drafter(folder, eagle3_config(), eagle3_tensors())},
        "dflash": lambda: {
            "method": "dflash",
            "model": save_drafter(folder, dflash_config(aux_hidden_state_layer_ids=[0, 1, 3]), dflash_tensors()),
        },
    }[kind]()
    options = {"store": "none", "table": "none", "drafter": drafter}
    return make_drafter("auto", options, Resources(VOCABULARY, target=target_of(family)))


@of_families(
    ("family", "kind", "setting"),
    pairs(FAMILIES, ["eesd chain", "eesd tree", "medusa", "eagle3", "dflash"], list(SETTINGS)),
)
def test_the_text_is_that_of_plain_decoding_asked_or_not(family, kind, setting, tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True, True, False))
    drafter = blended(kind, family, tmp_path)
    text, records = written(target_of(family), family, setting, drafter, control=RestingControl(8))
    assert text == plain(family, setting)
    assert sum(record.drafted for record in records) > 20


@pytest.mark.slow
def test_the_draft_of_an_exit_head_helps_the_other_sources(monkeypatch):
    """A chain, and a tree."""
    monkeypatch.setattr(auto, "Worth", asked(True))
    prompt = [{"role": "user", "content": "Tom has 4 apples and buys 7 more. How many apples does he have?"}]
    generator = foredraft.load(TOY, method="none", dtype="float32", compile=False)
    settings = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "seed": 2}
    expected = generator.generate(prompt, **settings)
    head, steps = {"method": "eesd", "head": TOY_HEADS["eesd"]}, []
    for options in ({}, {"drafter": head | {"out_degree": 1, "least_probability": 0.0}}, {"drafter": head}):
        generator.use("auto", options, nodes=8)
        found = generator.generate(prompt, **settings)
        assert found.token_ids == expected.token_ids
        steps.append(found.statistics.tokens_per_target_step)
    assert min(steps[1:]) > 1.2 * steps[0]


def test_it_is_named_by_its_method_and_needs_what_it_needs(tmp_path):
    made = blended("medusa", "llama", tmp_path)
    assert "auto, medusa" in made.source_names
    assert "auto, draft model" not in made.source_names
    assert made.needs.hidden
    assert made.needs.top_k == TOP
    made = blended("eesd tree", "llama", tmp_path)
    assert made.needs.models == made.neural.needs.models != ()
    assert not made.needs.hidden
    assert not made.needs.every_step


class Scripted:
    """A drafter that proposes a chain without scores, and keeps what it is shown."""

    name, needs, source_names = "scripted", Needs(every_step=False), ("scripted",)

    def __init__(self, *tokens):
        self.tokens, self.seen = np.array(tokens, np.int32), []

    def open(self, context):
        return self

    def propose(self, view, budget):
        tokens = self.tokens[: min(budget.nodes, budget.depth)]
        return Draft(tokens, chain_parents(len(tokens)))

    def observe(self, verdict):
        self.seen.append(verdict)

    def close(self):
        """Forget nothing."""


def with_scripted(*tokens, **options):
    neural = Scripted(*tokens)
    made = AutoDrafter(AutoOptions(**options), NO_WORDS, Library(vocabulary=VOCABULARY), neural=neural)
    return opened(made, vocabulary=VOCABULARY), neural


def test_a_blended_drafter_that_learns_is_told_to_forget():
    neural, forgotten = Scripted(5), []
    neural.forget = lambda: forgotten.append(True)
    AutoDrafter(AutoOptions(), NO_WORDS, Library(vocabulary=VOCABULARY), neural=neural).forget()
    assert forgotten == [True]


def test_it_is_asked_no_deeper_than_levels_and_its_draft_needs_no_scores(monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True))
    drafting, _ = with_scripted(5, 6, 7, 8, 9, levels=3)
    assert propose(drafting, [1, 2], 16, vocabulary=VOCABULARY).tokens.tolist() == [5, 6, 7]


def test_it_is_shown_no_numbers_of_autos_sources(monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True))
    drafting, neural = with_scripted(5, 6)
    draft = propose(drafting, [1, 2], 8, vocabulary=VOCABULARY)
    drafting.observe(Verdict((5, 9), (0,), draft, 1))
    assert neural.seen[0].draft.source is None
    assert neural.seen[0].draft.tokens.tolist() == draft.tokens.tolist()


def test_a_draft_that_is_no_tree_leaves_it_out(monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True))
    drafting, neural = with_scripted(5, 6)
    neural.propose = lambda _view, _budget: Draft(np.array([5, 6], np.int32), np.array([1, -1], np.int32))
    with pytest.warns(ForedraftWarning, match="source 'auto, scripted' failed"):
        propose(drafting, [7, 8, 9, 7, 8], 8, vocabulary=VOCABULARY)
    assert propose(drafting, [7, 8, 9, 7, 8, 9], 8, vocabulary=VOCABULARY).tokens[0] == 7


def test_an_interrupt_inside_it_is_one_also_where_it_has_another_name(monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True))
    drafting, neural = with_scripted(5, 6)

    def interrupted(_view, _budget):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    neural.propose = interrupted
    with pytest.raises(KeyboardInterrupt):
        propose(drafting, [7, 8, 9, 7, 8], 8, vocabulary=VOCABULARY)


def test_one_that_cannot_be_opened_is_left_out(monkeypatch):
    def fails(_self, _context):
        raise ValueError("no")

    monkeypatch.setattr(Scripted, "open", fails)
    with pytest.warns(ForedraftWarning, match="source 'auto, scripted' failed"):
        drafting, _ = with_scripted()
    assert propose(drafting, [7, 8, 9, 7, 8], 8, vocabulary=VOCABULARY).tokens[0] == 9


@pytest.mark.slow
def test_what_it_drafts_is_explained(monkeypatch):
    monkeypatch.setattr(auto, "Worth", asked(True))
    options = {"drafter": {"method": "eesd", "head": "none", "layers": 6}}
    generator = foredraft.load(TOY, method="auto", speculative_config=options, dtype="float32", compile=False)
    recorded = Recorder(generator.drafter)
    generator.attach("auto", recorded, nodes=6)
    generator.generate("The old lighthouse", max_new_tokens=16)
    assert count_drafts(recorded.verdicts, recorded.source_names).drafted_by_source["auto, eesd"] > 0
