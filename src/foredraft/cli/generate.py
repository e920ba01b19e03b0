"""`foredraft generate`: write the continuation of a prompt, once, or compared with plain decoding.

Parses, refuses what contradicts itself before a model is loaded, and prints. Defaults of generation are the library's:
an option that is not given is not passed on.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.declared import options_in_source
from foredraft.cli.screen import Ink, say, wants_color, working
from foredraft.errors import ForedraftError, UsageError
from foredraft.model.gguf import SMOLLM2

if TYPE_CHECKING:  # torch and transformers are imported when a text is written, so that help stays quick
    from foredraft.api import Generator, Prompt
    from foredraft.generation import Generation

_model = partial(typer.Option, rich_help_panel="The model")
_drafts = partial(typer.Option, rich_help_panel="Drafting, which never changes the text")
_text = partial(typer.Option, rich_help_panel="The text")

_WARM_UP = (1, 2, 3, 1, 2, 3, 1, 2)
"""Ids that let a drafter draft. First passes and compilation take seconds that no figure of a text should hold."""

_WARM_UP_TOKENS = 24
"""Enough for drafts to be accepted, refused and left out: each of these compiles something the first time."""

PromptArgument = Annotated[str | None, typer.Argument(help="What to continue or answer; - reads standard input")]
FileOption = Annotated[Path | None, _text(help="Read the prompt from this file")]
EagerOption = Annotated[bool, _model("--eager", help="Run the model as it is, also where it is compiled")]
ModelOption = Annotated[str, _model(help="smollm2, a GGUF file, a hub id, or a folder")]
DeviceOption = Annotated[str | None, _model(help="cpu, cuda, auto (spread); else the first GPU or the CPU")]
MethodOption = Annotated[str | None, _drafts(help="How to draft; see foredraft methods")]
ConfigOption = Annotated[str | None, _drafts(help="The method's options, as a JSON object")]
NodesOption = Annotated[
    int | None,
    _drafts(help="Draft this many a step; else as many as the measured cost repays"),
]
DtypeOption = Annotated[str, _model(help="auto takes the checkpoint's; float32 compares exactly")]
MemoryOption = Annotated[
    str | None,
    _drafts(help="Folder that keeps what was said, for later drafts; off unless it is named"),
]
SystemOption = Annotated[str | None, _text(help="A system message before the prompt")]
ColorOption = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colour drafted tokens; else on a terminal only")
]


def generation_flag(name: str, words: str = "") -> Any:
    """Return the option of a generation argument, with the library's default and description, or with `words`."""
    declared = options_in_source("foredraft.request", "GenerationOptions").get(name)
    if declared is None:
        return _text(help=words, show_default=False)
    shown = str(declared.default) if declared.default not in (None, ()) else False
    words = words or declared.description
    return _text(help=words[:1].upper() + words[1:].rstrip("."), show_default=shown)


