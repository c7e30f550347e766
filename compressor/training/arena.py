"""Memory that the tapes of one engine take turns in: of several plans one replays at a time, and nothing in it outlasts a step."""

from __future__ import annotations

import torch


class Arena:
    """One storage per device, as large as the largest tape so far needs it.

    A tape that was made before a larger one keeps the storage that it was given.
    """

    def __init__(self) -> None:
        self._storages: dict[torch.device, torch.UntypedStorage] = {}

    def at_least(self, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
        """Give the storage of a device.

        Args:
            device: where it lies.
            num_bytes: what is needed.

        Returns:
            A storage of that many bytes or more; its content is undefined, and other tapes write to it too.
        """
        found = self._storages.get(device)
        if found is None or found.nbytes() < num_bytes:
            found = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
            self._storages[device] = found
        return found
