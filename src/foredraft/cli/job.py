"""What was asked of a verb that writes texts: checked, loaded, and put into the words of the model's chat template.

Refuses what contradicts itself before a model is loaded. An option that is not given is not passed on: defaults are the
library's.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.cli.screen import working
from foredraft.errors import UsageError

if TYPE_CHECKING:  # torch and transformers are imported when a text is written, so that help stays quick
    from foredraft.api import Generator, Prompt

# ids that let a drafter draft, and tokens enough for drafts to be accepted, refused and left out: each of these
# compiles something the first time, in seconds that no figure of a text should hold
_WARM_UP, _WARM_UP_TOKENS = (1, 2, 3, 1, 2, 3, 1, 2), 24


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for: the model and how it drafts, as `foredraft.load` takes them, and how texts are written."""

    model: str
    dtype: str = "auto"
    device: str | None = None
    eager: bool = False  # whether the model runs as it is, also where it is compiled
    method: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # generation arguments that were given
    system: str | None = None
    raw: bool = False  # whether the prompt is continued as it is
    color: bool = False

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
                self.model, method=self.method, speculative_config=self.config, dtype=self.dtype, device=self.device,
                compile=False if self.eager else "auto", progress=tell,
            )  # fmt: skip
            measure_cost(generator, tell)
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


def measure_cost(generator: "Generator", tell: Callable[[float, str], None]) -> None:
    """Measure what verification costs, if that is not known yet and will be needed."""
    if generator.needs_cost:
        tell(0.0, "measuring what verification costs on this machine (once)")
        _ = generator.cost


def load_plain(
    model: str, dtype: str, eager: bool, tell: Callable[[float, str], None], device: str | None = None
) -> "Generator":
    """Load a model that decodes plainly, for verbs that compare methods, or let it write what is learned from."""
    from foredraft.api import load

    return load(model, method="none", dtype=dtype, device=device, compile=False if eager else "auto", progress=tell)


def setting(temperature: float, top_p: float = 1.0, **arguments: int) -> dict[str, Any]:
    """Return generation arguments, checked before a model is loaded; a temperature of 0 is greedy decoding.

    Raises:
        UsageError: an argument out of range.
    """
    from foredraft.request import GenerationOptions

    found: dict[str, Any] = dict(arguments)
    if temperature:
        found["temperature"] = temperature
        if top_p != 1:
            found["top_p"] = top_p
    GenerationOptions.parse(found).sampling(2)  # no vocabulary makes these right or wrong
    return found


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
        raise UsageError(f"The file {file} cannot be read ({error.strerror}); give another one.") from error
    except UnicodeError as error:
        raise UsageError("The prompt is not text in UTF-8; convert it first.") from error
    if not text.strip():
        raise UsageError("The prompt is empty; give at least a word to continue.")
    return text


def speculative_options(text: str | None, **flags: Any) -> dict[str, Any]:
    """Return the options of --speculative-config, a JSON object, with those that have flags and were given by them.

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
    for name, value in flags.items():
        if value is not None and config.setdefault(name, value) != value:
            flag = "--draft-model" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {value} and --speculative-config says {config[name]}; give one of them.")
    return config
