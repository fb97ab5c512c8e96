"""Layouts of arrays on several devices, as a `keras.distribution` determines them.

JAX compiles one program for all devices from the layouts of its arguments (GSPMD). The program
computes what one device would compute with the global batch: a mean over the batch is the mean over
all devices. So a step needs no changes, and no operation that communicates.

A batch is split among the devices along the mesh's batch axis if its examples can be divided
evenly, and otherwise every device holds all of it, which is exact too. Variables have Keras'
layouts: each device holds all of them (`DataParallel`), or parts (`ModelParallel`).
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ...core import structures
from ...core.float64 import CONVERTED, is_on
from ...core.internals import wrapped
from ...core.split_arrays import Grid, OwnParts, Readable, region_of
from ...errors import ConfigurationError, DataError, listed
from ..base import RefusedDistribution
from ..step_context import context
from ..types import Tensor, Variable
from ..window import Rows, own_rows
from .patches import INTERNALS

VIRTUAL_DEVICES: Final = "--xla_force_host_platform_device_count"
_SET: Final = (
    "call treadle.setup(devices=…), or keras.distribution.set_distribution(…), before the task is "
    "created"
)
_LISTED: Final = 20  # variables in a message

_placed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Data sets on the device, by owner; each is copied there once."""


class Layouts:
    """The layouts of batches, data sets, results and variables on the devices of a mesh.

    Attributes:
        mesh: The devices.
        replicated: The layout of an array that every device holds completely.
        placed: Data sets on the devices, by owner; each is copied there once.

    Args:
        mesh: The devices.
        axis: The axis of the mesh along which batches are split; None if they are not split.
    """

    def __init__(self, mesh: Mesh, axis: str | None) -> None:
        self.mesh, self._axis = mesh, axis
        self._parts = mesh.shape[axis] if axis is not None else 1
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.placed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of_batch(self, x: Any, axis: int = 0) -> NamedSharding:
        """Return the layout of an array whose examples lie along one of its axes."""
        shape = np.shape(x)
        if self._axis is None or len(shape) <= axis or not shape[axis] or shape[axis] % self._parts:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self._axis))

    def of_inputs(self, inputs: tuple[list[Any], Any], axis: int) -> tuple[list[Any], Any]:
        """Return the layouts of the inputs of a window: arrays, and row indices or None.

        Args:
            inputs: Batches and None, or a data set and the indices of its rows.
            axis: The axis of examples in batches and in indices.
        """
        held, rows = inputs
        if rows is not None:
            return [self.replicated for _ in held], self.of_batch(rows, axis)
        return [self.of_batch(x, axis) for x in held], None

    def put(self, x: Any, axis: int = 0) -> Any:
        """Copy arrays of batches, whose examples lie along an axis, to the devices."""
        return put(x, self.of_batch(x, axis))

    def replicate(self, x: Any) -> Tensor:
        """Copy an array to every device."""
        return put(x, self.replicated)

    def split(self, batch: Sequence[Any]) -> list[Any]:
        """Split the arrays of a batch among the devices inside a trace."""
        return [jax.lax.with_sharding_constraint(x, self.of_batch(x)) for x in batch]

    def splitting_draws(self) -> AbstractContextManager[None]:
        """Return a context in which a trace splits random numbers as the batch is split.

        Otherwise each device would draw all of them, and compute whatever depends on no other array
        of the batch, such as the images that a generator makes from noise. Numbers of weights with
        as many rows as the batch are split too, which costs messages.
        """

        def split(original: Any, *args: Any, **kwargs: Any) -> Any:
            x, examples = original(*args, **kwargs), context().examples
            # In `jax.shard_map`, devices are divided already.
            mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
            by_hand = getattr(mesh, "manual_axes", ())
            if by_hand or x.ndim == 0 or x.shape[0] != examples or examples % self._parts:
                return x
            free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
            return jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, PartitionSpec(self._axis, *free))
            )

        names = [name for name in INTERNALS if name.startswith("random_") and self._parts > 1]
        return wrapped({INTERNALS[name]: split for name in names})


@cache
def _layouts(mesh: Mesh, axis: str | None) -> Layouts:
    """Return the layouts on a mesh; the same object for all programs, which share data sets."""
    return Layouts(mesh, axis)


def active_layouts() -> Layouts | None:
    """Return the layouts of Keras' distribution; None if it has one device, or there is none.

    Raises:
        ConfigurationError: The distribution is of Keras 3.9, which makes other layouts.
    """
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.device_mesh.devices.size == 1:
        return None
    mesh = getattr(distribution.device_mesh, "backend_mesh", None)
    if mesh is None:
        raise ConfigurationError(
            f"training on several devices of JAX needs Keras 3.10 or newer, but this is Keras "
            f"{keras.__version__}: install a newer version, or set no keras.distribution"
        )
    return _layouts(mesh, distribution.batch_dim_name)