def generate(
    prompt: PromptArgument = None,
    file: FileOption = None,
    model: ModelOption = SMOLLM2,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    eager: EagerOption = False,
    method: MethodOption = None,
    speculative_config: ConfigOption = None,
    draft_model: Annotated[str | None, _drafts(help="The model that drafts, for methods that use one")] = None,
    num_speculative_tokens: NodesOption = None,
    memory: MemoryOption = None,
    verification: Annotated[
        str | None, _drafts(help="matched (the default), or rejection, which keeps the law")
    ] = None,
    max_new_tokens: Annotated[int | None, generation_flag("max_new_tokens")] = None,
    do_sample: Annotated[
        bool | None, generation_flag("do_sample", "draw tokens, or take the most probable; else as other options imply")
    ] = None,
    temperature: Annotated[float | None, generation_flag("temperature")] = None,
    top_k: Annotated[int | None, generation_flag("top_k")] = None,
    top_p: Annotated[float | None, generation_flag("top_p")] = None,
    min_p: Annotated[float | None, generation_flag("min_p")] = None,
    repetition_penalty: Annotated[float | None, generation_flag("repetition_penalty")] = None,
    stop_strings: Annotated[
        list[str] | None, generation_flag("stop_strings", "the text ends behind this, which it includes; repeatable")
    ] = None,
    eos_token_id: Annotated[
        list[int] | None,
        generation_flag("eos_token_id", "id that ends the text, instead of the model's own; repeatable"),
    ] = None,
    seed: Annotated[int | None, generation_flag("seed", "of the sampling; else one is drawn and reported")] = None,
    raw: Annotated[bool, _text("--raw", help="Continue the text as it is, without the chat template")] = False,
    system: SystemOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Write it with and without drafting")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every step")] = False,
    color: ColorOption = None,
) -> None:
    """Write the continuation of a prompt: the same text as plain decoding, in fewer forward passes."""
    text = prompt_text(prompt, file)
    _refuse_contradictions(as_json=as_json, raw=raw, system=system, color=color)
    options = {
        "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "stop_strings": stop_strings,
        "eos_token_id": eos_token_id, "seed": seed,
    }  # fmt: skip
    job = Job(
        model, dtype, device, method,
        speculative_options(speculative_config, num_speculative_tokens, draft_model, verification, memory),
        {name: value for name, value in options.items() if value not in (None, [])},
        system, color=wants_color(color), raw=raw, as_json=as_json, eager=eager,
    )  # fmt: skip
    generator = job.load()
    if compare:
        from foredraft.cli.compare import compare_with_plain

        if not compare_with_plain(generator, job, job.worded(generator, text)):
            raise typer.Exit(1)
    else:
        _write(generator, job, job.worded(generator, text))


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for, parsed.

    Attributes:
        model: a name or folder.
        dtype: a name, or "auto".
        device: a name, or None.
        method: a name, or None for the library's default.
        config: speculative options.
        options: generation arguments that were given.
        system: a system message, or None.
        color: whether drafted tokens are coloured.
        raw: whether the prompt is continued as it is.
        as_json: whether standard output is JSON.
        eager: whether the model runs as it is, also where it is compiled.
    """

    model: str
    dtype: str
    device: str | None
    method: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    system: str | None
    color: bool
    raw: bool
    as_json: bool
    eager: bool = False

    def load(self) -> "Generator":
        """Load the model and the drafter, and measure what verification costs if that is not known yet.

        Raises:
            UsageError: generation arguments that contradict themselves, before anything is loaded; and what
                `foredraft.load` raises.
        """
        with working(f"loading {self.model}") as tell:
            from foredraft.api import Generator, load
            from foredraft.cli.kernels import begin_compiling, compile_drafting
            from foredraft.request import GenerationOptions

            GenerationOptions.parse(self.options)
            compiling = begin_compiling(self.dtype)
            generator = load(
                self.model,
                method=self.method,
                speculative_config=self.config,
                dtype=self.dtype,
                device=self.device,
                compile=False if self.eager else "auto",
                progress=tell,
            )
            if generator.needs_cost:
                tell(0.0, "measuring what verification costs on this machine (once)")
                _ = generator.cost
            shares = self.config.get("share") or self.config.get("learn") == "shared" or self.config.get("memory")
            if not shares:  # what is shared must not learn from a made-up text
                tell(0.0, "compiling (once)")
                if compiling is not None:
                    compile_drafting(generator)
                    compiling.wait()
                # by a generator of its own: the control must not learn what steps cost while they compile
                apart = Generator(generator.target, generator.tokenizer, method="none", options={}, nodes=None)
                apart.attach(generator.method, generator.drafter, verification=generator.verification)
                apart.generate(_WARM_UP, **{**self.options, "max_new_tokens": _WARM_UP_TOKENS, "eos_token_id": ()})
                generator.forget()
        return generator

    def samples(self, generator: "Generator") -> bool:
        """Return whether tokens are drawn."""
        from foredraft.request import GenerationOptions

        return GenerationOptions.parse(self.options).sampling(generator.target.vocabulary).do_sample

    def worded(self, generator: "Generator", text: str) -> "Prompt":
        """Return the prompt: the text itself, or a conversation where the tokenizer has a chat template.

        Raises:
            UsageError: a system message that has no template to stand in.
        """
        if self.raw or not getattr(generator.tokenizer, "chat_template", None):
            if self.system is not None:
                raise UsageError("--system needs a chat template, which this model's tokenizer does not have.")
            return text
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*messages, {"role": "user", "content": text}]


def summary(generation: "Generation", *, seed: bool, interrupted: bool = False) -> str:
    """Return a line about a generation: counts, rates, why it ended, and the seed where it matters."""
    counts = generation.statistics
    parts = [
        f"{counts.emitted} tokens",
        f"{counts.tokens_per_target_step:.2f} tokens per target step",
        f"{counts.drafted} drafted, {counts.accepted} kept",
        f"{1e3 * counts.decode_seconds_per_token:.1f} ms per token",
        f"prefill {1e3 * counts.prefill_seconds:.0f} ms",
        f"finish: {'interrupted' if interrupted else generation.finish_reason}",
    ]
    return "; ".join([*parts, f"seed {generation.seed}"] if seed else parts)


def _write(generator: "Generator", job: Job, prompt: "Prompt") -> None:
    stream = generator.stream(prompt, **job.options)
    ink = Ink(job.color, generator.drafter.source_names)
    interrupted = False
    try:
        for piece in stream:
            if not job.as_json:
                ink.write(piece)
    except KeyboardInterrupt:  # what has been written is worth having
        interrupted = True
    except ForedraftError:
        ink.finish()
        raise
    generator.save()
    generation, samples = stream.generation, job.samples(generator)
    if job.as_json:
        typer.echo(json.dumps(_as_json(generation, seed=samples, interrupted=interrupted)))
    else:
        ink.finish()
        ink.legend()
        say(summary(generation, seed=samples, interrupted=interrupted), "dim")
    if interrupted:
        raise KeyboardInterrupt


def _as_json(generation: "Generation", *, seed: bool, interrupted: bool) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": "interrupted" if interrupted else generation.finish_reason,
        "prompt_length": generation.prompt_length,
        "seed": generation.seed if seed else None,
        "statistics": generation.statistics.as_dict(),
        "steps": [
            {
                "emitted": step.emitted,
                "accepted": step.accepted,
                "drafted": step.drafted,
                "sources": step.sources,
                "microseconds": {part: nanoseconds / 1e3 for part, nanoseconds in step.nanoseconds.items()},
            }
            for step in generation.steps
        ],
    }


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from its one source.

    Raises:
        UsageError: none or two, a file that cannot be read, or what is not text.
    """
    if prompt is not None and file is not None:
        raise UsageError("PROMPT and --file are both given; give one of them.")
    if prompt is None and file is None:
        raise UsageError("There is no prompt; give PROMPT, - to read standard input, or --file FILE.")
    try:
        if file is not None:
            text = file.read_bytes().decode("utf-8")
        else:
            text = sys.stdin.read() if prompt == "-" else prompt or ""
            text.encode("utf-8")
    except OSError as error:
        raise UsageError(f"The file {file} cannot be read ({error.strerror}).") from error
    except UnicodeError as error:
        raise UsageError("The prompt is not text in UTF-8; convert it first.") from error
    if not text.strip():
        raise UsageError("The prompt is empty; give at least a word to continue.")
    return text


