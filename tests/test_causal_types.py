"""Every type in transformers' mapping of causal language models: exact, or refused with a sentence.

The truth is transformers' own `generate` of a tiny random model, with its own cache and without one. Sampled texts are
compared with it too: a logits processor adds the noise that foredraft samples with, and the best token is chosen.
"""

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.errors import UnsupportedModelError
from foredraft.model.families import DECODERS, LAYER_REASONS, REFUSED_FAMILIES, TESTED_FAMILIES
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from foredraft.sampling.noise import gumbel_noise
from support.batches import in_company
from support.causal_types import LAYER_FAMILIES, tiny_configuration
from support.families import VOCABULARY, prompt_of, tiny_model, written
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in

NEW_TOKENS, SEED, TEMPERATURE = 12, 5, 0.8
PROMPT = prompt_of(40)  # longer than the sliding windows
GREEDY = SamplingOptions()
SAMPLED = SamplingOptions(do_sample=True, temperature=TEMPERATURE, seed=SEED)
REASONS = {name: reason for reason, names in REFUSED_FAMILIES.items() for name in names}
REASONS |= {name: LAYER_REASONS[kind] for kind, names in LAYER_FAMILIES.items() for name in names}


def with_noise(ids, scores):
    noise = gumbel_noise(SEED, ids.shape[1], np.arange(VOCABULARY, dtype=np.int64))
    return scores.double() / TEMPERATURE + torch.from_numpy(noise)


def own_text(model, processors=(), **options):
    prompt = torch.from_numpy(PROMPT)[None]
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[],
        pad_token_id=0, logits_processor=list(processors), **options,
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


def loaded(config):
    """The target, or why there is none."""
    try:
        inspect(config)  # as `load` does before it builds the model
        return TorchTarget(tiny_model(config)), ""
    except UnsupportedModelError as error:
        return None, str(error)


def writes(target, text, sampling, drafter):
    drafted, records = written(target, PROMPT, sampling, drafter, nodes=8, new_tokens=NEW_TOKENS)
    return drafted == text and sum(record.drafted for record in records) >= NEW_TOKENS // 2


def known(text):
    return continuation_in(np.concatenate([PROMPT, np.array(text, np.int64)]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_drafted_texts_equal_transformers_own_or_the_model_is_refused(model_type):
    target, refusal = loaded(tiny_configuration(model_type))
    if refusal:
        assert REASONS.get(model_type, "") in refusal, "the table of families says otherwise"
        assert model_type not in TESTED_FAMILIES
        return
    greedy, sampled = own_text(target.model), own_text(target.model, [with_noise])
    assert own_text(target.model, use_cache=False) == greedy
    assert len(set(sampled)) > 3, "a text of one repeated token would hide mistakes"
    assert writes(target, greedy, GREEDY, OracleDrafter(known(greedy), distractors=1, vocabulary=VOCABULARY))
    assert writes(target, greedy, GREEDY, AdversaryDrafter(known(greedy), VOCABULARY))
    assert writes(target, sampled, SAMPLED, OracleDrafter(known(sampled), vocabulary=VOCABULARY))
    assert writes(target, sampled, SAMPLED, RandomTreeDrafter(5, VOCABULARY))
    assert in_company(target, (PROMPT[:9], PROMPT, PROMPT[5:30]), NEW_TOKENS) == greedy
    assert model_type in TESTED_FAMILIES, "it works: add it to the table of families"


def test_the_tables_of_families_name_each_type_once():
    refused = [name for names in (REFUSED_FAMILIES | LAYER_FAMILIES).values() for name in names]
    assert len(refused) == len(set(refused))
    assert not TESTED_FAMILIES & set(refused)
    assert TESTED_FAMILIES >= DECODERS
    assert set(LAYER_FAMILIES) <= set(LAYER_REASONS)