def layout_of(variable: Variable) -> NamedSharding | None:
    """Return the layout with which a variable was created; None without a distribution."""
    layout = variable._layout
    return getattr(layout, "backend_layout", layout)


def standard(x: Any) -> Any:
    """Convert an array to a JAX type: 64-bit types become 32-bit, unless x64 is enabled.

    Raises:
        IntegerRangeError: If an integer does not fit.
    """
    array = np.asarray(x)
    if array.dtype in CONVERTED and is_on():
        return array.astype("float64", copy=False)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and dtype.kind in "iu" and array.size:
        for value in (array.min(), array.max()):
            if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                raise IntegerRangeError(int(value), dtype.name)
    return array.astype(dtype, copy=False)


class IntegerRangeError(DataError):
    """An array has an integer that JAX's type of integers cannot hold.

    Args:
        value: The integer.
        dtype: The name of JAX's type.
        path: The array's path in its batch, as in Python code.
    """

    def __init__(self, value: int, dtype: str, path: str = "") -> None:
        self.value, self.dtype = value, dtype
        super().__init__(
            f"the array{f' {path}' if path else ''} holds {value}, but JAX computes with {dtype}, "
            f"from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}: use smaller numbers, such as "
            "the indices of the distinct values, or treadle.setup(precision='float64'), which "
            "turns 64-bit types on"
        )


def standard_leaves(structure: Any) -> list[Any]:
    """Convert the arrays of a structure to NumPy's of JAX's types, which jit transfers fastest.

    Raises:
        IntegerRangeError: If an integer does not fit; the message names the array.
    """
    try:
        return [standard(x) for x in structures.flatten(structure)]
    except IntegerRangeError:
        for path, x in structures.with_paths(structure):
            try:
                standard(x)
            except IntegerRangeError as error:
                text = structures.text_of(path)
                raise IntegerRangeError(error.value, error.dtype, text) from None
        raise


def on_device(rows: Rows, layouts: Layouts | None) -> list[Any]:
    """Return the arrays of a data set on the device, or on each of several; copied there once."""
    placed = _placed if layouts is None else layouts.placed
    if rows.owner not in placed:
        put = jnp.asarray if layouts is None else layouts.replicate
        placed[rows.owner] = [put(x) for x in standard_leaves(rows.arrays)]
    return placed[rows.owner]


def forget_data_sets() -> None:
    """Drop the data sets on devices, which may be those of another float type."""
    _placed.clear()
    _layouts.cache_clear()


def distribute(devices: Any) -> None:
    """Set Keras' distribution: `DataParallel` over the first devices, or a given distribution.

    Raises:
        ConfigurationError: There are fewer devices.
    """
    if isinstance(devices, int):
        found = keras.distribution.list_devices()
        if devices > len(found):
            virtual = (
                "; for a trial on a CPU, start the process with the environment variable "
                f"XLA_FLAGS={VIRTUAL_DEVICES}={devices}, which divides it into virtual devices"
                if jax.default_backend() == "cpu"
                else ""
            )
            raise ConfigurationError(
                f"devices={devices}, but JAX has {len(found)}, {found[0]}"
                f"{f' to {found[-1]}' if len(found) > 1 else ''}: ask for at most {len(found)}"
                f"{virtual}"
            )
        if several() and devices < len(found):
            raise ConfigurationError(
                f"devices={devices}, but the {jax.process_count()} processes have {len(found)} "
                "together: leave it out, and all of them are used"
            )
        devices = keras.distribution.DataParallel(devices=found[:devices])
    keras.distribution.set_distribution(devices)


def described() -> str:
    """Describe the devices that steps run on; the bits of results depend on all of it."""
    found, layouts = jax.devices()[0], active_layouts()
    kind = "cpu" if found.platform == "cpu" else str(found)
    if layouts is None:
        return kind if kind == "cpu" else f"1 × {kind}"
    sizes = layouts.mesh.shape
    remarks = [f"{name} {size}" for name, size in sizes.items()] if len(sizes) > 1 else []
    if several():
        remarks.append(f"{jax.process_count()} processes")
    more = f" ({', '.join(remarks)})" if remarks else ""
    return f"{layouts.mesh.size} × {kind}{more}"