def _refuse_contradictions(*, as_json: bool, raw: bool, system: str | None, color: bool | None) -> None:
    pairs = (
        ("--json", as_json, "--color", bool(color)),
        ("--raw", raw, "--system", system is not None),
    )
    for one, has_one, other, has_other in pairs:
        if has_one and has_other:
            raise UsageError(f"{one} and {other} exclude each other; leave one of them out.")


def speculative_options(
    text: str | None,
    nodes: int | None = None,
    draft_model: str | None = None,
    verification: str | None = None,
    memory: str | None = None,
) -> dict[str, Any]:
    """Return the speculative options of the flags that hold them.

    Raises:
        UsageError: text that is no JSON object, or two values for one option.
    """
    try:
        config = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise UsageError(
            f'--speculative-config is not JSON ({error}); give an object such as {{"table": "none"}}.'
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f'--speculative-config is {text}; give a JSON object such as {{"table": "none"}}.')
    for flag, name, value in (
        ("--num-speculative-tokens", "num_speculative_tokens", nodes),
        ("--draft-model", "model", draft_model),
        ("--verification", "verification", verification),
        ("--memory", "memory", memory),
    ):
        if value is not None and config.setdefault(name, value) != value:
            raise UsageError(f"{flag} is {value} and --speculative-config says {config[name]}; give one of them.")
    return config
