"""The argument map_location of torch.load: which device each tensor is loaded to."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from trunkline._tensor_io.memory import Device, device_argument
from trunkline._torch_or_numpy import torch

# Return the device for tensors that were saved on a device: of "cpu" or "cuda:1".
DeviceOf: TypeAlias = Callable[[str], torch.device]
StorageMapper: TypeAlias = (
    "Callable[[torch.UntypedStorage, str], torch.UntypedStorage | torch.TypedStorage | None]"
)
MapLocation: TypeAlias = "Device | Mapping[str, Device] | StorageMapper"


def device_of(device: torch.device) -> DeviceOf:
    """Return a function that names one device for all tensors."""
    return lambda _: device


def devices_argument(map_location: MapLocation, path: str | None = None) -> DeviceOf:
    """Return the device for each saved location, as torch.load(map_location=...) chooses it.

    A dict maps locations; those that it lacks stay where they were saved. A function gets an empty storage
    and the location, and the device of the storage that it returns counts; None: where it was saved.

    Raises TypeError and ValueError for anything else, Unsupported for devices that are not in reach.
    """
    if not isinstance(map_location, Mapping) and not callable(map_location):
        return device_of(device_argument(map_location, path, "map_location"))
    known: dict[str, torch.device] = {}

    def find(location: str) -> torch.device:
        if location not in known:
            known[location] = _mapped(map_location, location, path)
        return known[location]

    return find


def _mapped(
    map_location: "Mapping[str, Device] | StorageMapper", location: str, path: str | None
) -> torch.device:
    if isinstance(map_location, Mapping):
        return device_argument(map_location.get(location, location), path, "map_location")
    result = map_location(torch.UntypedStorage(0, device="cpu"), location)  # type: ignore[no-untyped-call]
    if result is None:
        return device_argument(location, path, "map_location")
    if not isinstance(result, torch.UntypedStorage | torch.TypedStorage):
        raise TypeError(
            "map_location: the function must return the storage that it gets, moved to a device, or None, "
            f"not {type(result).__name__}"
        )
    return device_argument(result.device, path, "map_location")
