"""Where and with what a result was measured."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "dspark-jax")


def of_machine() -> dict[str, Any]:
    """Date, device and versions, as JSON values."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "platform": device.platform,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from the checkout)"


def _cpu_name() -> str:
    with (
        contextlib.suppress(OSError),  # not a Linux machine
        open("/proc/cpuinfo", encoding="utf-8") as file,
    ):
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