def refused(
    variables: Sequence[Variable], built: bool, joined: bool = False
) -> RefusedDistribution | None:
    """Return why a loop cannot train with variables, or None; see `base.Devices`.

    Args:
        variables: The variables of a task, without the states of seed generators.
        built: Whether all variables of a training step exist.
        joined: Whether Treadle has connected the processes of JAX.
    """
    if several() and not joined:
        fault = f"runs in {jax.process_count()} processes, which were not connected by Treadle"
        return RefusedDistribution(
            fault, "call treadle.setup, which connects them, instead of jax.distributed.initialize"
        )
    layouts = active_layouts()
    if several() and layouts is None:
        fault = f"runs in {jax.process_count()} processes, but no keras.distribution is set"
        return RefusedDistribution(
            fault, "do not call keras.backend.clear_session or set_distribution after treadle.setup"
        )
    for variable in variables:
        layout = layout_of(variable)
        mesh = getattr(layout, "mesh", None)
        if layouts is None and mesh is not None and mesh.size > 1:
            fault = f"was created for {mesh.size} devices by a keras.distribution that is not set"
            return RefusedDistribution(fault, f"{_SET}, and keep it set", variable)
        if layouts is not None and mesh != layouts.mesh:
            now = f"the keras.distribution over {layouts.mesh.size} devices"
            fault = (
                f"was created before {now} was set, so it is on one device"
                if mesh is None
                else f"was created under another distribution than {now} that is set"
            )
            return RefusedDistribution(fault, _SET, variable)
    model = isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel)
    if built and layouts is not None and model and not any(map(_has_split_layout, variables)):
        paths = [v.path for v in variables if v.trainable]
        return RefusedDistribution(
            "runs under a keras.distribution.ModelParallel that splits no variable",
            "write keys of its LayoutMap as regular expressions that match the whole path of a "
            f"variable. The paths are {listed(paths, _LISTED)}",
        )
    return None


def _has_split_layout(variable: Variable) -> bool:
    layout = layout_of(variable)
    return layout is not None and any(axis is not None for axis in layout.spec)


def gives_own_rows(examples: int) -> bool:
    """Return whether each device needs rows of a batch that its own process computes.

    It does not if the mesh splits the batch in another way, or not at all.
    """
    layouts = active_layouts()
    if layouts is None:
        return not several()
    shape = (examples,)
    for device, index in layouts.of_batch(np.empty(shape)).devices_indices_map(shape).items():
        first, count = own_rows(examples, device.process_index, jax.process_count())
        start, stop, _ = index[0].indices(examples)
        if start < first or stop > first + count:
            return False
    return True


def adopt(variables: Iterable[Variable]) -> None:
    """Give variables that were created before the distribution a layout on its devices."""
    distribution = keras.distribution.distribution()
    for variable in variables:
        if variable._layout is None:
            variable._layout = distribution.get_variable_layout(variable)
            variable._direct_assign(variable._value)


def several() -> bool:
    """Return whether JAX runs in several processes."""
    return jax.process_count() > 1


def put(x: Any, layout: Sharding) -> Any:
    """Copy an array that every process has to the devices; each process sends the parts of its own.

    `jax.device_put` would first compare the arrays of all processes.
    """
    if not several():
        return jax.device_put(x, layout)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])


def put_stored(x: Readable, layout: Sharding, dtype: Any) -> jax.Array:
    """Copy an array to the devices, of which each process reads what its devices hold."""
    read: dict[str, np.ndarray] = {}  # devices may hold the same

    def part(index: Any) -> np.ndarray:
        if str(index) not in read:
            read[str(index)] = np.asarray(x[index], dtype)
        return read[str(index)]

    return jax.make_array_from_callback(x.shape, layout, part)


def own_parts(x: jax.Array) -> OwnParts:
    """Return the parts of a split array that this process writes to checkpoints.

    Processes that hold the same parts write them in turns.
    """
    everywhere = x.sharding.devices_indices_map(x.shape)
    regions = {device: region_of(index, x.shape) for device, index in everywhere.items()}
    grid = Grid.of(x.shape, list(regions.values()))
    numbers = {str(region): number for number, region in enumerate(grid.regions())}
    holders: list[set[int]] = [set() for _ in numbers]
    for device, region in regions.items():
        holders[numbers[str(region)]].add(device.process_index)
    owners = [sorted(them)[number % len(them)] for number, them in enumerate(holders)]
    own: dict[int, np.ndarray] = {}
    for shard in x.addressable_shards:
        number = numbers[str(region_of(shard.index, x.shape))]
        if owners[number] == jax.process_index() and number not in own:
            own[number] = np.array(shard.data)
    return OwnParts(grid, np.dtype(x.dtype), tuple(owners), own)


def is_finite(x: jax.Array) -> bool:
    """Return whether all values of an array are finite, of those that this process holds."""
    parts = [shard.data for shard in x.addressable_shards] if is_split(x) else [x]
    return all(bool(np.isfinite(np.asarray(part)).all()) for part in parts)


def is_split(x: Any) -> bool:
    """Return whether devices of other processes hold parts of an array."""
    return not (x.is_fully_addressable or x.is_fully_replicated)


def whole(x: Any) -> np.ndarray:
    """Return an array of the devices as NumPy; all processes must call this if it is split."""
    if isinstance(x, jax.Array) and is_split(x):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
