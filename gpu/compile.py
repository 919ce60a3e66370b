"""CUDA C++ to PTX with NVRTC: needs neither a GPU nor a driver, only NVIDIA's Python wheels.

The compiler is called through ``ctypes``; its PTX is kept in a cache on disk, addressed by all that
can change it: the source, the headers it includes, the options, the architecture and the version
of the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simkit.errors import CompileError, DeviceUnavailableError

INCLUDE_DIRECTORY = Path(__file__).parent / "kernels" / "include"
# Stand-ins for the C headers that kernels include out of habit and NVRTC does not have.
HOST_INCLUDE_DIRECTORY = INCLUDE_DIRECTORY / "host"
DEFAULT_ARCH = "sm_90a"

# (library, headers) below the `nvidia` package: the wheels of CUDA 12, then those of CUDA 13.
_WHEEL_LAYOUTS = (
    ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include"),
    ("cuda_nvrtc/bin/nvrtc64_120_0.dll", "cuda_runtime/include"),
    ("cu13/lib/libnvrtc.so.13", "cu13/include"),
)
# The suffix of an architecture, and the first number that has it: "a" keeps to one chip
# (wgmma, tcgen05), "f" to one family of chips.
_SUFFIX_SINCE = {"": 0, "a": 90, "f": 100}
_ARCH = re.compile(r"sm_(\d+)([af]?)")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))', re.MULTILINE)
_INCLUDE_OPTION = re.compile(r"(?:-I|--include-path)(?:=|\s*)(.*)")
_PRE_INCLUDE_OPTIONS = ("-include", "--pre-include")
_CACHE_FORMAT = "1"


@dataclass(frozen=True)
class Toolkit:
    """NVRTC as it is installed: the loaded library, its headers, and what identifies its output."""

    library: ctypes.CDLL
    include: Path
    version: str
    arch_numbers: tuple[int, ...]

    def call(self, function: str, *arguments: object) -> None:
        """Call ``nvrtc<function>``; a status other than success is a ``CompileError``."""
        status = getattr(self.library, f"nvrtc{function}")(*arguments)
        if status != 0:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            reason = self.library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"nvrtc{function} failed with status {status}: {reason}")

    def text(self, what: str, program: ctypes.c_void_p) -> str:
        """The ``ProgramLog`` or the ``PTX``: NVRTC says the size first, then fills a buffer."""
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, buffer)
        return buffer.value.decode(errors="replace")


@functools.cache
def toolkit() -> Toolkit:
    """The NVRTC of the installed wheels.

    Raises ``DeviceUnavailableError`` when the wheels are absent or the library does not load.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for root in roots:
        for library, include in _WHEEL_LAYOUTS:
            if (root / library).is_file() and (root / include / "cuda_runtime_api.h").is_file():
                return _load(root / library, root / include)
    raise DeviceUnavailableError(
        "NVRTC and the CUDA headers are not installed: looked for "
        + ", ".join(library for library, _ in _WHEEL_LAYOUTS)
        + f" below the package `nvidia` ({', '.join(map(str, roots)) or 'absent'}); "
        "install nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12"
    )


def _load(library_path: Path, include: Path) -> Toolkit:
    try:
        library = ctypes.CDLL(str(library_path))
    except OSError as error:
        raise DeviceUnavailableError(f"NVRTC at {library_path} does not load: {error}") from error
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(numbers)
    # nvrtcVersion does not tell patch releases apart; the library's size does.
    version = f"{major.value}.{minor.value} {library_path.stat().st_size}"
    return Toolkit(library, include, version, tuple(numbers))


def supported_archs() -> tuple[str, ...]:
    """Every architecture the installed NVRTC compiles for, such as ``"sm_80"`` or ``"sm_90a"``."""
    return tuple(
        f"sm_{number}{suffix}"
        for number in toolkit().arch_numbers
        for suffix, since in _SUFFIX_SINCE.items()
        if number >= since
    )


