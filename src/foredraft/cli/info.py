"""`foredraft info`: what a model is, whether it can be verified as a tree, and what verifying costs on this machine.

Reads the configuration first, so that an unsupported model is refused before its weights are loaded. Does not know why
a model is supported; `foredraft.model.support` does.
"""

from collections import Counter
from typing import Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.screen import show_facts, show_json, working
from foredraft.cli.tables import cost_rows, show_cost
from foredraft.errors import UsageError
from foredraft.model.gguf import SMOLLM2

NOT_COMPILED = "Nothing is compiled of this model for this machine; `foredraft compile MODEL` does it (CPU only)."


def info(
    model: flags.ModelArgument = SMOLLM2,
    as_json: flags.JsonOption = False,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Read the configuration, load no weights")] = False,
    dtype: flags.DtypeOption = "auto",
    device: flags.DeviceOption = None,
) -> None:
    """Say whether and how a model is supported, and measure what verifying drafts costs."""
    with working(f"reading {model}"):
        from foredraft.model.loading import load_config

        config = load_config(model)
        facts = _described(model, config)
    if not no_measure:
        try:
            facts |= _measured(model, dtype, device)
        except UsageError as error:  # the configuration says much without the weights
            facts |= {"note": f"Not measured. {error}"}
    if as_json:
        show_json(facts)
    else:
        _print(facts)


def _described(model: str, config: Any) -> dict[str, Any]:
    """Return what the configuration tells; raises `UnsupportedModelError` where it rules the model out."""
    from foredraft.model.loading import build_without_weights
    from foredraft.model.support import inspect

    support = inspect(config)
    empty = build_without_weights(config)
    return {
        "model": model,
        "family": support.family,
        "supported": True,
        "tested": support.tested,
        "layers": len(support.layer_types),
        "attention": dict(Counter(support.layer_types)),
        "sliding_window": next((window for window in support.windows if window is not None), None),
        "window": support.window,
        "window_note": support.window_note,
        "vocabulary": int(empty.get_output_embeddings().weight.shape[0]),
        "parameters": sum(parameter.numel() for parameter in empty.parameters()),
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
    }


def _measured(model: str, dtype: str, device: str | None) -> dict[str, Any]:
    """Load the weights; return what only they tell, and what passes cost by their rows."""
    with working(f"loading {model}") as tell:
        from foredraft.cache_folder import cache_path
        from foredraft.model.compiled.package import kept_forward
        from foredraft.model.cost import measured_cost
        from foredraft.model.loading import load_model
        from foredraft.model.rounding import dtype_name
        from foredraft.model.target import TorchTarget

        loaded = load_model(model, dtype, device)
        target = TorchTarget(loaded, kept_forward(loaded))
        tell(0.0, "measuring what verification costs")
        curve = measured_cost(target, cache_path())  # the figures that generation uses on this machine
        compiled = target.compiled.record.told() if target.compiled is not None else [NOT_COMPILED]
    return {
        "dtype": dtype_name(target.model),
        "device": str(target.device),
        "cost": cost_rows(curve),
        "compiled": compiled,
    }


def _print(facts: dict[str, Any]) -> None:
    tested = "compared with plain decoding in foredraft's tests" if facts["tested"] else (
        "not among those foredraft's tests cover; a tree is compared with plain rows when it is loaded"
    )  # fmt: skip
    attention = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in facts["attention"].items())
    sliding = f" over {facts['sliding_window']:,} tokens" if facts["sliding_window"] else ""
    window = f"{facts['window']:,} tokens" if facts["window"] else "no limit in the configuration"
    lines = {
        "model": facts["model"],
        "family": f"{facts['family']}, {tested}",
        "attention": f"{attention}{sliding}",
        "window": f"{window} ({facts['window_note']})" if facts["window_note"] else window,
        "vocabulary": f"{facts['vocabulary']:,}",
        "parameters": f"{facts['parameters']:,}",
        "dtype": f"{facts['dtype']} on {facts['device']}" if "device" in facts else facts["dtype"],
        "supported": "every method, chains and trees; greedy decoding and sampling",
        "note": facts.get("note", ""),
    }
    show_facts(lines)
    if "cost" in facts:
        show_cost(facts["cost"])
    for sentence in facts.get("compiled", ()):
        typer.echo(sentence)
