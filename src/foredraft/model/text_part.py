"""The text model of a checkpoint or object with a vision or audio part: its configuration, its class, its weights.

transformers builds such a model as a wrapper: a language model, an output matrix, and encoders whose results replace
some embeddings. Without images or sounds, the first two are a causal language model. Does not load other models.
"""

import copy
import re
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.utils import logging

from foredraft.errors import UnsupportedModelError, told
from foredraft.model.rounding import error_beyond_rounding
from foredraft.model.support import inspect
from foredraft.model.waiting import Waiting, waiting_of

_COMPARED = 6  # tokens of the text with which a wrapper and its text model are compared (chosen)
_NAMES = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""How weights of the text model are named in wrappers' checkpoints, and alone; the first that matches is taken."""
_OURS = "TextModel"  # the class of foredraft.model.text_model, which takes seconds to import
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")
"""Fields of configurations for what a wrapper does to scores after its output matrix; `TextModel` does none of it."""


def text_config(config: Any) -> Any:
    """Return the configuration of the text model alone; that of a model without another part is returned as it is."""
    part = config.get_text_config()
    if part is config:
        return config
    part = copy.deepcopy(part)
    part.name_or_path = config.name_or_path
    part._experts_implementation = None  # noqa: SLF001  # what a wrapper's language model runs, `TextModel` does not take
    part.dtype = part.dtype or config.dtype
    if getattr(config, "quantization_config", None) is not None:
        part.quantization_config = config.quantization_config
    wrapper = AutoModelForMultimodalLM._model_mapping.get(type(config), None)  # noqa: SLF001  # as in `text_class`
    if getattr(wrapper, "_tied_weights_keys", None):  # else its language model is a causal class, and ties them itself
        part.tie_word_embeddings = config.tie_word_embeddings
    return part


def text_class(config: Any) -> Any:
    """Return the class of the model of a configuration, or of its text model: transformers' auto class, or another.

    Raises UnsupportedModelError if there is none, or what it computes after the output matrix is not known.
    """
    try:
        part = config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(
            f"This is a {config.model_type} model, which has several text models; foredraft supports decoder-only "
            "language models."
        ) from error
    is_decoder = part is config or not config.is_encoder_decoder
    causal: Any = AutoModelForCausalLM._model_mapping  # noqa: SLF001  # the only way to know without building the model
    if is_decoder and type(part) in causal:
        return AutoModelForCausalLM
    if is_decoder and type(config) in causal and causal[type(config)].config_class is type(part):
        return causal[type(config)]  # known by the wrapper's configuration alone, such as those of Emu3 and Mllama
    what = f"This is a {config.model_type} model"
    if part is not config:
        what += f" with a text model of the type {part.model_type}"
    is_wrapper = part is not config and type(config) in AutoModelForMultimodalLM._model_mapping  # noqa: SLF001  # as above
    is_ours = config.architectures == [_OURS]  # saved by its `save_pretrained`
    if not is_decoder or not (is_wrapper or is_ours) or type(part) not in AutoModel._model_mapping:  # noqa: SLF001  # as above
        raise UnsupportedModelError(
            f"{what}, which transformers has no causal language model for; foredraft supports decoder-only language "
            "models."
        )
    if scales := [name for name in _SCALES if getattr(part, name, None) not in (None, 1.0)]:
        raise UnsupportedModelError(
            f"{what}, which changes its scores by {' and '.join(scales)} in a way that foredraft does not know, as "
            "transformers has no causal language model for it alone."
        )
    from foredraft.model.text_model import TextModel

    return TextModel


def empty_model(config: Any) -> Any:
    """Return the model of a configuration, or its text model, on the meta device; raises what `text_class` does."""
    kind, part = text_class(config), text_config(config)
    with torch.device("meta"):
        return kind.from_config(part) if kind is AutoModelForCausalLM else kind._from_config(part)  # noqa: SLF001  # what auto classes call


def text_name(name: str) -> str:
    """Return how a weight of a checkpoint is named in the text model alone."""
    own = (re.sub(pattern, alone, name) for pattern, alone in _NAMES.items() if re.match(pattern, name))
    return next(own, name)


def load_text_model(location: str | None, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load the text model of a wrapper's folder or hub id, and no other weights, as `from_pretrained` does.

    Without a location, the option `state_dict` has the weights.

    Returns it and transformers' information on names that are missing; raises what `text_class` does, and
    `from_pretrained`.
    """
    kind, verbosity = type(empty_model(config)), logging.get_verbosity()
    logging.set_verbosity_error()  # it would report every weight of the other parts as unexpected
    try:
        loaded, found = kind.from_pretrained(
            location, config=text_config(config), key_mapping=_NAMES, output_loading_info=True, **options
        )
    finally:
        logging.set_verbosity(verbosity)
    vars(loaded).pop("_weight_conversions", None)  # by these, `save_pretrained` would write the wrapper's names
    return loaded, found


def text_model(model: Any) -> Any:
    """Return the text model of a wrapper, with the wrapper's weights; a model without another part as it is.

    Raises UnsupportedModelError if the wrapper's language model cannot be found, or scores a text otherwise alone.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.config.get_text_config() is model.config:
        return model
    text, head = empty_model(model.config), model.get_output_embeddings()
    inspect(model.config)  # before its mask is tried
    # its layers, without the output matrix, are a model of their own in both
    path, empty = next(
        (path, each) for path, each in text.named_modules() if path and isinstance(each, PreTrainedModel)
    )
    language = next((each for each in model.modules() if type(each) is type(empty)), None)
    if language is None or head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language model with an output matrix that foredraft can run without its "
            "other parts. Load its text model alone, and pass that."
        )
    text.set_submodule(path, language)
    text.set_output_embeddings(head)
    text.config, text.generation_config = language.config, model.generation_config
    text.name_or_path = model.name_or_path
    if (placed := vars(model).get("hf_device_map")) is not None:
        text.hf_device_map = placed
    with waiting_of(model, Waiting(torch.get_num_threads)).lock:  # a target of it may run meanwhile
        _check_scores(text.eval(), model)
    return text


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer as it is."""
    from transformers import ProcessorMixin

    return tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer


@torch.inference_mode()
def _check_scores(text: Any, wrapper: Any) -> None:
    """Raise UnsupportedModelError unless a text model with a causal mask scores a short text as its wrapper does."""
    embedding = wrapper.get_input_embeddings().weight
    ids = torch.arange(1, 1 + _COMPARED, device=embedding.device)[None] % len(embedding)
    causal = torch.full((_COMPARED, _COMPARED), torch.finfo(text.dtype).min, dtype=text.dtype, device=ids.device).triu(
        1
    )
    try:
        expected = wrapper(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    except Exception as error:  # there is no list of what a model raises that needs an image
        raise UnsupportedModelError(
            f"{type(wrapper).__name__} does not score a text alone ({told(error)}), so foredraft cannot run it."
        ) from error
    ours = text(input_ids=ids, attention_mask=causal[None, None]).logits[0]
    if difference := error_beyond_rounding(ours, expected, text):
        raise UnsupportedModelError(
            f"{type(wrapper).__name__} scores a text otherwise than its language model does alone (relative error "
            f"{difference:.1e}), so its texts cannot be drafted exactly."
        )
