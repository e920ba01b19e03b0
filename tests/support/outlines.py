"""What a model without weights says of the one that is loaded with them."""

from foredraft.model.fingerprint import architecture
from foredraft.model.loading import load_model, load_outline


def facts_of(model):
    weights = {name: (each.dtype, tuple(each.shape)) for name, each in model.state_dict().items()}
    ends = (model.generation_config.eos_token_id, model.generation_config.suppress_tokens)
    code = {type(each) for each in model.modules()}
    return code, architecture(model.config), model.dtype, model.config.name_or_path, weights, ends


def assert_outlined(name, dtype):
    """Assert that the outline of a named model says what the model does, and has no weights."""
    outline = load_outline(name, dtype, "cpu")
    assert outline.device.type == "meta"
    assert facts_of(outline) == facts_of(load_model(name, dtype, "cpu"))
