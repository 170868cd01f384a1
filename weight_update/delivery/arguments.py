"""What both faces make of their arguments: the options of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from weight_update.errors import ConfigurationError
from weight_update.options import (
    DeviceLike,
    HttpOptions,
    UpdateOptions,
    check_device_exists,
    parse_device,
    read_bucket_bytes,
    read_directory,
)
from weight_update.transports.address import read_master_address
from weight_update.weights.name_map import check_name_map

_GROUPS = ("backend", "load_format")
# By what was chosen, the options that only another choice would look at. Not among them: what
# TorchRL's programs give whatever they choose (addresses, devices), and `trainer_ranks`, which says
# who calls, too.
_UNUSED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("transport", "broadcast"): ("directory",),
    ("transport", "ipc"): ("directory",),
    ("transport", "disk"): _GROUPS,
    ("lora", "adapter"): ("directory", "bucket_bytes", *_GROUPS),
    ("lora", "merge"): ("lora_name",),
}


def read_options(arguments: Mapping[str, Any]) -> UpdateOptions:
    """Options from a constructor's arguments, and from the environment where those are None.

    Args:
        arguments: By name, such as ``locals()`` at the constructor's start; what is no option is
            passed over. Without a ``directory`` among them, that of the environment is not read.

    Raises:
        ConfigurationError: An argument or a variable cannot work, or an argument would be passed
            over under what others choose.

    Example:
        >>> read_options({"self": None, "timeout": 5.0, "tls_verify": False}).http.tls_verify
        False
    """
    given = {f.name: arguments[f.name] for f in fields(UpdateOptions) if f.name in arguments}
    http = {f.name: arguments[f.name] for f in fields(HttpOptions) if f.name in arguments}
    _check_named_device(given.get("device"))
    check_name_map(given.get("name_map"))
    asked = dict(given)
    given["master_address"] = read_master_address(given.get("master_address"))
    if given.get("bucket_bytes") is None:
        given["bucket_bytes"] = read_bucket_bytes()
    if "directory" in given:
        given["directory"] = read_directory(given["directory"])
    options = UpdateOptions(**given, http=HttpOptions.read(**http))
    _refuse_unused(options, asked)
    return options


def unusual(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of options by name, those that are not as they are by default.

    Example:
        >>> unusual({"timeout": 5.0, "lora": "merge"})
        {'timeout': 5.0}
    """
    usual = {f.name: f.default for f in fields(UpdateOptions)}
    return {name: value for name, value in arguments.items() if value != usual[name]}


def _refuse_unused(options: UpdateOptions, asked: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for an argument that would be passed over without a word."""
    given = unusual(asked)
    for (chooser, choice), names in _UNUSED.items():
        unused = [name for name in names if name in given]
        if unused and getattr(options, chooser) == choice:
            name = unused[0]
            raise ConfigurationError(
                f"{name}={given[name]!r} has no use with {chooser}={choice!r}",
                remedy=f"leave {name}= out, or choose another {chooser}=",
            )


def _check_named_device(device: DeviceLike) -> None:
    """Raises ConfigurationError if a device is named that torch does not see."""
    # A bare index is TorchRL's default and follows the scheme to the machine that has the GPU;
    # who names a device means one that exists.
    if isinstance(device, (str, torch.device)):
        check_device_exists(parse_device(device))
