"""Ray actors that hold engines, written as frameworks write them; imported where actors run."""

from __future__ import annotations

import os
import time
from typing import Any

import requests


class RoutedEngine:
    """An actor whose methods call the routes of a server, and that notes which.

    Args:
        url: The server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._calls: list[str] = []
        self._faults: dict[str, str] = {}

    def post(self, name: str, body: dict[str, Any]) -> Any:
        self._calls.append(name)
        fault = self._faults.pop(name, None)
        if fault == "raise":
            raise RuntimeError(f"the scheduler\nis gone in {name}")
        if fault == "die":
            os._exit(1)
        if fault is not None:
            time.sleep(float(fault))
        response = requests.post(f"{self._url}/{name}", json=body, timeout=60)
        response.raise_for_status()
        return response.json()

    def calls(self) -> list[str]:
        """What was called since the last look."""
        calls, self._calls = self._calls, []
        return calls

    def break_next(self, name: str, fault: str) -> None:
        self._faults[name] = fault

    def get_server_info(self) -> Any:
        return requests.get(f"{self._url}/server_info", timeout=60).json()

    def get_model_info(self) -> Any:
        return requests.get(f"{self._url}/model_info", timeout=60).json()

    def pause_generation(self, mode: str = "abort") -> Any:
        return self.post("pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self.post("continue_generation", {})

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        answer = self.post("begin_weight_update", {"selector": selector})
        return answer["success"], answer["message"]

    def end_weight_update(self) -> tuple[bool, str]:
        answer = self.post("end_weight_update", {})
        return answer["success"], answer["message"]

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> Any:
        body = {"serialized_named_tensors": serialized_named_tensors, "load_format": load_format}
        return self.post("update_weights_from_tensor", {**body, "flush_cache": flush_cache})

    def update_weights_from_distributed(self, **body: Any) -> Any:
        return self.post("update_weights_from_distributed", body)

    def init_weights_update_group(self, **body: Any) -> Any:
        return self.post("init_weights_update_group", body)

    def destroy_weights_update_group(self, group_name: str) -> Any:
        return self.post("destroy_weights_update_group", {"group_name": group_name})

    def update_weight_version(self, weight_version: str) -> Any:
        body = {"new_version": weight_version, "abort_all_requests": False}
        return self.post("update_weight_version", body)

    def flush_cache(self) -> bool:
        self._calls.append("flush_cache")
        return requests.post(f"{self._url}/flush_cache", json={}, timeout=60).ok

    def weights_checker(self, action: str) -> Any:
        return self.post("weights_checker", {"action": action})


class EngineWithoutSessions:
    """What an actor around an older release has: no session, and it knows no mode but its own."""

    def __init__(self, url: str) -> None:
        self._inner = RoutedEngine(url)

    def get_server_info(self) -> Any:
        return self._inner.get_server_info()

    def get_model_info(self) -> Any:
        return self._inner.get_model_info()

    def pause_generation(self) -> Any:
        return self._inner.pause_generation()

    def continue_generation(self) -> Any:
        return self._inner.continue_generation()

    def flush_cache(self) -> None:
        self._inner.flush_cache()

    def update_weight_version(self, new_version: str) -> Any:
        return self._inner.update_weight_version(new_version)

    def update_weights_from_tensor(
        self, named_tensors: list[str], load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        answer = self._inner.update_weights_from_tensor(named_tensors, load_format, flush_cache)
        return answer["success"], answer["message"]


class ServerStarter:
    """An actor that starts a server, and tells no more of it than where it is."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").rpartition(":")

    def get_server_host(self) -> str:
        return self._host

    def get_server_port(self) -> int:
        return int(self._port)


class OwnEngine(RoutedEngine):
    """An actor that starts its engine itself, which ends with it.

    Args:
        folder: Of the model.
    """

    def __init__(self, folder: str) -> None:
        from weight_update.reference_engine import ReferenceEngine

        self._engine = ReferenceEngine(folder)
        super().__init__(self._engine.url)

    def generate(self, prompt: list[int], count: int) -> list[int]:
        return list(self._engine.generate(prompt, count)["output_ids"])
