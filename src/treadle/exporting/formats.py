"""The formats of exported files, and the backends that can write them. Imports no framework."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..errors import ConfigurationError, did_you_mean


@dataclass(frozen=True)
class Package:
    """A package that writing or loading a file needs.

    Attributes:
        module: The name that is imported.
        install: What `pip install` gets.
    """

    module: str
    install: str

    @property
    def is_installed(self) -> bool:
        """Return whether the package can be imported."""
        return find_spec(self.module) is not None


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
    writers: Mapping[str, tuple[Package, ...]]
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    runtimes: tuple[Package, ...] = ()
    named: Collection[str] = ()


_TENSORFLOW = Package("tensorflow", "'treadle[tensorflow]'")
_ONNX = Package("onnx", "'treadle[export]'")
_TF2ONNX = Package("tf2onnx", "'treadle[export]'")
_JAX2ONNX = Package("jax2onnx", "jax2onnx")
_ONNX_RUNTIME = Package("onnxruntime", "'treadle[export]'")
_OPENVINO = Package("openvino", "'treadle[openvino]'")
_LITERT = Package("ai_edge_litert", "'treadle[litert]'")

_ON_TORCH_ALONE = (
    "a program of torch.export is made of PyTorch's operations: use savedmodel or onnx, or export "
    "with --backend torch"
)

FORMATS: Final[Mapping[str, Format]] = {
    form.name: form
    for form in (
        Format(
            "keras",
            "Keras model",
            ".keras",
            "",
            writers={"tensorflow": (), "jax": (), "torch": ()},
        ),
        Format(
            "savedmodel",
            "SavedModel",
            "",
            "tf_saved_model",
            writers={"tensorflow": (), "jax": (_TENSORFLOW,)},
            refused={
                "torch": "Keras converts PyTorch's operations for a SavedModel with torch_xla, and "
                "for a fixed batch size only: use onnx, torch or openvino, or export with "
                "--backend tensorflow"
            },
            runtimes=(_TENSORFLOW,),
            named=("tensorflow", "jax"),
        ),
        Format(
            "onnx",
            "ONNX",
            ".onnx",
            "onnx",
            writers={"tensorflow": (_TF2ONNX,), "jax": (_JAX2ONNX,), "torch": (_ONNX,)},
            runtimes=(_ONNX_RUNTIME,),
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
            runtimes=(_LITERT, _TENSORFLOW),
            named=("tensorflow",),
        ),
        Format(
            "openvino",
            "OpenVINO",
            ".xml",
            "openvino",
            writers={"tensorflow": (_OPENVINO,), "torch": (_OPENVINO,)},
            refused={
                "jax": "OpenVINO does not convert programs of JAX (XlaCallModule): use onnx, which "
                "OpenVINO reads, or export with --backend tensorflow or torch"
            },
            runtimes=(_OPENVINO,),
        ),
        Format(
            "torch",
            "PyTorch program",
            ".pt2",
            "torch",
            writers={"torch": ()},
            refused={"tensorflow": _ON_TORCH_ALONE, "jax": _ON_TORCH_ALONE},
            runtimes=(Package("torch", "'treadle[torch]'"),),
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
            raise ConfigurationError(
                f"the path {path} does not name a format: give one of {', '.join(FORMATS)}"
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
        if not package.is_installed:
            raise ConfigurationError(
                f"the format {form.name} needs the package {package.module} on the backend "
                f"{backend}, which is not installed: pip install {package.install}"
            )


def missing_runtime(form: Format) -> str:
    """Return what to install for loading a file, as a clause; empty if it can be loaded."""
    if not form.runtimes or any(package.is_installed for package in form.runtimes):
        return ""
    wanted = form.runtimes[0]
    return f"{wanted.module} is not installed: pip install {wanted.install}"
