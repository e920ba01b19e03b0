"""GGUF files that are named, on this machine or on the hub, and whether the hub can be reached.

Files of the hub are named as for llama.cpp and Ollama, `OWNER/REPOSITORY:KIND`. Does not read them.
"""

import re
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from foredraft.errors import ForedraftError, UsageError, told
from foredraft.model.gguf.files import SUFFIX, is_gguf
from foredraft.options import user_path

_NAME = re.compile(r"(?:(?:https://)?(?:hf|huggingface)\.co/)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_USUAL = "Q4_K_M"  # the kind where a name has none, as llama.cpp's `-hf`
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = re.compile(r"(.*/)?(mmproj|mtp-|imatrix)|.*imatrix$", re.IGNORECASE)  # files that are no text model
_SECONDS = 5.0  # connection timeout; a slower connection could not download a model either


def named_gguf(named: str, revision: str | None = None) -> Path | None:
    """Return the GGUF file of a path, or of a name on the hub, from where it is downloaded once; None for other names.

    A name on the hub is `OWNER/REPOSITORY:KIND`, where KIND is how the file's name ends, such as Q4_K_M, or the whole
    name; without it, in repositories whose names end in `gguf`, it is Q4_K_M or the only file. Raises UsageError if no
    file, or more than one, has this name, or if the hub cannot be reached and the file was not downloaded before.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    path, found = user_path(named), _NAME.fullmatch(named)
    if is_gguf(path):
        return path
    if path.exists() or found is None or not (found[2] or found[1].lower().endswith("gguf")):
        return None
    hub, (repository, kind) = HfApi(), found.groups()
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why_unreachable()
    try:
        if reason:
            folder = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True))
            names: Iterable[str] = (file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}"))
        else:
            names = hub.list_repo_files(repository, revision=revision)
        files, offline = _files(repository, names, kind), bool(reason)
        parts = [hub.hf_hub_download(repository, file, revision=revision, local_files_only=offline) for file in files]
    except ForedraftError:
        raise
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"{named} was not downloaded before, and the hub {constants.ENDPOINT} cannot be reached "
            f"({reason or error}). Give a GGUF file or a folder, or connect this machine."
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UsageError(
            f"The hub gives no GGUF file {named} ({told(error).rstrip('.')}); correct the name."
        ) from error
    return Path(parts[0])


def why_unreachable() -> str:
    """Return why the hub cannot be reached; "" if it can, or a proxy is set. Its library would retry for a minute."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    try:
        if not getproxies():
            socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def _files(repository: str, names: Iterable[str], kind: str | None) -> list[str]:
    """Return those of a repository's files that are the model of a kind: one, or all its parts in order."""
    models: dict[str, list[str]] = {}  # the name without suffix and number of a part -> its files
    for name in sorted(names):
        if name.lower().endswith(SUFFIX):
            models.setdefault(_PART.sub("", name[: -len(SUFFIX)]), []).append(name)
    texts = [model for model in models if not _BESIDE.match(model)]
    wanted = re.escape(kind or _USUAL)
    # `UD-Q4_K_M` (Unsloth's mixtures of types) is meant by `Q4_K_M` only where there is no other
    endings = [rf"(?:^|(?<!UD)[-._/]){wanted}$", rf"[-._/]{wanted}$"]
    tries = [[model for model in texts if re.search(ending, model, re.IGNORECASE)] for ending in endings]
    whole = [model for model in models if model.rpartition("/")[2] == kind]
    matching = whole or tries[0] or tries[1] or (texts if kind is None and len(texts) == 1 else [])
    if len(matching) != 1:
        listed = ", ".join(model.rpartition("/")[2] for model in matching or texts)
        raise UsageError(
            f"{repository} on the hub has {len(matching) or 'no'} GGUF files of the kind {kind or _USUAL}"
            f"{f'; it has {listed}' if listed else ''}. Give one of a repository's files as {repository}:NAME."
        )
    return models[matching[0]]
