"""All stage workers that a server may ask.

Owns the clients and the choice between workers of a kind. Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any, get_args

import torch

from mmserve.config import StageConfig
from mmserve.handover.client import Client, Watch
from mmserve.handover.wire import Kind, home_of
from mmserve.tiers.kv_object import Owner


class Stages:
    def __init__(
        self, config: StageConfig, owner: Owner, device: torch.device, watch: Watch
    ) -> None:
        addresses: dict[Kind, tuple[str, ...]]
        addresses = {"encode": config.encode, "prefill": config.prefill}
        home = home_of(device)
        self.clients = [
            Client(kind, address, config.key, owner, device, watch, home)
            for kind, own in addresses.items()
            for address in own
        ]

    def of(self, kind: Kind) -> list[Client]:
        """Those that can be asked now."""
        return [client for client in self.clients if client.kind == kind and client.connected]

    @property
    def ready(self) -> bool:
        return all(client.connected for client in self.clients)

    def told(self) -> dict[str, Any]:
        """By kind: how many there are to be, how many are there, and what they have to do. Any
        thread may ask."""
        told: dict[str, Any] = {}
        for kind in get_args(Kind):
            own = [client for client in self.clients if client.kind == kind]
            if own:
                connected = sum(client.connected for client in own)
                jobs = sum(client.num_jobs for client in own)
                told[kind] = {"workers": len(own), "connected": connected, "jobs": jobs}
        return told

    def close(self) -> None:
        for client in self.clients:
            client.close()
