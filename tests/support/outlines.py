"""What a model without weights says of the one that is loaded with them."""

from foredraft.model.fingerprint import architecture
from foredraft.model.loading import load_model, load_outline, location_of_files


def facts_of(model):
    ends = (model.generation_config.eos_token_id, model.generation_config.suppress_tokens)
    return architecture(model.config), model.dtype, model.config.name_or_path, model.name_or_path, ends


def assert_outlined(name, dtype):
    """Assert that the outline of a named model says what the model does."""
    model = load_model(name, dtype, "cpu")
    outline = load_outline(location_of_files(name, dtype, "cpu"), model.dtype, 0, 0)
    assert facts_of(outline) == facts_of(model)
