"""The storages that a step makes, known by number and held weakly, so that watching a step does not make it need more memory."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Lasting:
    """Names of storages that steps meet and have not made, held weakly: one that lives on keeps its name when its values change."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}

    def name(self, storage: torch.UntypedStorage) -> str | None:
        """Return the name of a storage, or None where no step has met it."""
        return self._names[storage._cdata][1] if storage._cdata in self._names else None

    def add(self, storage: torch.UntypedStorage, name: str) -> None:
        """Take in a storage that is new, and forget those that are gone.

        Args:
            storage: the storage.
            name: its name.
        """
        for key in [key for key, (reference, _) in self._names.items() if reference.expired()]:
            del self._names[key]
        self._names[storage._cdata] = StorageWeakRef(storage), name


class Storages:
    """Numbers storages in the order they are met, and follows their lives.

    A weak reference keeps the identity of a storage from being given to another, and lets its memory go.

    Attributes:
        addresses: where each began, by number; a graph goes on writing there when the storage is gone.
        sizes: bytes of each.
        devices: device of each.
        peak_bytes: the most bytes that were alive at a time.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.devices: list[torch.device] = []
        self.peak_bytes = 0
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._gone: list[StorageWeakRef] = []
        self._bytes = 0

    def add(self, storage: torch.UntypedStorage) -> int:
        """Take in a storage that is new.

        Args:
            storage: one that an operator has just made.

        Returns:
            Its number.
        """
        number = len(self.sizes)
        self._numbers[storage._cdata] = number
        self._alive[number] = StorageWeakRef(storage)
        self.addresses.append(storage.data_ptr())
        self.sizes.append(0)
        self.devices.append(storage.device)
        self.grow(number, storage)
        return number

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, or None where the step has not made it."""
        return self._numbers.get(storage._cdata)

    def grow(self, number: int, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's size, which an `out=` may have changed.

        Args:
            number: its number.
            storage: the storage.
        """
        more = storage.nbytes() - self.sizes[number]
        if more > 0:
            self.sizes[number] += more
            self._bytes += more
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def sweep(self) -> None:
        """Take note of the storages that are gone."""
        for number in [number for number, reference in self._alive.items() if reference.expired()]:
            self._gone.append(self._alive.pop(number))
            self._bytes -= self.sizes[number]

    def survivors(self) -> list[int]:
        """Return the numbers of the storages that somebody holds."""
        self.sweep()
        return list(self._alive)
