"""onnxruntime without its telemetry: the only place that imports it.

Wheels from 1.31 on send events over the network, and keep a device id and a database under ~/.cache, unless
the variable is set before the library is loaded.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

ort.disable_telemetry_events()  # in case the program had imported it before

__all__ = ["ort"]
