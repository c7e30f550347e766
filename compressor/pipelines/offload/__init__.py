"""Where activations wait between targets: on the device, on the host, in a scratch file."""

from __future__ import annotations
