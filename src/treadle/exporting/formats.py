"""The formats of exported files, the backends that can write them, and their places.

A file is written in a temporary folder and then renamed. Imports no framework.
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..errors import ConfigurationError, did_you_mean

_NAMES_WEIGHTS, _WEIGHTS = ".xml", ".bin"  # the two files of OpenVINO
_GRAPH: Final = "saved_model.pb"


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    Attributes:
        name: The name, as in `format="onnx"`.
        title: The name in messages.
        suffix: The suffix of the file; empty for a folder.
        exporter: The name of the format in `keras.Model.export`; empty for `keras.Model.save`.
        writers: The packages that writing needs, by backend; other backends cannot write it.
        refused: Why a backend cannot write it, and what to use instead, by backend.
        runtimes: The packages of which one loads the file; empty if Keras itself loads it.
        named: The backends on which outputs keep the names that `predict_step` returns. On others
            they are a tuple in the order of its structure, because exporters lose names,
            and some of them order outputs in another way.
    """

    name: str
    title: str
    suffix: str
    exporter: str
    writers: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    runtimes: tuple[str, ...] = ()
    named: Collection[str] = ()


_ON_TORCH_ALONE = (
    "a program of torch.export is made of PyTorch's operations: use savedmodel or onnx, or export "
    "with --backend torch"
)

FORMATS: Final[Mapping[str, Format]] = {
    form.name: form
    for form in (
        Format(
            "keras", "Keras model", ".keras", "", writers={"tensorflow": (), "jax": (), "torch": ()}
        ),
        Format(
            "savedmodel",
            "SavedModel",
            "",
            "tf_saved_model",
            writers={"tensorflow": (), "jax": ("tensorflow",)},
            refused={
                "torch": "Keras converts PyTorch's operations for a SavedModel with torch_xla, and "
                "for a fixed batch size only: use onnx, torch or openvino, or export with "
                "--backend tensorflow"
            },
            runtimes=("tensorflow",),
            named=("tensorflow", "jax"),
        ),
        Format(
            "onnx",
            "ONNX",
            ".onnx",
            "onnx",
            writers={"tensorflow": ("tf2onnx",), "jax": ("jax2onnx",), "torch": ("onnx",)},
            runtimes=("onnxruntime",),
            named=("tensorflow",),
        ),
        Format(
            "litert",
            "LiteRT",
            ".tflite",
            "litert",
            writers={"tensorflow": ()},
            refused={
                "jax": "Keras has no LiteRT exporter for JAX: use savedmodel or onnx, or export "
                "with --backend tensorflow",
                "torch": "Keras writes LiteRT on PyTorch for a fixed batch size only, with "
                "litert-torch: use onnx or torch, or export with --backend tensorflow",
            },
            runtimes=("ai_edge_litert", "tensorflow"),
            named=("tensorflow",),
        ),
        Format(
            "openvino",
            "OpenVINO",
            ".xml",
            "openvino",
            writers={"tensorflow": ("openvino",), "torch": ("openvino",)},
            refused={
                "jax": "OpenVINO does not convert programs of JAX (XlaCallModule): use onnx, which "
                "OpenVINO reads, or export with --backend tensorflow or torch"
            },
            runtimes=("openvino",),
        ),
        Format(
            "torch",
            "PyTorch program",
            ".pt2",
            "torch",
            writers={"torch": ()},
            refused={"tensorflow": _ON_TORCH_ALONE, "jax": _ON_TORCH_ALONE},
            runtimes=("torch",),
            named=("torch",),
        ),
    )
}