def compile_cuda(
    source: str,
    *,
    options: Sequence[str] = (),
    arch: str = DEFAULT_ARCH,
    name: str = "kernel.cu",
) -> str:
    """Compile CUDA C++ text to PTX text.

    ``options`` are NVRTC's (``-DHEAD_DIM=64``, ``--fmad=false``, ``-lineinfo``, ``-Idir`` …); only
    the architecture is added to them, and the include paths of this project's device headers
    (``gpu/kernels/include``) and of the CUDA runtime. ``name`` is the file that messages and line
    information speak of; quoted includes are looked up beside it too.

    Raises ``CompileError`` with the compiler's log (file and line of each error), or for an
    architecture that the compiler does not know; ``DeviceUnavailableError`` without NVRTC.
    """
    _check(source, arch, name)
    kit = toolkit()
    directories = [
        Path(name).parent,
        *_include_options(options),
        INCLUDE_DIRECTORY,
        HOST_INCLUDE_DIRECTORY,
    ]
    headers = _included(source, directories, known_elsewhere=kit.include)
    if headers is None or any(option.startswith(_PRE_INCLUDE_OPTIONS) for option in options):
        return _compile(kit, source, options, arch, name)
    key = _digest((_CACHE_FORMAT, kit.version, arch, name, str(len(options)), *options, source))
    key = _digest((key, *(part for item in sorted(headers.items()) for part in item)))
    cached = cache_directory() / "ptx" / f"{key}.ptx"
    with contextlib.suppress(OSError):
        return cached.read_text(encoding="utf-8")
    ptx = _compile(kit, source, options, arch, name)
    _write_atomically(cached, ptx)
    return ptx


def cache_directory() -> Path:
    """Where compiled PTX is kept: ``SIMKIT_CACHE_DIR``, or the platform's place for caches."""
    if override := os.environ.get("SIMKIT_CACHE_DIR"):
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "simkit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simkit"


def _check(source: str, arch: str, name: str) -> None:
    match = _ARCH.fullmatch(arch)
    numbers = toolkit().arch_numbers
    if match is None or int(match[1]) not in numbers or int(match[1]) < _SUFFIX_SINCE[match[2]]:
        raise CompileError(
            f"{name}: the architecture {arch!r} is not supported; "
            f"NVRTC {toolkit().version.split()[0]} compiles for {', '.join(supported_archs())}"
        )
    if "\0" in source:
        line = source[: source.index("\0")].count("\n") + 1
        raise CompileError(f"{name}({line}): the source has a NUL character")


def _compile(kit: Toolkit, source: str, options: Sequence[str], arch: str, name: str) -> str:
    arguments = [
        # A virtual architecture: PTX is all that is asked for, so nothing is assembled.
        f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
        *options,
        f"--include-path={INCLUDE_DIRECTORY}",
        f"--include-path={kit.include}",
        f"--include-path={HOST_INCLUDE_DIRECTORY}",
    ]
    encoded = [os.fsencode(argument) for argument in arguments]
    program = ctypes.c_void_p()
    kit.call(
        "CreateProgram", ctypes.byref(program), source.encode(), os.fsencode(name), 0, None, None
    )
    try:
        try:
            kit.call(
                "CompileProgram",
                program,
                len(encoded),
                (ctypes.c_char_p * len(encoded))(*encoded),
            )
        except CompileError as error:
            log = kit.text("ProgramLog", program).strip()
            raise CompileError(
                f"{name} does not compile for {arch} with options {list(options)}:\n{log or error}"
            ) from None
        return kit.text("PTX", program)
    finally:
        kit.call("DestroyProgram", ctypes.byref(program))


def _include_options(options: Sequence[str]) -> Iterator[Path]:
    """The directories of ``-I`` and ``--include-path``, joined to the option or after it."""
    takes_next = False
    for option in options:
        if takes_next:
            yield Path(option)
            takes_next = False
        elif match := _INCLUDE_OPTION.fullmatch(option):
            takes_next = not match[1]
            if match[1]:
                yield Path(match[1])


def _included(
    source: str, directories: Sequence[Path], *, known_elsewhere: Path
) -> dict[str, str] | None:
    """Path and text of each header that the source includes, directly or not.

    Headers found in none of the ``directories`` are the toolkit's own if ``known_elsewhere`` has
    them; the compiler's version stands for those. None when the text does not tell the set: an
    include that is a macro, or a header that is nowhere (a later run may find it).
    """
    found: dict[str, str] = {}
    pending: list[tuple[str, Path]] = [(source, directories[0])]
    while pending:
        text, beside = pending.pop()
        for quoted, angled, macro in _INCLUDE.findall(text):
            if macro:
                return None
            header = quoted or angled
            path = _first_file(directory / header for directory in (beside, *directories))
            if path is None:
                if (known_elsewhere / header).is_file():
                    continue
                return None
            if str(path) not in found:
                found[str(path)] = path.read_text(encoding="utf-8", errors="replace")
                pending.append((found[str(path)], path.parent))
    return found


def _first_file(candidates: Iterable[Path]) -> Path | None:
    return next((path for path in candidates if path.is_file()), None)


def _digest(parts: Iterable[str]) -> str:
    """SHA-256 of the parts, each with its length, so that no two lists of parts are alike."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode())
        digest.update(encoded)
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    """Write to a file of its own, then rename: a reader sees all of the text or none of it.

    A cache that cannot be written costs time, not results, so that is no error.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
