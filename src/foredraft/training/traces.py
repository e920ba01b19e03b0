"""Traces for training: texts that the target wrote, open texts, and the target's predictions at each position.

Self-distillation as in EESD (Liu et al. 2024), section 3.2: greedy and sampled texts of the target, mixed with open
text. The target's most probable next tokens are stored for each position. Does not depend on what is trained.

A folder holds `texts.jsonl` (the texts so far; a killed run continues with those of the last prompt), and once it is
complete `windows.npy` int32[W, T + 1], `kinds.npy` uint8[W], `held.npy` bool[W], `top_ids.npy` int32[W, T, K],
`top_probabilities.npy` float16[W, T, K] and, last, `manifest.json`.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from foredraft.atomic_file import store_file, unwritable
from foredraft.contracts import TokenIds
from foredraft.errors import NumericsError, StoreError, UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.index.datastore import Progress
from foredraft.model.target import TorchTarget
from foredraft.options import check_range
from foredraft.training.sources import Source, is_held_out

Numbers = npt.NDArray[np.int64]  # window numbers, int64

KINDS = ("greedy", "sampled", "open")
MANIFEST, TEXTS = "manifest.json", "texts.jsonl"
FORMAT = 1
TOGETHER = 128  # texts that are written together: the most that a killed run has to write again
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it modulo 1 are evenly spread, however many readers take turns


class Asked(NamedTuple):
    """A request for a text by the target."""

    prompt: list[int]
    sampled: bool
    seed: int


Write = Callable[[Sequence[Asked], int], list[list[int]]]  # writes at most so many new ids of each text


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Composition of traces."""

    written_tokens: int = 200_000  # approximate tokens written by the target, prompts included
    open_tokens: int = 200_000  # maximum tokens of open text
    greedy_share: float = 0.5  # of the target's texts; the rest is sampled, as small models loop when greedy
    temperature: float = 0.7  # of sampled texts
    answer_tokens: int = 160  # maximum new tokens of a text
    window: int = 256  # tokens of a training window
    top_k: int = 16  # number of the target's most probable tokens stored for each position
    hold_out_one_in: int = 25  # a prompt's texts are held out if the prompt's hash is 0 modulo this
    seed: int = 0  # of the sampled texts

    def __post_init__(self) -> None:
        check_range(self, "answer_tokens", "window", "top_k", least=1)
        check_range(self, "hold_out_one_in", least=2)
        check_range(self, "temperature", above=0)
        check_range(self, "greedy_share", least=0, most=1)
        if self.written_tokens < 0 or self.open_tokens < 0 or self.written_tokens + self.open_tokens == 0:
            raise UsageError("Give written_tokens or open_tokens, or both; neither may be negative.")