def chosen_format(name: str | None, path: Path | None) -> Format:
    """Return the format of a name, or else of the suffix of a path.

    Args:
        name: The name of a format, or None.
        path: Where the file is written, or None for a default path.

    Raises:
        ConfigurationError: There is no such format, or the path has another suffix.

    Example:
        >>> chosen_format(None, Path("digits.onnx")).name
        'onnx'
    """
    if name is None:
        suffix = path.suffix if path is not None else ""
        name = next((f.name for f in FORMATS.values() if f.suffix and f.suffix == suffix), None)
        if name is None:
            what = "an export needs a format" if path is None else f"{path} names no format"
            raise ConfigurationError(
                f"{what}: write format={next(iter(FORMATS))!r} (--format), or another of "
                f"{', '.join(FORMATS)}"
            )
    form = FORMATS.get(name)
    if form is None:
        raise ConfigurationError(
            f"format={name!r}: there is no such format.{did_you_mean(name, FORMATS)}"
        )
    if path is not None and form.suffix and path.suffix != form.suffix:
        raise ConfigurationError(
            f"the path {path} ends with {path.suffix or 'no suffix'}, but a file in the format "
            f"{form.name} ends with {form.suffix}: write {path.with_suffix(form.suffix)}"
        )
    return form


def check_writable(form: Format, backend: str) -> None:
    """Check that a backend can write a format.

    Args:
        form: The format.
        backend: The name of a backend; nothing is checked for an unknown one.

    Raises:
        ConfigurationError: It cannot, or a package is missing.
    """
    if backend in form.refused:
        raise ConfigurationError(
            f"the format {form.name} cannot be written on the backend {backend}: "
            f"{form.refused[backend]}"
        )
    for package in form.writers.get(backend, ()):
        if find_spec(package) is None:
            raise ConfigurationError(
                f"the format {form.name} needs the package {package} on the backend {backend}, "
                f"which is not installed: pip install {package}"
            )


def missing_runtime(form: Format) -> str:
    """Return what to install for loading a file, as a clause; empty if it can be loaded."""
    if not form.runtimes or any(find_spec(package) for package in form.runtimes):
        return ""
    wanted = form.runtimes[0]
    return f"{wanted} is not installed: pip install {wanted}"


def check_free(form: Format, path: Path, overwrite: bool) -> None:
    """Check that a file may be written, before anything is computed.

    Raises:
        ConfigurationError: Something else is there.
    """
    for place in _places(path):
        if os.path.lexists(place) and not overwrite:
            raise ConfigurationError(
                f"{place} exists: choose another path, or replace it with overwrite=True (--force)"
            )
        alike = place.is_file() if form.suffix else (place / _GRAPH).is_file()
        if place.is_symlink() or (place.exists() and not alike):
            raise ConfigurationError(
                f"{place} is not a file in the format {form.name}, so it is not replaced: choose "
                "another path"
            )


def _places(path: Path) -> list[Path]:
    """Return the path of an exported file, and that of the file with its weights if it has one."""
    return [path, path.with_suffix(_WEIGHTS)] if path.suffix == _NAMES_WEIGHTS else [path]


@contextmanager
def temporary_folder(path: Path) -> Generator[Path]:
    """Yield a new folder next to a path, which is removed at the end.

    Raises:
        ConfigurationError: The folder of the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ConfigurationError(
            f"cannot write in {path.parent}: {error.strerror or error}. Choose another path"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(written: Path, path: Path) -> None:
    """Move what was written to its place; it replaces an earlier file or folder.

    Args:
        written: The file or folder, alone in a temporary folder but for files that belong to it.
        path: Its place.

    Raises:
        ConfigurationError: A further file, as for weights of more than 2 GB, would replace one that
            belongs to something else.
    """
    if written.is_dir():
        if path.exists():
            os.replace(path, written.parent / "replaced")  # is removed with the temporary folder
        os.replace(written, path)
        return
    further = {path.with_name(file.name) for file in written.parent.iterdir()} - {*_places(path)}
    taken = [place for place in sorted(further) if os.path.lexists(place)]
    if taken and not os.path.lexists(path):
        raise ConfigurationError(
            f"{taken[0]} exists, and the exported file would replace it: choose another path, or "
            "move it away"
        )
    # The file that names the others is last, so that it is never there without them.
    for file in sorted(written.parent.iterdir(), key=lambda file: file == written):
        os.replace(file, path.with_name(file.name))


def size_of(path: Path) -> int:
    """Return the number of bytes of an exported file, with the files that belong to it."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in _places(path))
