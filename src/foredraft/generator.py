"""`Generator`: combines a model, its tokenizer, a drafter and a control, and generates texts one by one or in a batch.

Does not depend on how any of these work, or on how a model is loaded.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from foredraft.cache_folder import cache_folder, cache_path
from foredraft.contracts import CostCurve, DraftContext, Drafter, Learner, Saver, TokenIds
from foredraft.control import MeasuredControl, StepCosts, choose_control
from foredraft.corpus.words import vocabulary_size
from foredraft.drafters import make_drafter
from foredraft.drafters.prediction import ChainDrafter, Prediction
from foredraft.engine.batch import Batch, steps, write_all
from foredraft.engine.guard import GuardedDrafter
from foredraft.engine.run import Run
from foredraft.engine.sequential import SequentialPasses
from foredraft.engine.state import SequenceState
from foredraft.errors import ForedraftWarning, OutOfMemoryError, PromptTooLongError, UsageError
from foredraft.generation import Generation, Stream, generation
from foredraft.model.compiled.package import CompiledRecord, kept_forward
from foredraft.model.cost import measured_cost
from foredraft.model.joint_passes import joint_passes
from foredraft.model.recordings import RecordedForward, recorded_forward
from foredraft.model.target import TorchTarget
from foredraft.options import shown, whole_number
from foredraft.pairing import pair_draft_model
from foredraft.request import (
    GenerationArguments,
    GenerationOptions,
    checked_ids,
    checked_text,
    encoded,
    end_ids,
    own_copies,
)
from foredraft.sampling import SEED_LIMIT, LogitsProcessor, SamplingOptions
from foredraft.standard_library import resources_for
from foredraft.text import StopStrings

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # a text, a conversation (`role`, `content`), or token ids
Progress = Callable[[float, str], None]  # called in work of over a second: the share done, 0 to 1, and what is done

CACHE_BYTES = 2**30  # of a batch's KV cache: 46,000 tokens of SmolLM2-135M in bfloat16; chosen
TEXTS_AT_ONCE = 16  # in `generate_all`; measured on two cores: twice as many take twice the time per pass


class Generator:
    """A model (`target`), its `tokenizer`, and a `drafter`, ready to generate; made with the arguments of `use`.

    The tokenizer is None if only ids are used (see `begin`).
    """

    def __init__(
        self, target: TorchTarget, tokenizer: Any, *, progress: Progress | None = None, **drafting: Any
    ) -> None:
        self.target, self.tokenizer, self._progress = target, tokenizer, progress
        self._curve: CostCurve | None = None
        if tokenizer is not None:
            _check_vocabulary(target, tokenizer)
        self.use(**drafting)

    def sibling(self, **drafting: Any) -> "Generator":
        """Return another generator of the same model and measured cost, with the arguments of `use`."""
        made = Generator(self.target, self.tokenizer, **drafting)
        made._curve = self._curve
        return made

    def use(
        self,
        method: str,  # one of `foredraft methods`
        options: Mapping[str, Any] | None = None,
        nodes: int | None = None,  # `num_speculative_tokens`: drafted per step, at most if `control` is given
        control: str | None = None,  # see docs/explanation/control.md
        control_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Change the drafting method and the control.

        UsageError for an unknown name, option or value; StoreError for a damaged table or one of another tokenizer.
        """
        resources = replace(
            resources_for(self.target.vocabulary, self.tokenizer, progress=self._progress),
            draft_model=partial(pair_draft_model, target=self.target, tokenizer=self.tokenizer),
            target=self.target,
        )
        drafter = make_drafter(method, options or {}, resources)
        if self.target.compiled is not None and any(model.compiled is None for model in drafter.needs.models):
            warnings.warn(
                f"Method {method!r} drafts with a model that is not compiled, although the target is: a draft takes "
                "several times as long as it could. `foredraft compile` with the same method compiles both.",
                ForedraftWarning,
                stacklevel=2,
            )
        if self.target.compiled is not None and not self.target.compiled.returns(drafter.needs.hidden):
            layers = ", ".join(map(str, drafter.needs.hidden))
            warnings.warn(
                f"Method {method!r} reads the states before layers {layers}, which the compiled forward does not "
                f"return ({', '.join(map(str, self.target.compiled.record.taps)) or 'none'} are compiled in), so the "
                "model runs uncompiled: a pass takes several times as long. Compare it with method auto.",
                ForedraftWarning,
                stacklevel=2,
            )
        self.attach(method, drafter, nodes, control, control_options)
        self._record_models()

    def _record_models(self) -> None:
        for each in self.drafter.needs.models if self.target.recordings is not None else ():
            if each.recordings is None:  # what it is off by rounding changes drafts, not the text
                each.recordings = recorded_forward(each.model, same_bits=False)

    def attach(
        self, method: str, drafter: Drafter, nodes: int | None = None, control: str | None = None,
        control_options: Mapping[str, Any] | None = None, costs: StepCosts | None = None,
    ) -> None:  # fmt: skip
        """Use an existing drafter under the name `method`; `costs` is what the measured control learned earlier."""
        if nodes is None and control is None:
            control = drafter.needs.control
        amount = choose_control(nodes, control, control_options)
        self.amount = choose_control(0) if method == "none" else amount  # how much each step drafts
        self._costs = StepCosts() if costs is None else costs
        self.method, self.drafter = method, drafter

    @property
    def cost(self) -> CostCurve:
        """The cost of a pass by its rows, measured at first use and then read from the cache folder."""
        if self._curve is None:
            self._curve = measured_cost(self.target, cache_path())
        return self._curve

    def compile(
        self,
        *,
        again: bool = False,
        precise: bool | None = None,
        same_bits: bool = True,
        progress: Progress | None = None,
    ) -> list[tuple[Path, CompiledRecord]]:
        """Compile the forward of the model, and of the models that the method runs, for this machine and use them.

        Existing packages are kept, unless all are compiled `again`, or the model's is not as `precise` as is asked
        (`compile_forward`). Returns each model's folder with its package and what it holds. On a CUDA device passes are
        compiled and recorded at their first use instead; without `same_bits`, passes of few rows may be faster there,
        but drafts may change a text in reduced precision.
        UsageError for a model that cannot be compiled here, StoreError for a cache folder that is damaged or cannot be
        written, and ForedraftError if there is no compiler or it fails.
        """
        from foredraft.model.compiled.build import compile_forward  # slow to import

        if self.target.outline.device.type == "cuda":
            self.target.recordings, self._curve = RecordedForward(self.target.model, same_bits=same_bits), None
            self._record_models()
            return []
        made = []
        for each in (self.target, *self.drafter.needs.models):
            tell = progress or self._progress
            own = precise if each is self.target else None
            made.append(compile_forward(each.model, cache_folder(), again=again, precise=own, progress=tell))
            each.compiled = kept_forward(each.model)
        self._curve = None
        return made

    def save(self) -> None:
        """Save what the drafter learned, if its options say where; StoreError if the file cannot be written."""
        if isinstance(self.drafter, Saver):
            self.drafter.save()

    def forget(self) -> None:
        """Discard what the drafter and the control learned from earlier texts."""
        if isinstance(self.drafter, Learner):
            self.drafter.forget()
        self._costs = StepCosts()

    def generate(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Generation:
        """Generate one completion of `prompt`; `generate_all` handles several prompts.

        Args:
            prompt: a text, a conversation, or token ids. A text is continued without the chat template.
            chat: treat the text `prompt` as a conversation of one user message.
            **options: see `foredraft.request.GenerationOptions`; names are transformers'.

        UsageError for an invalid argument, before the first token; NumericsError for logits that allow no token.
        """
        run = self.start(prompt, chat=chat, **options)
        for _ in steps(run):
            pass
        return self.result(run)

    def generate_all(
        self, prompts: Sequence[Prompt], *, chat: bool = False, count: int = 1, **options: Unpack[GenerationArguments]
    ) -> list[Generation]:
        """Generate completions of many prompts in one batch; each text equals the one that `generate` returns.

        `count` is that of completions per prompt, adjacent in the result; the i-th, from 0, is sampled with `seed + i`.
        Each has copies of the logits processors, which may keep state.
        Raises what `generate` does, NumericsError once the other texts are complete, and OutOfMemoryError if there is
        no memory for one of the texts alone.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise UsageError(f"prompts is {shown(prompts)}; give a list of prompts, or call `generate` for one.")
        if (times := whole_number(count)) is None or times < 1:
            raise UsageError(f"count is {shown(count)}; it must be a whole number, at least 1.")
        self.arguments(options)  # checks them, even without prompts
        processors = iter(own_copies(options.get("logits_processor", ()), len(prompts) * times, self.target.outline))
        runs: list[Run] = []
        for prompt in prompts:
            seed = self.arguments(options)["sampling"].seed
            for number in range(times):
                given: GenerationArguments = {**options, "seed": (seed + number) % SEED_LIMIT}
                runs.append(self.start(prompt, chat=chat, **given | {"logits_processor": next(processors)}))
        return [self.result(run) for run in self.write(runs)]

    def write(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Write texts that were started, several at once, and return them; raises what `generate_all` does.

        Where passes are recorded, texts follow one another, as recordings are of one sequence.
        """
        recordings = self.target.recordings
        most = TEXTS_AT_ONCE if recordings is None or recordings.failed else 1
        try:
            batch = self.batch(tokens=max((run.seq.limit for run in runs), default=0))
        except OutOfMemoryError:  # few texts are as long as they may be
            batch = self.batch()
        return write_all(batch, runs, most)

    def stream(
        self, prompt: Prompt, *, chat: bool = False, batch: Batch | None = None,
        **options: Unpack[GenerationArguments],
    ) -> Stream:  # fmt: skip
        """Start a generation as `generate` does; iterate over the result, and read its `generation` afterwards.

        An empty batch of `conversation` keeps what it computed, so that the next text in it with the same beginning
        starts sooner. Close a stream that is not read to its end.
        """
        run = self.start(prompt, chat=chat, **options)
        return Stream(run, steps(run, batch), self.tokenizer)

    def start(self, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Run:
        """Start a generation as `generate` does; write it in a batch, and pass it to `result` at any time.

        The run keeps its drafter, so several runs can be interleaved.
        """
        if chat:
            if not isinstance(prompt, str):
                raise UsageError(f"chat=True is for a prompt that is a text; this one is a {type(prompt).__name__}.")
            prompt = [{"role": "user", "content": prompt}]
        arguments = self.arguments(options)
        return self.begin(self.encode(prompt), **arguments)

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the options of `generate` to the keyword arguments of `begin`; UsageError for an invalid one."""
        given = GenerationOptions.parse(options)
        return {
            "sampling": given.sampling(self.target.vocabulary),
            "max_new_tokens": given.max_new_tokens,
            "eos": given.eos(self.eos_token_ids(), self.target.vocabulary),
            "processors": (*self._suppressing(), *given.logits_processor),
            "stop_strings": given.stop_strings,
            "drafter": self._drafter_with(given.prediction),
        }

    def _suppressing(self) -> tuple[LogitsProcessor, ...]:
        """Return what rules out the tokens that the model's generation configuration suppresses, if it names any."""
        ids = getattr(getattr(self.target.outline, "generation_config", None), "suppress_tokens", None)
        if not ids:
            return ()
        from transformers import SuppressTokensLogitsProcessor  # slow to import

        return (SuppressTokensLogitsProcessor(ids, device=str(self.target.device)),)

    def _drafter_with(self, prediction: str | None) -> Drafter:
        if not prediction:
            return self.drafter
        if not self.amount.most_nodes:
            why = "method 'none', which drafts nothing" if self.method == "none" else "num_speculative_tokens 0"
            raise UsageError(f"prediction has no effect with {why}; leave one out.")
        ids = self.tokenizer(checked_text(prediction), add_special_tokens=False).input_ids
        return ChainDrafter(self.drafter, Prediction(np.asarray(ids, np.int64)).chains)

    def begin(
        self, ids: TokenIds, sampling: SamplingOptions, *, drafter: Drafter | None = None,
        stop_strings: Sequence[str] = (), **arguments: Any,
    ) -> Run:  # fmt: skip
        """Start a generation after a prompt, int64[n], n >= 1; its KV cache is not allocated yet.

        `drafter` is this text's, if not the generator's; the other arguments are `max_new_tokens`, `eos`, `processors`
        and `stop` of `SequenceState`, which `stop_strings` replace. PromptTooLongError for a prompt that fills the
        model's window, UsageError for one that is empty or holds an id that the model does not have.
        """
        ids, window = checked_ids(ids, self.target.vocabulary), self.target.window
        if window is not None and len(ids) >= window:
            raise PromptTooLongError(
                f"The prompt has {len(ids)} tokens and the model's window is {window}; shorten the prompt to at most "
                f"{window - 1}."
            )
        arguments |= {"sampling": sampling, "window": window}
        if stop_strings:
            arguments["stop"] = StopStrings(self.tokenizer, stop_strings, ids.tolist())
        seq = SequenceState(ids, **arguments)
        context = DraftContext(self.target.vocabulary, sampling.seed, self.amount.most_nodes, asdict(sampling))
        control = self.amount.make(lambda: self.cost, sampling.seed, self._costs)
        guarded = GuardedDrafter(self.drafter if drafter is None else drafter)
        # one measured control can decide for all texts of a batch together
        shared = self.amount.name == "measured" and self.amount.needs_cost
        return Run(seq, guarded, control, context, self.target, shared)

    def batch(
        self, cache_bytes: int | None = CACHE_BYTES, step_seconds: float | None = None, *, tokens: int = 0
    ) -> Batch:
        """Return an empty batch, whose texts share forward passes and a KV cache of at most `cache_bytes`.

        None is room for two texts that fill the model's window. UsageError unless it is a whole number, at least 1.
        There is room for a text of so many `tokens` in any case. Prompts are prefilled in pieces with which a step
        takes at most about `step_seconds`, if given.
        """
        if cache_bytes is not None and ((given := whole_number(cache_bytes)) is None or given < 1):
            raise UsageError(f"cache_bytes is {shown(cache_bytes)}; it must be a whole number of bytes, or None.")
        shared = joint_passes(self.target, cache_bytes, self.drafter.needs.hidden, tokens)
        passes = shared or SequentialPasses(self.target)
        most = passes.most_rows
        control = MeasuredControl(lambda: self.cost, most - 1, self._costs, most_rows=most)
        return Batch(passes, control, step_seconds)

    def conversation(self) -> Batch | None:
        """Return a batch for `stream` in which each turn of a conversation is computed once, up to the model's window.

        None if every text is computed anew, as where texts do not share passes, or there is no memory.
        """
        try:
            batch = self.batch(None)
        except OutOfMemoryError:
            return None
        return batch if batch.passes.keeps_prefixes else None

    def join(self, batch: Batch, prompt: Prompt, *, chat: bool = False, **options: Unpack[GenerationArguments]) -> Run:
        """Add a text to a batch, with the arguments of `generate`; OutOfMemoryError if its prompt finds no room."""
        return batch.join(self.start(prompt, chat=chat, **options))

    def result(self, run: Run) -> Generation:
        """Return the result so far of a text; its finish reason is None while it is unfinished."""
        return generation(run, self.tokenizer)

    def encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = (), variables: Mapping[str, Any] | None = None
    ) -> TokenIds:
        """Return the ids of a prompt; see `foredraft.request.encoded`."""
        return encoded(prompt, self.tokenizer, self.target.vocabulary, tools, variables)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the default end ids: those of the model's generation configuration, else the tokenizer's.

        UsageError if the configuration has something else than ids.
        """
        given = getattr(getattr(self.target.outline, "generation_config", None), "eos_token_id", None)
        given = self.tokenizer.eos_token_id if given is None else given
        return () if given is None else end_ids(given, "eos_token_id of the model's generation configuration")


def _check_vocabulary(target: TorchTarget, tokenizer: Any) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    size = vocabulary_size(backend) if backend is not None else len(tokenizer)
    if size > target.vocabulary:
        raise UsageError(
            f"The tokenizer ({type(tokenizer).__name__}) has ids up to {size - 1}, which is "
            f"{tokenizer.convert_ids_to_tokens(size - 1)!r}, but the model scores only ids below {target.vocabulary}; "
            "give a pair of the model and a tokenizer with no more ids, or resize the model's embeddings."
        )