@dataclass(frozen=True, slots=True)
class Traces:
    """Traces, opened; the arrays are memory-mapped."""

    windows: npt.NDArray[np.int32]  # int32[W, T + 1], ids; a window's last one is only a label
    kinds: npt.NDArray[np.uint8]  # uint8[W], indices into `KINDS`
    held: npt.NDArray[np.bool_]  # bool[W], whether the window is held out
    top_ids: npt.NDArray[np.int32]  # int32[W, T, K], the target's most probable tokens after each position
    top_probabilities: npt.NDArray[np.float16]  # float16[W, T, K], their probabilities by the softmax
    fingerprint: str  # of the target's weights

    @property
    def window(self) -> int:
        return int(self.windows.shape[1]) - 1

    @property
    def split(self) -> tuple[Numbers, Numbers]:
        """The numbers of the training windows and of the held-out ones."""
        return np.flatnonzero(~self.held), np.flatnonzero(self.held)

    def inputs(self, windows: Numbers, device: torch.device) -> dict[str, Any]:
        """Return a model's inputs for these windows, int64[B, T], without a cache."""
        known = torch.from_numpy(self.windows[windows, :-1].astype(np.int64)).to(device)
        return {"input_ids": known, "attention_mask": torch.ones_like(known), "use_cache": False}

    def labels(
        self, windows: Numbers, device: torch.device, places: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the top tokens at these positions, int64[R, K], and their probabilities, float32[R, K]."""
        ids, probabilities = self.top_ids[windows][:, places], self.top_probabilities[windows][:, places]
        return (
            torch.from_numpy(ids.astype(np.int64)).to(device).flatten(0, 1),
            torch.from_numpy(probabilities.astype(np.float32)).to(device).flatten(0, 1),
        )


def frequent_tokens(traces: Traces, count: int, vocabulary: int) -> npt.NDArray[np.int64]:
    """Return the `count` tokens, int64[count], most frequent in the target's texts, then in open texts, then by id."""
    is_open = traces.kinds == KINDS.index("open")
    written, opened = (
        np.bincount(traces.windows[~traces.held & chosen].reshape(-1), minlength=vocabulary)
        for chosen in (~is_open, is_open)
    )
    return np.lexsort((np.arange(vocabulary), -opened, -written))[:count]


def is_traces(folder: Path) -> bool:
    """Return whether `folder` holds complete traces."""
    return (folder / MANIFEST).is_file() and (folder / TEXTS).is_file()


def spread(windows: Numbers, most: int) -> Numbers:
    """Return at most so many of the windows, from all of them alike: they are in the order of their texts."""
    return windows[:: max(1, math.ceil(len(windows) / most))]


def write_texts(
    folder: Path, sources: Iterable[Source], write: Write, options: TraceOptions, identity: str, tell: Progress
) -> None:
    """Let the target continue the sources' prompts until there are enough tokens, counting texts written before.

    UsageError if the folder holds texts of another model or with other options, StoreError if it cannot be written.
    """
    head = _head(options, identity)
    known = _known_texts(folder, head)
    done = max((int(text["source"]) for text in known), default=0)
    known = [text for text in known if text["source"] < done]  # one of the last source's texts may be missing
    store_file(folder / TEXTS, "".join(json.dumps(each) + "\n" for each in (head, *known)).encode())
    remaining = islice(enumerate(_requests(sources, options)), done, None)
    wanted = {False: options.written_tokens, True: options.open_tokens}
    tokens: Counter[bool] = Counter()  # of open texts (True), and of the target's (False)
    for text in known:
        tokens[text["kind"] == "open"] += len(text["ids"])
    try:
        with (folder / TEXTS).open("a") as file:
            while any(tokens[each] < wanted[each] for each in wanted) and (group := list(islice(remaining, TOGETHER))):
                is_enough = tokens[False] >= wanted[False]
                asked = [request for _, (_, request, _) in group]
                answers = [[]] * len(group) if is_enough else write(asked, options.answer_tokens)
                for (number, (source, (prompt, is_sampled, _), is_new)), answer in zip(group, answers, strict=True):
                    held, kind = is_held_out(source.key, options.hold_out_one_in), "sampled" if is_sampled else "greedy"
                    for of, ids in ((kind, [*prompt, *answer]), *([("open", source.text)] if is_new else [])):
                        if tokens[of == "open"] < wanted[of == "open"]:
                            text = {"source": number, "kind": of, "held": held, "ids": [*map(int, ids)]}
                            file.write(json.dumps(text) + "\n")
                            tokens[of == "open"] += len(ids)
                file.flush()
                tell("writing", min(tokens[False], wanted[False]), wanted[False])
    except OSError as error:
        raise unwritable(folder, error) from error


def _requests(sources: Iterable[Source], options: TraceOptions) -> Iterator[tuple[Source, Asked, bool]]:
    """Yield each source with its request, and whether its prompt is new; one asked for again is always sampled."""
    known: set[str] = set()
    for number, source in enumerate(sources):
        is_new = source.key not in known
        known.add(source.key)
        is_sampled = not is_new or number * _GOLDEN % 1 < 1 - options.greedy_share
        yield source, Asked(source.prompt, is_sampled, options.seed + number), is_new


def label_texts(folder: Path, target: TorchTarget, options: TraceOptions, identity: str, tell: Progress) -> Traces:
    """Pack the texts into windows, and store the target's most probable tokens at each position.

    UsageError if the texts do not fill a window, NumericsError if the target's logits are not finite, StoreError if the
    folder cannot be written.
    """
    head = _head(options, identity)
    windows, kinds, held = _packed(_known_texts(folder, head), options.window)
    if not (~held).any():
        (folder / TEXTS).unlink()  # else texts that are added to the data would be refused as other ones
        raise UsageError(
            f"The texts in {folder} do not fill one window of {options.window} tokens; give more text, or a smaller "
            "window."
        )
    known = min(options.top_k, target.vocabulary)
    shape = (len(windows), options.window, known)
    try:
        (folder / MANIFEST).unlink(missing_ok=True)  # what was complete is not while it is written
        for name, array in (("windows", windows), ("kinds", kinds), ("held", held)):
            np.save(folder / f"{name}.npy", array)
        ids = mapped_array(folder / "top_ids.npy", np.int32, shape)
        probabilities = mapped_array(folder / "top_probabilities.npy", np.float16, shape)
        for number, window in enumerate(windows):
            ids[number], probabilities[number] = _top_tokens(target, window[:-1].astype(np.int64), known)
            tell("labelling", number + 1, len(windows))
        ids.flush()
        probabilities.flush()
    except OSError as error:
        raise unwritable(folder, error) from error
    counts = {kind: int((kinds == number).sum()) for number, kind in enumerate(KINDS)}
    store_file(folder / MANIFEST, json.dumps({**head, "windows": counts, "held": int(held.sum())}).encode())
    return open_traces(folder)


def mapped_array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> "np.memmap[Any, Any]":
    """Create a .npy file and map it; OSError without room on the disk, which would end the process at a later write."""
    array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError:
            path.unlink()
            raise
    return array


def open_traces(folder: Path) -> Traces:
    """Open complete traces: UsageError where there are none, StoreError where they are damaged or too old."""
    if not is_traces(folder):
        raise UsageError(f"{folder} holds no complete traces; make them with `foredraft train traces`.")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise StoreError(f"The traces in {folder} have format {manifest['format']}, and this is format {FORMAT}.")
        names = ("windows", "kinds", "held", "top_ids", "top_probabilities")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
        if len({len(array) for array in arrays.values()}) > 1:
            raise ValueError("its arrays have different lengths")
        return Traces(**arrays, fingerprint=str(manifest["fingerprint"]))
    except (OSError, ValueError, KeyError, EOFError, TypeError) as error:
        raise StoreError(
            f"The traces in {folder} are damaged ({error}). Remove the folder and make them again."
        ) from error


def _head(options: TraceOptions, identity: str) -> dict[str, Any]:
    return {"format": FORMAT, "fingerprint": identity, "options": asdict(options)}


def _known_texts(folder: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the texts in a folder, without an incomplete last line."""
    file = folder / TEXTS
    try:
        data = file.read_bytes() if file.exists() else b""
        begun, *texts = map(json.loads, data[: data.rfind(b"\n") + 1].splitlines() or [json.dumps(head).encode()])
    except OSError as error:
        raise StoreError(f"{file} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise StoreError(f"{file} is damaged ({error}). Remove it to write the texts again.") from error
    if different := [name for name in head if begun.get(name) != head[name]]:
        raise UsageError(
            f"The texts in {folder} were written with another {' and '.join(different)}; give the same, or another "
            "folder."
        )
    return texts


def _packed(
    texts: list[dict[str, Any]], window: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Return windows, their kinds, and which are held out; a window never mixes kinds, or held-out and other texts."""
    found, kinds, held = [np.empty((0, window + 1), np.int32)], [], []
    for side in (False, True):
        for number, kind in enumerate(KINDS):
            ids = [token for text in texts if text["kind"] == kind and text["held"] is side for token in text["ids"]]
            if len(ids) > window:
                view = np.lib.stride_tricks.sliding_window_view(np.array(ids, np.int32), window + 1)
                found.append(view[::window])
                kinds += [number] * len(found[-1])
                held += [side] * len(found[-1])
    return np.concatenate(found), np.array(kinds, np.uint8), np.array(held, np.bool_)


@torch.inference_mode()
def _top_tokens(
    target: TorchTarget, token_ids: TokenIds, k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """Return the target's most probable tokens after each of these, int32[T, K], and their probabilities."""
    cache, found = target.new_cache(len(token_ids)), []
    for start in range(0, len(token_ids), target.most_rows):
        piece = token_ids[start : start + target.most_rows]
        logits = target.forward(lay_out_text(piece, start), cache).logits.float()
        cache.commit(range(len(piece)))
        found.append(torch.softmax(logits, dim=-1).topk(k, dim=-1))
    ids, probabilities = (torch.cat([top[part] for top in found]).cpu() for part in (1, 0))
    if not torch.isfinite(probabilities).all():
        raise NumericsError("The target's scores are NaN or infinite; check its weights and dtype.")
    return ids.to(torch.int32).numpy(), probabilities.to(torch.float16).numpy()
