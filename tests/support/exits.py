"""Models of four layers that a draft may leave early, and what they write with and without drafts."""

import functools

from foredraft.contracts import DraftContext
from foredraft.control import FixedControl
from foredraft.drafters import Resources, make_drafter
from foredraft.engine.batch import steps
from foredraft.engine.run import Run
from foredraft.engine.state import SequenceState
from foredraft.model.target import TorchTarget
from support.families import LONG, NEW_TOKENS, SETTINGS, VOCABULARY, configuration, prompt_of, tiny_model

LAYERS = 4


@functools.cache
def target_of(family, layers=LAYERS):
    config = configuration(family)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return TorchTarget(tiny_model(config))


def written(target, family, setting, drafter, control=None):
    prompt = prompt_of(LONG)
    sampling = SETTINGS[setting]
    seq = SequenceState(prompt, sampling, max_new_tokens=NEW_TOKENS, window=target.window)
    settings = {"do_sample": sampling.do_sample, "temperature": sampling.temperature, "top_p": sampling.top_p}
    context = DraftContext(target.vocabulary, seed=sampling.seed, settings=settings)
    records = list(steps(Run(seq, drafter, control or FixedControl(8), context, target)))
    return seq.emitted.tolist(), records


@functools.cache
def plain_of(target, family, setting):
    return written(target, family, setting, make_drafter("none", {}, Resources(VOCABULARY)))[0]


def plain(family, setting):
    return plain_of(target_of(family), family, setting)
